"""A shard in one go: from a server without ranges, through connections that break, and what never comes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from helpers.messages import raises

from dyad.data.base.errors import DataError
from dyad.data.shards.storage import open_buffered, open_sequential

CONTENT = random.Random(0).randbytes(3_000_000)


class Server(ThreadingHTTPServer):
    """Gives CONTENT whole, whatever is asked for. ills: what goes wrong with the next answers, one each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.ills: list[str] = []
        self.asked: list[str] = []

    def url(self, path: str = "a.tar") -> str:
        return f"http://127.0.0.1:{self.server_port}/{path}"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.asked.append(f"{self.path} {self.headers['Range']}")
        ill = self.server.ills.pop(0) if self.server.ills else ""
        self.close_connection = True
        if ill.isdigit():
            return self.send_error(int(ill))
        self.send_response(200)
        if ill.startswith("chunked"):
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(CONTENT), 1 << 20):
                piece = CONTENT[start : start + (1 << 20)]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                if ill == "chunked, broken off":
                    return None
            self.wfile.write(b"0\r\n\r\n")
            return None
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: 1_500_000 if ill == "broken off" else None])

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("dyad.data.shards.storage.RETRY_SECONDS", (0.0, 0.0, 0.0))
    with Server() as serving:
        thread = Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield serving
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "ills",
    [
        [],
        ["chunked"],
        ["503", "500"],
        ["broken off", "503", "broken off"],
        ["chunked, broken off"],
        ["broken off", "chunked"],
    ],
)
def test_all_of_it_comes(server: Server, ills: list[str]) -> None:
    server.ills = list(ills)
    with open_sequential(server.url()) as shard:
        assert shard.read(1000) + shard.read() == CONTENT
    assert not server.ills and {asked.split()[1] for asked in server.asked} == {"None"}


def test_what_never_comes_is_an_error(server: Server) -> None:
    server.ills = ["503"] * 9
    with (
        open_sequential(server.url()) as shard,
        raises(OSError),
    ):
        shard.read(1)
    assert len(server.asked) == 4
    server.ills = ["broken off"] * 9
    with open_sequential(server.url()) as shard, raises(OSError):
        shard.read()


def test_what_is_not_there_is_asked_for_once(server: Server) -> None:
    server.ills = ["404"]
    with open_sequential(server.url()) as shard, raises(FileNotFoundError):
        shard.read(1)
    assert len(server.asked) == 1
    with open_sequential("http://127.0.0.1:1/a.tar") as shard, raises(OSError):
        shard.read(1)


def test_files_and_other_storage(tmp_path: Path) -> None:
    import fsspec

    (tmp_path / "a.tar").write_bytes(CONTENT)
    with fsspec.open("memory://stream/a.tar", "wb") as file:
        file.write(CONTENT)  # type: ignore[attr-defined]
    for path in (str(tmp_path / "a.tar"), "memory://stream/a.tar"):
        with open_sequential(path) as shard:
            assert shard.read() == CONTENT
    with open_sequential(str(tmp_path / "b.tar")) as shard, pytest.raises(FileNotFoundError):
        shard.read(1)


def test_a_driver_whose_error_is_no_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "_open", lambda *_, **__: {}["credentials"])
    with raises(DataError, "memory://x/a.tar", "credentials"):
        open_buffered("memory://x/a.tar")
