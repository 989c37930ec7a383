"""Pinned npm and Debian packages, fetched and checked but never run, and tars that are the same bytes every time."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from dyad.data.base.errors import ConfigError, DataError


@dataclass(frozen=True)
class Package(ABC):
    """One package, pinned to its bytes. Nothing of it is ever run."""

    name: str
    version: str
    sha256: str

    @property
    @abstractmethod
    def pin(self) -> str:
        """Name and version as the package's own tool writes them."""

    @abstractmethod
    def download(self, folder: Path) -> Path:
        """Put the archive into `folder` with the ordinary client; returns its path."""


class NpmPackage(Package):
    @property
    def pin(self) -> str:
        return f"{self.name}@{self.version}"

    def download(self, folder: Path) -> Path:
        _require("npm", "Install Node.js")
        command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(folder), self.pin]
        return folder / _run(command, folder).split()[-1]


class DebianPackage(Package):
    @property
    def pin(self) -> str:
        return f"{self.name}={self.version}"

    def download(self, folder: Path) -> Path:
        _require("apt-get", "Use Debian 12")
        _run(["apt-get", "download", "-q", self.pin], folder)
        return next(folder.glob(f"{self.name}_*.deb"))


def fetch(packages: Iterable[Package], folder: Path) -> dict[Package, Path]:
    """Download packages; returns package → archive. DataError when one is not what was pinned."""
    return {package: _checked(package, package.download(folder)) for package in packages}


def _checked(package: Package, path: Path) -> Path:
    if sha256(path) != package.sha256:
        raise DataError(f"build: {package.pin} has SHA-256 {sha256(path)}, pinned is {package.sha256}.")
    return path


def unpack(archives: Iterable[Path], folder: Path) -> Path:
    """Put the files of Debian archives into `folder`, as they would lie under /; runs none of their scripts."""
    _require("dpkg-deb", "Use Debian 12")
    for archive in archives:
        _run(["dpkg-deb", "-x", str(archive), str(folder)], folder.parent)
    return folder


def _require(tool: str, advice: str) -> None:
    if shutil.which(tool) is None:
        raise ConfigError(
            f"build: {tool} is not on the PATH; it gets the pinned packages. {advice}, or use data/samples."
        )


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise ConfigError(f"build: `{command[0]} {command[1]} … {command[-1]}` failed: {reason[0]}")
    return done.stdout


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
