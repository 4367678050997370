"""What planning makes of the hub's answers, over a real connection to a server of this test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from pipeline.config.hub import read_hub_config
from pipeline.errors import SourceError

_COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """Answers every request alike."""

    status = 200
    headers_sent: Mapping[str, str] = {}
    body = b""
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        self.send_response(self.status)
        for name, value in {"Content-Length": str(len(self.body)), **self.headers_sent}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    class Mine(Hub):
        asked: ClassVar[list[str]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Mine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_TESTSECRET123456")
    yield Mine
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_hub_in_trouble_is_asked_once_and_leaves_the_shape_open(hub: type[Hub], status: int) -> None:
    hub.status = status
    assert read_hub_config("org/name", "main") is None
    assert len([line for line in hub.asked if "/org/name/" in line]) == 1


@pytest.mark.parametrize(
    ("status", "code", "problem"),
    [
        (401, "", "refuses org/name with status 401: HF_TOKEN is not valid"),
        (403, "", "refuses org/name with status 403"),
        (403, "GatedRepo", "terms were not accepted"),
        (404, "RepoNotFound", "knows no model"),
        (404, "RevisionNotFound", "has no revision 'main'"),
    ],
)
def test_hub_that_refuses_is_said_in_its_own_way(hub: type[Hub], status: int, code: str, problem: str) -> None:
    hub.status, hub.headers_sent = status, {"X-Error-Code": code} if code else {}
    with pytest.raises(SourceError, match=problem) as caught:
        read_hub_config("org/name", "main")
    assert "TESTSECRET" not in caught.value.message + caught.value.hint
    assert len([line for line in hub.asked if "/org/name/" in line]) == 1


def test_login_page_in_place_of_the_hub_is_named(hub: type[Hub]) -> None:
    hub.body = b"<html>please log in</html>"
    hub.headers_sent = {"ETag": '"1"', "X-Repo-Commit": _COMMIT}
    with pytest.raises(SourceError, match="is not JSON"):
        read_hub_config("org/name", "main")


def test_answer_without_the_marks_of_a_hub_leaves_the_shape_open(hub: type[Hub]) -> None:
    hub.body = b"<html>please log in</html>"
    assert read_hub_config("org/name", "main") is None


def test_config_is_read_and_then_taken_from_the_cache(hub: type[Hub]) -> None:
    hub.body, hub.headers_sent = b'{"vocab_size": 9}', {"ETag": '"1"', "X-Repo-Commit": _COMMIT}
    assert read_hub_config("org/name", "main") == {"vocab_size": 9}
    before = len(hub.asked)
    assert read_hub_config("org/name", "main") == {"vocab_size": 9}
    assert len(hub.asked) == before
