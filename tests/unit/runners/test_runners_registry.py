"""Digests are asked for at a small registry over real HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.errors import ToolError
from pipeline.runners.registry import fetch_digest

MANIFEST = b'{"schemaVersion": 2}'
DIGEST = "sha256:" + hashlib.sha256(MANIFEST).hexdigest()
LOGIN = base64.b64encode(b"user:password").decode()


class _Registry(BaseHTTPRequestHandler):
    """``open/…`` is for everybody, ``token/…`` wants a token, ``basic/…`` a password, ``bare/…`` sends no digest."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        if self.path.startswith("/token?"):
            is_known = self.headers.get("Authorization") == f"Basic {LOGIN}" or "scope=pull" in self.path
            self._send(200 if is_known else 401, json.dumps({"token": "a-token"}).encode(), {})
            return
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        authorization = self.headers.get("Authorization", "")
        kind = self.path.split("/")[2]
        host = f"{self.server.server_address[0]}:{self.server.server_address[1]}"
        challenges = {
            "token": f'Bearer realm="http://{host}/token",service="registry",scope="pull"',
            "private": f'Bearer realm="http://{host}/token",service="registry",scope="secret"',
            "basic": 'Basic realm="x"',
        }
        wanted = {"token": "Bearer a-token", "private": "Bearer a-token", "basic": f"Basic {LOGIN}"}
        if kind in challenges and authorization != wanted[kind]:
            self._send(401, b"", {"WWW-Authenticate": challenges[kind]})
        elif self.path.endswith("/manifests/1") and "application/vnd.oci.image.index" in self.headers["Accept"]:
            digest = {} if kind == "bare" else {"Docker-Content-Digest": DIGEST}
            self._send(200, MANIFEST if with_body else b"", digest)
        else:
            self._send(404, b"", {})

    def _send(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Address of the registry; nobody has logged in."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Registry)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["open", "token", "bare"])
def test_fetch_digest_asks_the_registry(host: str, kind: str) -> None:
    assert fetch_digest(f"{host}/{kind}/name:1") == DIGEST


@pytest.mark.parametrize("kind", ["private", "basic"])
def test_fetch_digest_uses_the_engines_login(host: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"refuses .* \(HTTP 401\)") as caught:
        fetch_digest(f"{host}/{kind}/name:1")
    assert caught.value.hint == f"docker login {host}"
    (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": LOGIN}}}))
    assert fetch_digest(f"{host}/{kind}/name:1") == DIGEST


def test_fetch_digest_says_when_there_is_no_such_image(host: str) -> None:
    with pytest.raises(ToolError, match=f"registry {host} has no image {host}/open/name:2"):
        fetch_digest(f"{host}/open/name:2")


def test_fetch_digest_says_when_nobody_answers() -> None:
    with pytest.raises(ToolError, match=r"registry 127\.0\.0\.1:1 gave no digest .*refused"):
        fetch_digest("127.0.0.1:1/name:1")


def test_fetch_digest_needs_no_registry_for_a_digest() -> None:
    assert fetch_digest(f"nowhere.invalid/name:1@{DIGEST}") == DIGEST
    with pytest.raises(ToolError, match="is no digest"):
        fetch_digest("nowhere.invalid/name@sha256:12")
