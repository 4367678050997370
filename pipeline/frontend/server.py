"""Running the application: listening, logging, and leaving without cutting off an answer."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from pipeline.errors import PreflightError
from pipeline.frontend.app import create_app
from pipeline.frontend.http_heads import bounded_heads
from pipeline.frontend.settings import FrontendSettings, LogFormat

_log = logging.getLogger(__name__)

# Attributes every log record has; what else is there came through ``extra``.
_PLAIN = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object per record, extras as fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{key: value for key, value in record.__dict__.items() if key not in _PLAIN},
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """The same for eyes."""

    def format(self, record: logging.LogRecord) -> str:
        extras = {key: value for key, value in record.__dict__.items() if key not in _PLAIN}
        text = " ".join([record.getMessage(), *(f"{key}={value}" for key, value in extras.items())])
        line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower()} {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class DrainingServer(uvicorn.Server):
    """Refuses new work as soon as it is told to stop, and lets open streams finish."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._application = app
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, then say so."""
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handle SIGINT and SIGTERM while serving. They are not raised again: a drained server has done its work."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals belong to the main thread; whoever embeds the server sets should_exit
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; a second SIGINT ends at once."""
        self._application.state.service.draining = True
        super().handle_exit(sig, frame)


def serve(settings: FrontendSettings, *, on_ready: Callable[[], None] = lambda: None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    Args:
        settings: What to serve and where.
        on_ready: Called once requests are taken and signals drain.

    Raises:
        SourceError: The tokenizer, a chat template or the API keys cannot be read.
        PreflightError: The address cannot be listened on.
    """
    set_up_logging(settings.log_format)
    app = create_app(settings)
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    _log.info("listening", extra={"host": host, "port": port, "model": settings.name, "triton": list(settings.triton)})
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        http=bounded_heads(settings.head_timeout_s),
        timeout_graceful_shutdown=int(settings.drain_s),
        timeout_keep_alive=75,
    )
    server = DrainingServer(config, app, on_ready)
    try:
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        listener.close()
    return 0 if server.started else 1


def set_up_logging(log_format: LogFormat) -> None:
    """Write the package's log lines to stderr."""
    root = logging.getLogger("pipeline.frontend")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if log_format != "none" else logging.WARNING)
    root.propagate = False


def _listen(settings: FrontendSettings) -> socket.socket:
    """Return a listening socket, so that a taken port is an error before anything is loaded."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what is accepted; without it every first token waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise PreflightError(
            f"Cannot listen on {settings.host}:{settings.port}: {error.strerror}.",
            hint="Choose another port with frontend.port=PORT, or stop the program that uses it.",
        ) from error
    return listener
