"""Redact credentials in texts and JSON values: in URLs, of netrc and the environment, in fields like `password`."""

import netrc
import os
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

HIDDEN = "[redacted]"
NAMES = re.compile("(api|access|account|private|secret|storage)_?key|token|secret|password", re.I)  # not image_key
VARIABLES = re.compile(f"({NAMES.pattern})$", re.IGNORECASE)  # not TOKENIZERS_PARALLELISM
SHORTEST = 8  # characters of a secret; a shorter text may be part of any word
USER = re.compile(r"(?<=://)[^/?#\s]*@")
# The query of an http URL; elsewhere "?" is part of a glob. It ends at a space, a quote, the "::" between sources or a
# weight such as "@2", because a signature may hold any other character.
QUERY = re.compile(
    r"""(\bhttps?://[^\s?]*)\?(?:(?!::)[^\s"'])*?(?=(?:@\d+(?:\.\d+)?)?(?:::|[:.,;]?(?:["'\s]|$)))""", re.I
)


@cache
def known_secrets() -> list[str]:
    """Return the secrets in netrc and in environment variables with names such as HF_TOKEN, the longest first.

    Each is also there in the base64 form that W&B (Weights & Biases) sends in its requests. Secrets of fewer than
    SHORTEST characters are left out. They are looked up once in a process: later changes of the environment are not
    seen.
    """
    texts = {text for name, text in os.environ.items() if VARIABLES.search(name)}
    texts |= {password for _, _, password in netrc_hosts().values()}
    secrets = {text for text in texts if len(text) >= SHORTEST}
    sent = {b64encode(f"api:{secret}".encode()).decode() for secret in secrets}
    return sorted(secrets | sent, key=len, reverse=True)


def netrc_hosts() -> Mapping[str, tuple[str, str, str]]:
    """Read the file $NETRC or ~/.netrc and return host -> (login, account, password); empty if it cannot be read."""
    try:
        return netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc")).hosts
    except (OSError, ValueError, netrc.NetrcParseError):
        return {}


def without_credentials(text: str) -> str:
    """Return `text` with "[redacted]" in place of credentials.

    These are known secrets, users and passwords in URLs, and the query strings of http URLs, which may hold signatures.
    """
    for secret in known_secrets():
        text = text.replace(secret, HIDDEN)
    return QUERY.sub(rf"\1?{HIDDEN}", USER.sub(f"{HIDDEN}@", text))


def without_secrets(tree: Any, by_name: bool = False) -> Any:
    """Return a copy of a JSON value with `without_credentials` applied to its strings, except the keys of mappings.

    Tuples become lists. by_name: whether each string is replaced by '[redacted]' whose name contains a word of NAMES,
    such as api_key, token or password. It is needed in a copy that may be sent to other machines.
    """
    if isinstance(tree, str):
        return without_credentials(tree)
    if isinstance(tree, list | tuple):
        return [without_secrets(value, by_name) for value in tree]
    if not isinstance(tree, Mapping):
        return tree
    hidden = {name for name, value in tree.items() if by_name and isinstance(value, str) and NAMES.search(str(name))}
    return {name: HIDDEN if name in hidden else without_secrets(value, by_name) for name, value in tree.items()}


def public_path(path: str) -> str:
    """Shorten a path for publication, so that it reveals little of the folders around it.

    An absolute path, or one that starts with "~", becomes relative if it lies in the working folder, else "…/" and its
    last two parts. A relative path stays; a URL loses its credentials.
    """
    if "://" in path:
        return without_credentials(path)
    full = Path(os.path.expanduser(path))  # not of Path, which raises for a text that begins with ~ and is no path
    if full.is_relative_to(Path.cwd()):
        return str(full.relative_to(Path.cwd()))
    return "/".join(["…", *full.parts[-2:]]) if full.is_absolute() else path
