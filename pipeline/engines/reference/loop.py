"""A background thread around the engine, for servers."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from .engine import ReferenceEngine
from .errors import EngineError
from .request import Request, TokenEvent

logger = logging.getLogger(__name__)

OnEvent = Callable[[TokenEvent], None]


class EngineLoop:
    """Steps the engine while there is work; safe for use by several threads.

    Callbacks run in the loop's thread and must be quick. No failure ends the loop: a bad request or a callback that
    raises ends that request, an engine failure ends the live requests with an ``error`` event each.
    """

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine
        self._inbox: deque[tuple[Request, OnEvent] | str] = deque()
        self._callbacks: dict[str, OnEvent] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="reference-engine-loop", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request; ``on_event`` gets its events, the last one with a finish reason.

        Raises:
            EngineError: The loop is closed.
        """
        with self._changed:
            if self._is_closing:
                raise EngineError("the engine loop is closed")
            self._inbox.append((request, on_event))
            self._changed.notify()

    def cancel(self, request_id: str) -> None:
        """End a request; an unknown or ended id is ignored."""
        with self._changed:
            self._inbox.append(request_id)
            self._changed.notify()

    def close(self) -> None:
        """Cancel what is live and end the thread; waits for the running step."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._inbox or self._callbacks or self._is_closing):
                    self._changed.wait()
                inbox, self._inbox = self._inbox, deque()
                is_closing = self._is_closing
            for entry in inbox:
                self._take(entry)
            if is_closing:
                for request_id in list(self._callbacks):
                    self._engine.cancel(request_id)
            self._step()
            if is_closing:
                return

    def _take(self, entry: tuple[Request, OnEvent] | str) -> None:
        if isinstance(entry, str):
            self._engine.cancel(entry)
            return
        request, on_event = entry
        try:
            if request.request_id in self._callbacks:
                raise EngineError(f"request id {request.request_id!r} is taken by a live request")
            self._engine.submit(request)
        except Exception as error:
            failure = TokenEvent(request.request_id, finish_reason="error", error=_describe(error))
            self._deliver(on_event, failure)
            return
        self._callbacks[request.request_id] = on_event

    def _step(self) -> None:
        try:
            events = self._engine.step()
        except Exception as error:
            logger.exception("engine step failed; ending %d live requests", len(self._callbacks))
            self._engine.abort_all()
            events = [TokenEvent(name, finish_reason="error", error=_describe(error)) for name in self._callbacks]
        for event in events:
            on_event = self._callbacks.get(event.request_id)
            if on_event is None:
                continue
            if event.finish_reason is not None:
                del self._callbacks[event.request_id]
            if not self._deliver(on_event, event) and event.finish_reason is None:
                del self._callbacks[event.request_id]
                self._engine.cancel(event.request_id)

    def _deliver(self, on_event: OnEvent, event: TokenEvent) -> bool:
        try:
            on_event(event)
        except Exception:
            logger.exception("the callback of request %s failed; the request ends", event.request_id)
            return False
        return True


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"the engine failed: {type(error).__name__}: {error}"
