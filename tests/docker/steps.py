"""Reads a Dockerfile and a .dockerignore: the instructions in order, and the files that travel to the builder.

Knows what ours uses and refuses the rest. After the Dockerfile reference and moby's patternmatcher.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

WORDS = "FROM ARG ENV WORKDIR COPY RUN USER LABEL ENTRYPOINT CMD".split()
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Step:
    """One instruction: its word, its flags (--from=base: {"from": "base"}) and what follows, on one line."""

    word: str
    flags: Mapping[str, str]
    text: str

    def listed(self) -> list[str]:
        """The words of the JSON form, or of the plain one."""
        return json.loads(self.text) if self.text.startswith("[") else self.text.split()

    def pairs(self, variables: Mapping[str, str]) -> dict[str, str]:
        """key=value … of ARG, ENV and LABEL; a key alone has the value ""."""
        words = (expanded(word, variables).partition("=") for word in shlex.split(self.text))
        return {key: value for key, _, value in words}


def read_steps(dockerfile: Path) -> list[Step]:
    """The instructions in order. Raises ValueError for one that is not in WORDS."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [_step(line) for line in joined.splitlines() if line.strip()]


def _step(line: str) -> Step:
    word, _, rest = line.strip().partition(" ")
    if word not in WORDS or "<<" in rest:
        raise ValueError(f"not understood: {line}")
    flags: dict[str, str] = {}
    while match := re.match(r"--(\w+)=(\S+)\s+", rest):
        flags[match[1]] = match[2]
        rest = rest[match.end() :]
    return Step(word, flags, rest.strip())


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """$NAME and ${NAME} replaced; what is not set is empty, as for the builder."""
    return VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ""), text)


def context(folder: Path) -> list[Path]:
    """The files and links under `folder` that .dockerignore lets through, relative and sorted."""
    patterns = list(_patterns(folder / ".dockerignore"))

    def sent(path: str) -> bool:
        return not next((excluded for pattern, excluded in reversed(patterns) if pattern.fullmatch(path)), False)

    found = (Path(at, name) for at, folders, names in os.walk(folder) for name in (*folders, *names))
    paths = (path.relative_to(folder) for path in found if path.is_symlink() or path.is_file())
    return sorted(path for path in paths if sent(path.as_posix()))


def _patterns(file: Path) -> Iterator[tuple[re.Pattern[str], bool]]:
    """Each pattern, which also takes what lies below, and whether it keeps out; the last that matches decides."""
    for line in file.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = re.escape(line.lstrip("!").strip("/")).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*")
        yield re.compile(f"{pattern}(?:/.*)?"), not line.startswith("!")
