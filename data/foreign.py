"""Files that may be somebody else's: only those of the folder itself. Torch-free."""

from __future__ import annotations

from pathlib import Path


def inside(folder: Path, name: str | Path) -> bool:
    """Whether `name` is there and lies in `folder`, whatever links lead to it. `folder` itself may be a link.

    A link in a stranger's folder could lead anywhere on this disk, and what lies there into a page, a tracker or a
    model that is handed on.
    """
    inner = Path(name)
    plain = not inner.is_absolute() and ".." not in inner.parts
    try:
        if plain and not any((folder / part).is_symlink() for part in (inner, *inner.parents) if part.name):
            return (folder / inner).exists()
        return (folder / inner).resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # nothing there, links in a circle, a NUL in the name
        return False


def own_file(folder: Path, name: str | Path) -> Path | None:
    """The path of the regular file `name` that lies in `folder`, if there is one."""
    return folder / name if inside(folder, name) and (folder / name).is_file() else None
