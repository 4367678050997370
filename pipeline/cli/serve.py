"""Verbs ``serve`` (Triton and the OpenAI frontend) and ``frontend`` (the frontend alone)."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pipeline.cli.verbs import Request
from pipeline.errors import PreflightError, SourceError

if TYPE_CHECKING:
    from pipeline.config.spec import Spec
    from pipeline.frontend.settings import FrontendSettings
    from pipeline.triton.server import TritonServer

# Digests of files up to this size are checked before serving; of larger ones only that they are there.
_HASHED_BYTES = 1 << 30
_WATCH_S = 0.2


def serve(request: Request) -> int:
    """Serve what ``run`` made, until ctrl-C or SIGTERM.

    Raises:
        SourceError: There is nothing to serve, or it is not what the manifest says.
        PreflightError: A port is in use.
        ToolError: Triton did not start, or ended while serving.
    """
    from pipeline.frontend.settings import FrontendSettings
    from pipeline.triton.install import ensure_tritonserver
    from pipeline.triton.server import HOST, TritonServer

    spec = request.spec()
    folder = Path(spec.output_dir)
    manifest = _checked_manifest(folder)
    _require_free("frontend.port", spec.frontend.host, spec.frontend.port)
    for name in ("http_port", "grpc_port", "metrics_port"):
        _require_free(f"triton.{name}", HOST, getattr(spec.triton, name))
    triton = TritonServer(
        folder / "model_repository",
        ensure_tritonserver(),
        http_port=spec.triton.http_port,
        grpc_port=spec.triton.grpc_port,
        metrics_port=spec.triton.metrics_port,
        log_path=_log_path(spec, str(manifest["name"])),
    )
    settings = dataclasses.replace(
        FrontendSettings.from_json(folder / "frontend" / "frontend.json"),
        **_operation(spec),
        triton=(triton.grpc_url,),
    )
    request.output.note(f"serving {folder} ({manifest['target']}, gate {manifest['gate']['verdict']})")
    request.output.note(f"starting tritonserver, log: {triton.log_path}")
    with triton:
        triton.wait_ready(spec.triton.start_timeout_s)
        return _serve_with(triton, settings, lambda: _announce(request, settings, manifest))


def frontend(request: Request) -> int:
    """Serve the OpenAI API in front of Triton servers that run already.

    Raises:
        PreflightError: No tokenizer or no address is given, or the port is in use.
    """
    from pipeline.frontend.server import serve as serve_frontend
    from pipeline.frontend.settings import FrontendSettings

    spec = request.spec()
    if not spec.frontend.triton or not spec.frontend.tokenizer:
        missing = "frontend.triton=[host:port]" if not spec.frontend.triton else "frontend.tokenizer=FOLDER"
        raise PreflightError(
            f"the frontend alone needs {missing}",
            hint="python -m pipeline frontend frontend.triton=[localhost:8001] frontend.tokenizer=dist/NAME/tokenizer",
        )
    tokenizer = Path(spec.frontend.tokenizer).absolute()
    emitted = _emitted_settings(tokenizer)
    settings = FrontendSettings(
        tokenizer=tokenizer,
        triton=spec.frontend.triton,
        model=spec.frontend.model,
        served_model=spec.frontend.served_model or emitted.get("served_model", ""),
        target=emitted.get("target", ""),
        tool_parser=spec.frontend.tool_parser,  # type: ignore[arg-type]  # the settings check it
        **_operation(spec),
    )
    return serve_frontend(settings)


# Settings that are the emitted artefact's, or the Triton server's that is started.
_EMITTED = frozenset({"tokenizer", "triton", "model", "served_model", "tool_parser"})


def _operation(spec: Spec) -> dict[str, Any]:
    """Return what the configuration says about running the frontend, as settings."""
    from pipeline.frontend.settings import FrontendSettings

    plain = {
        item.name: getattr(spec.frontend, item.name)
        for item in dataclasses.fields(spec.frontend)
        if item.name not in _EMITTED
    }
    # An empty path is none.
    named = {
        key: value for key, value in plain.items() if not (key in ("chat_template", "api_keys_file") and not value)
    }
    return FrontendSettings.convert(named)


def _serve_with(triton: TritonServer, settings: FrontendSettings, on_ready: Callable[[], None]) -> int:
    """Run the frontend; end it when Triton ends."""
    from pipeline.frontend.server import serve as serve_frontend

    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WATCH_S):
            if triton.poll() is not None:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch, name="triton-watch", daemon=True)
    watcher.start()
    try:
        code = serve_frontend(settings, on_ready=on_ready)
    finally:
        done.set()
        watcher.join()
    triton.check_alive()
    return code


def _announce(request: Request, settings: FrontendSettings, manifest: dict[str, Any]) -> None:
    url = f"http://{settings.host}:{settings.port}/v1"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": settings.name, "temperature": 0, "messages": question})
    request.output.line(f"ready: {url} (model {settings.name}); stop with ctrl-C")
    request.output.line(f"  curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    request.output.document({"url": url, "model": settings.name, "target": manifest["target"]})


def _checked_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest after comparing what lies beside it.

    Raises:
        SourceError: Missing, unreadable, or a file is not the one that was judged.
    """
    from pipeline.stages.manifest import NAME, mismatches

    try:
        manifest: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
        wrong = mismatches(folder, manifest["files"], hashed_bytes=_HASHED_BYTES)
    except FileNotFoundError as error:
        raise SourceError(
            f"there is nothing to serve in {folder}",
            hint="make it first (python -m pipeline with the same overrides), go to where it was made, "
            "or name it: serve output_dir=FOLDER",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{folder / NAME} cannot be read: {type(error).__name__}: {error}") from error
    if wrong:
        raise SourceError(
            f"{folder} is not what was judged: " + "; ".join(wrong[:5]),
            hint="python -m pipeline with the same overrides writes it again from the store",
        )
    return manifest


def _require_free(setting: str, host: str, port: int) -> None:
    """Make sure that a server can listen there, before anything is started.

    Raises:
        PreflightError: It cannot; says whether port or host is the reason.
    """
    key = setting.rpartition(".")[0]
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in places:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except (OSError, UnicodeError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EADDRINUSE:
            raise PreflightError(
                f"{setting}={port} is in use on {host}",
                hint=f"choose another with {setting}=PORT, or see who has it: ss -ltnp 'sport = :{port}'",
            ) from error
        if number == errno.EACCES:
            raise PreflightError(
                f"{setting}={port} may not be used by this user", hint=f"choose one from 1024 up: {setting}=PORT"
            ) from error
        raise PreflightError(
            f"{key}.host={host} is no address of this machine: {error}",
            hint=f"{key}.host=127.0.0.1 for this machine alone, {key}.host=0.0.0.0 for others too",
        ) from error


def _log_path(spec: Spec, name: str) -> Path:
    from pipeline.store.store import Store

    return Store(Path(spec.store.root)).logs / quote(name, safe="") / "serve-triton.log"


def _emitted_settings(tokenizer: Path) -> dict[str, Any]:
    """Return the settings emitted beside a tokenizer, where there are any."""
    try:
        found: dict[str, Any] = json.loads((tokenizer.parent / "frontend" / "frontend.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
