"""Pinned npm packages, fetched and checked but never run, and tars that are the same bytes every time."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from data.errors import ConfigError, DataError


@dataclass(frozen=True)
class Package:
    """One npm package, pinned to its bytes. Nothing of it is ever run."""

    name: str
    version: str
    sha256: str

    @property
    def pin(self) -> str:
        return f"{self.name}@{self.version}"


def fetch(packages: Iterable[Package], folder: Path) -> dict[Package, Path]:
    """Download packages with `npm pack`; returns package → .tgz. DataError when one is not what was pinned."""
    if shutil.which("npm") is None:
        raise ConfigError(
            "build: npm is not on the PATH; it downloads the pinned packages. Install Node.js, or use data/samples."
        )
    return {package: _fetch_one(package, folder) for package in packages}


def _fetch_one(package: Package, folder: Path) -> Path:
    command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(folder), package.pin]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"build: `npm pack {package.pin}` failed: {reason[0]}")
    path = folder / done.stdout.split()[-1]
    if sha256(path) != package.sha256:
        raise DataError(f"build: {package.pin} has SHA-256 {sha256(path)}, pinned is {package.sha256}.")
    return path


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """A tar whose bytes depend on the members alone: no time, owner or machine in it."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)  # mtime, uid, gid 0, mode 0644
            info.size = len(data)
            tar.addfile(info, BytesIO(data))


def sha256(path: Path) -> str:
    """Hex digest of a file, or "missing"."""
    if not path.is_file():
        return "missing"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
