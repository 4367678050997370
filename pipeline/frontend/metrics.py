"""What Prometheus can read about this server."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_E2E = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The counters of one application; a registry of its own, so that several can live in one process."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "frontend_requests", "HTTP requests answered", ("model", "endpoint", "status"), registry=self.registry
        )
        sequences = Counter(
            "frontend_sequences", "Sequences ended, by reason", ("model", "reason"), registry=self.registry
        )
        self.ended = {
            reason: sequences.labels(model, reason) for reason in ("stop", "length", "cancelled", "error", "refused")
        }
        self.prompt_tokens = self._counter("frontend_prompt_tokens", "Prompt tokens of sequences", model)
        self.completion_tokens = self._counter("frontend_completion_tokens", "Tokens generated and used", model)
        self.in_flight = self._gauge("frontend_in_flight_sequences", "Sequences running or waiting", model)
        self.ttft = self._histogram("frontend_time_to_first_token_seconds", "Arrival to first token", _TTFT, model)
        self.tpot = self._histogram("frontend_time_per_output_token_seconds", "After the first token", _TPOT, model)
        self.e2e = self._histogram("frontend_sequence_seconds", "Arrival to end", _E2E, model)
        self._model = model

    def request(self, endpoint: str, status: int) -> None:
        """Count an answered request."""
        self._requests.labels(self._model, endpoint, str(status)).inc()

    def sequence(self, prompt_tokens: int) -> ObservedSequence:
        """Begin to observe a sequence."""
        return ObservedSequence(self, prompt_tokens)

    def value(self, name: str) -> float:
        """Return the value of a counter or gauge of this model."""
        return self.registry.get_sample_value(name, {"model": self._model}) or 0.0

    def text(self) -> bytes:
        """Return the exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, model: str) -> Counter:
        return Counter(name, text, ("model",), registry=self.registry).labels(model)

    def _gauge(self, name: str, text: str, model: str) -> Gauge:
        return Gauge(name, text, ("model",), registry=self.registry).labels(model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], model: str) -> Histogram:
        return Histogram(name, text, ("model",), buckets=buckets, registry=self.registry).labels(model)


class ObservedSequence:
    """Times and counts of one sequence."""

    __slots__ = ("_ended", "_first_s", "_metrics", "_prompt_tokens", "_start_s")

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._ended = False
        metrics.in_flight.inc()

    def tokens(self, count: int) -> None:
        """Notice new tokens."""
        if self._first_s is None and count:
            self._first_s = time.perf_counter()
            self._metrics.ttft.observe(self._first_s - self._start_s)

    def finish(self, reason: str, completion_tokens: int) -> None:
        """Notice the end; only the first call counts."""
        if self._ended:
            return
        self._ended = True
        metrics = self._metrics
        metrics.in_flight.dec()
        metrics.ended[reason].inc()
        if reason in ("stop", "length"):
            metrics.e2e.observe(time.perf_counter() - self._start_s)
        if self._first_s is not None:
            # A sequence that produced nothing (refused, unreachable) did not use its prompt either.
            metrics.prompt_tokens.inc(self._prompt_tokens)
            metrics.completion_tokens.inc(completion_tokens)
            if completion_tokens > 1:
                metrics.tpot.observe((time.perf_counter() - self._first_s) / (completion_tokens - 1))
