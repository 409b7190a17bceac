"""A small Hugging Face Hub on the loopback interface, which remembers all that arrives."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub.constants
import pytest
import transformers.utils.hub

OWNER = "somebody"
OID = "0" * 40


class Hub(ThreadingHTTPServer):
    """Takes pushes as the real Hub does: small files in the commit, weights by LFS before it.

    Attributes:
        commits: message and files of each commit, in order.
        bodies: everything that was sent, whatever for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self.bodies: list[bytes] = []
        self.repositories: list[str] = []
        self.large: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def files(self) -> dict[str, bytes]:
        """The repository as it is after all commits."""
        return {path: content for _, files in self.commits for path, content in files.items()}


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(parts)
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.bodies.append(body)
        return body

    def _answer(self, answer: Any, status: int = 200) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        self.server.large[self.path.rsplit("/", 1)[-1]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body, url = self._body(), self.server.url
        if self.path == "/api/repos/create":
            repository = f"{OWNER}/{json.loads(body)['name']}"
            self.server.repositories.append(repository)
            self._answer({"url": f"{url}/{repository}", "id": repository})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._answer({"files": [_mode(file["path"]) for file in files]})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for item in objects:
                item["actions"] = {"upload": {"href": f"{url}/large/{item['oid']}"}}
            self._answer({"transfer": "basic", "objects": objects})
        elif re.fullmatch(rf"/api/models/{OWNER}/[\w.-]+/commit/main", self.path):
            self._commit([json.loads(line) for line in body.splitlines()])
            repository = "/".join(self.path.split("/")[3:5])
            self._answer({"commitUrl": f"{url}/{repository}/commit/{OID}", "commitOid": OID})
        else:
            self._answer({"error": f"no route {self.path}"}, status=404)

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        files: dict[str, bytes] = {}
        for line in lines[1:]:
            value = line["value"]
            files[value["path"]] = (
                self.server.large[value["oid"]]
                if line["key"] == "lfsFile"
                else base64.b64decode(value["content"])
            )
        self.server.commits.append((lines[0]["value"]["summary"], files))


def _mode(path: str) -> dict[str, Any]:
    is_large = path.endswith((".safetensors", ".bin", ".pt", ".pth"))
    return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running hub, to which `huggingface_hub` and transformers talk for the test."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
