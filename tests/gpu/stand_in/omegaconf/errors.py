"""See the package: nothing raises these here."""


class OmegaConfBaseException(Exception):
    full_key = ""


class ValidationError(OmegaConfBaseException):
    pass
