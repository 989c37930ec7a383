"""`python -m train` where https:// leads to the folder $SERVED, for whoever signs: without a server and its driver."""

import os
import runpy
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Signed(LocalFileSystem):
    """A path of this file system is the whole URL. An address without its signature is refused, naming it."""

    protocol = "https"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path)

    def _here(self, url: str) -> str:
        asked = urlsplit(url)
        if not asked.query:
            raise PermissionError(f"403 for {url}")
        return os.environ["SERVED"] + asked.path

    def info(self, path: Any, **_: Any) -> dict[str, Any]:
        return super().info(self._here(path))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **rest: Any) -> Any:
        return super()._open(self._here(path), mode, block_size, **rest)


fsspec.register_implementation("https", Signed, clobber=True)
runpy.run_module("train", run_name="__main__", alter_sys=True)
