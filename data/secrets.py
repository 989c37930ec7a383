"""What no file and no line shows: credentials in URLs, secrets of the environment, texts under names like password."""

from __future__ import annotations

import netrc
import os
import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

HIDDEN = "[redacted]"
NAMES = re.compile("(api|access|account|private|storage)_?key|token|secret|password", re.IGNORECASE)  # no image_key
VARIABLES = re.compile(f"({NAMES.pattern})$", re.IGNORECASE)  # TOKENIZERS_PARALLELISM is none
SHORTEST = 8  # characters of a secret of the environment: fewer may be part of any word
USER = re.compile(r"(?<=://)[^/?#\s]*@")
# Of http alone: elsewhere "?" is part of a glob. Up to a space, a quote, the "::" that joins sources or the "@2" that
# weighs one, since a signature may hold any other character.
QUERY = re.compile(
    r"""(\bhttps?://[^\s?]*)\?(?:(?!::)[^\s"'])*?(?=(?:@\d+(?:\.\d+)?)?(?:::|[:.,;]?(?:["'\s]|$)))""", re.I
)


@cache
def known_secrets() -> list[str]:
    """The secrets of the environment and of netrc, and what W&B sends of them; the longest first. Read once."""
    texts = {text for name, text in os.environ.items() if VARIABLES.search(name)}
    texts |= {password for _, _, password in netrc_hosts().values()}
    secrets = {text for text in texts if len(text) >= SHORTEST}
    sent = {b64encode(f"api:{secret}".encode()).decode() for secret in secrets}
    return sorted(secrets | sent, key=len, reverse=True)


def netrc_hosts() -> Mapping[str, tuple[str, str, str]]:
    """Host → (login, account, password), out of $NETRC or ~/.netrc."""
    try:
        return netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc")).hosts
    except (OSError, ValueError, netrc.NetrcParseError):
        return {}


def without_credentials(text: str) -> str:
    """`text` without known secrets and without user, password and query (where signatures stand) of the URLs in it."""
    for secret in known_secrets():
        text = text.replace(secret, HIDDEN)
    return QUERY.sub(rf"\1?{HIDDEN}", USER.sub(f"{HIDDEN}@", text))


def without_secrets(tree: Any) -> Any:
    """A copy of a tree of JSON without the credentials in its texts, keys of mappings aside."""
    if isinstance(tree, Mapping):
        return {name: without_secrets(value) for name, value in tree.items()}
    if isinstance(tree, str):
        return without_credentials(tree)
    return [without_secrets(value) for value in tree] if isinstance(tree, list | tuple) else tree


def redacted(tree: Any) -> Any:
    """`without_secrets`, and without the texts under names like api_key, token, password: for what leaves here."""
    if isinstance(tree, Mapping):
        secret = {name for name, value in tree.items() if isinstance(value, str) and NAMES.search(str(name))}
        return {name: HIDDEN if name in secret else redacted(value) for name, value in tree.items()}
    return [redacted(value) for value in tree] if isinstance(tree, list | tuple) else without_secrets(tree)


def public_path(path: str) -> str:
    """A path as seen from here, of one elsewhere the last two parts: whose disk it is on is nobody's business."""
    if "://" in path:
        return without_credentials(path)
    whole = Path(path).expanduser()
    if whole.is_relative_to(Path.cwd()):
        return str(whole.relative_to(Path.cwd()))
    return "/".join(["…", *whole.parts[-2:]]) if whole.is_absolute() else path
