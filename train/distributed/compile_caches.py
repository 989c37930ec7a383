"""Put the kernels that Triton and torch.compile compile into a folder of this user alone, if possible on a local disk.

By default, Triton writes to the home folder, which many ranks may share over a network, and torch.compile to a folder
of /tmp whose name another user can guess and take first. Files in these folders are executed.
"""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def use_local_caches() -> None:
    """Set the environment variables of VARIABLES to folders for compiled kernels, unless the user has set them.

    Another variable, with the same exception, switches torch's precompiled C++ headers off. Call it before
    torch.compile or Triton compile anything; child processes get the variables too. The folders are in dyad-<user id>
    in $TMPDIR or /tmp, which is made; or in dyad/compiled in the user's cache (~/.cache) if the former cannot be made,
    another user could read or change it, or libraries could not be loaded from it.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dyad/compiled"
    folder = _private_folder(Path(tempfile.gettempdir())) or home
    for variable, name in VARIABLES.items():
        os.environ.setdefault(variable, str(folder / name))
    # torch keeps compiled C++ headers in /tmp/torchinductor_<user> whatever the variables say
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")


def describe_caches() -> str:
    """Return a line that says where compiled kernels are kept. Call it after `use_local_caches`."""
    return f"compiled kernels are kept in {', '.join(f'{name}={os.environ[name]}' for name in VARIABLES)}"


def _private_folder(parent: Path) -> Path | None:
    """Return the folder dyad-<user id> in `parent`, made if it does not exist.

    Returns None if it cannot be made, if other users can read, write or replace it, or if `parent` is mounted noexec.
    """
    user, folder = os.getuid(), parent / f"dyad-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        above, own, mount = parent.stat(), folder.lstat(), os.statvfs(parent)
    except OSError:
        return None
    is_private = stat.S_ISDIR(own.st_mode) and own.st_uid == user and not own.st_mode & 0o077
    stays = above.st_uid in (0, user) and (above.st_mode & stat.S_ISVTX or not above.st_mode & 0o022)
    return folder if is_private and stays and not mount.f_flag & os.ST_NOEXEC else None
