"""`python -m data build NAME`: the data sets in data/samples, made again from pinned packages, byte for byte."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from data.errors import ConfigError, DataError, nearest

SUMS = "SHA256SUMS"
SAMPLES = Path(__file__).parent / "samples"


@dataclass(frozen=True)
class Package:
    """One npm package, pinned to its bytes. Nothing of it is ever run."""

    name: str
    version: str
    sha256: str

    @property
    def pin(self) -> str:
        return f"{self.name}@{self.version}"


def build(name: str, out: str | Path | None = None, check: bool = False) -> None:
    """Make the data set `name` in the folder `out` (data/samples/NAME); with `check` only compare what is there.

    Raises ConfigError when the name is unknown or a tool is missing, DataError when a package or checked file differs.
    """
    builders = _builders()
    if name not in builders:
        raise ConfigError(
            f"build: unknown data set '{name}'.{nearest(name, builders)} There is: {', '.join(builders)}."
        )
    folder = Path(out) if out is not None else SAMPLES / name
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / name
        fresh.mkdir()
        builders[name](fresh, Path(scratch))
        _write_sums(fresh)
        if check:
            verify(folder, (fresh / SUMS).read_text())
            print(f"{folder}: the same bytes as a fresh build")
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(fresh.iterdir()):
            shutil.copyfile(path, folder / path.name)
    print(f"{folder}: {len(list(folder.glob('*.tar')))} shards, {SUMS} holds their checksums")


def verify(folder: Path, sums: str) -> None:
    """Compare the files of a folder with lines 'sha256  name'; DataError names all that are missing or differ."""
    expected = {name: digest for digest, name in (line.split("  ") for line in sums.splitlines())}
    wrong = [name for name, digest in expected.items() if _sha256(folder / name) != digest]
    if wrong:
        raise DataError(
            f"{folder}: not the bytes that {SUMS} promises: {', '.join(wrong)}. `git checkout` restores them."
        )


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
    if _sha256(path) != package.sha256:
        raise DataError(f"build: {package.pin} has SHA-256 {_sha256(path)}, pinned is {package.sha256}.")
    return path


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """A tar whose bytes depend on the members alone: no time, owner or machine in it."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)  # mtime, uid, gid 0, mode 0644
            info.size = len(data)
            tar.addfile(info, BytesIO(data))


def _write_sums(folder: Path) -> None:
    lines = [f"{_sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines))


def _sha256(path: Path) -> str:
    if not path.is_file():
        return "missing"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _builders() -> dict[str, Callable[[Path, Path], None]]:
    from data.build_emoji import build_emoji

    return {"emoji": build_emoji}
