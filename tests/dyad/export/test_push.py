"""An export on its way to the Hub: a server on this machine that plays the hub's endpoints, and what may go wrong."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import huggingface_hub.constants
import pytest
from helpers.messages import raises

from dyad.data.base.errors import ConfigError
from dyad.export.main import check_repository, push_to_hub

TOKEN = "hf_of_nobody_but_this_test"


class Hub(BaseHTTPRequestHandler):
    """Takes repositories and commits from whoever has the token."""

    made: ClassVar[list[dict[str, Any]]]
    files: ClassVar[dict[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            self.made.append(json.loads(body))
            return self.answer({"url": f"http://{self.headers['Host']}/me/model", "id": "me/model"})
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            listed = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
            return self.answer({"files": listed})
        if "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            for line in lines:
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer({"commitUrl": f"http://{self.headers['Host']}/me/model/commit/1", "commitOid": "1" * 40})
        return self.answer({"errors": [], "warnings": []})  # validate-yaml

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        self.send_response(status)
        body = json.dumps(content).encode()
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.made, Hub.files = [], {}
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield Hub
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "README.md").write_text("---\nlicense: unknown\n---\n# A model\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(200)))
    return tmp_path


def test_a_new_repository_is_private_and_holds_the_folder(hub: type[Hub], folder: Path) -> None:
    url = push_to_hub(folder, "me/model", private=True, message="x, step 3")
    assert url.endswith("/me/model") and TOKEN not in url
    assert hub.made[0]["name"] == "model" and hub.made[0]["organization"] == "me"
    assert hub.made[0].get("private", hub.made[0].get("visibility")) in (True, "private")
    assert hub.files == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_the_hub_refuses_is_one_line_without_the_token(
    hub: type[Hub], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}_old")
    for repository in ("me/model", "not a name"):
        with raises(ConfigError, f"push={repository}", "HF_TOKEN") as caught:
            push_to_hub(folder, repository, private=True, message="x")
        assert len(str(caught.value).splitlines()) == 1 and TOKEN not in str(caught.value)
    assert not hub.files


def test_without_a_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    for offline in (True, False):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        with raises(ConfigError, "push=me/model"):
            push_to_hub(folder, "me/model", private=True, message="x")


def test_what_is_no_repository_is_known_before_the_export() -> None:
    check_repository("me/model-1.0")
    for name in ("../../x", "a b/c", "me", "me/", "/x", "a/b/c", "me/x--y", ""):
        with raises(ConfigError, f"push={name}", "ORG/NAME"):
            check_repository(name)
