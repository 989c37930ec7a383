"""Check paths inside a folder that another user may have made. Does not import torch."""

from pathlib import Path


def inside(folder: Path, name: str | Path) -> bool:
    """Whether `folder / name` exists and lies in `folder` after symbolic links are resolved. `folder` may be a link.

    A link in another user's folder could lead to a private file, whose content would then go into a report, a tracker
    or an exported model.
    """
    inner = Path(name)
    plain = not inner.is_absolute() and ".." not in inner.parts
    try:
        # Without links below `folder` nothing is to resolve: `folder` may be one that cannot be, such as /proc/ID/root
        if plain and not any((folder / part).is_symlink() for part in (inner, *inner.parents) if part.name):
            return (folder / inner).exists()
        return (folder / name).resolve(strict=True).is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # it does not exist, links form a circle, or the name holds a NUL
        return False


def file_inside(folder: Path, name: str | Path) -> Path | None:
    """Return `folder / name` if it is a regular file that lies in `folder` after symbolic links are resolved, else
    None."""
    return folder / name if inside(folder, name) and (folder / name).is_file() else None
