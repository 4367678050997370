"""The engine's workers: every piece once, errors come out, nobody waits for a helper that does not come."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pipeline.engines.reference import EngineError
from pipeline.engines.reference import threads as module
from pipeline.engines.reference.linear import multiply, multiply_to_rows
from pipeline.engines.reference.threads import ENVIRONMENT_VARIABLE, Workers, requested_threads


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.close()


def test_every_piece_runs_once_however_often(workers: Workers) -> None:
    for pieces in [1, 2, 3, 17] * 50:
        seen: list[int] = []
        workers.run(seen.append, pieces)
        assert sorted(seen) == list(range(pieces))


def test_an_error_in_a_piece_is_raised_and_the_workers_live_on(workers: Workers) -> None:
    def fail_at_two(piece: int) -> None:
        if piece == 2:
            raise RuntimeError("piece two")

    for _ in range(20):
        with pytest.raises(RuntimeError, match="piece two"):
            workers.run(fail_at_two, 5)
    seen: list[int] = []
    workers.run(seen.append, 3)
    assert sorted(seen) == [0, 1, 2]


def test_a_helper_that_is_still_busy_is_not_waited_for() -> None:
    release, started = threading.Event(), threading.Event()

    def hold(piece: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            started.set()
            release.wait(30)
        else:
            started.wait(30)

    holder = Workers(2)
    job = threading.Thread(target=lambda: holder.run(hold, 2))
    try:
        job.start()
        assert started.wait(30)
        seen: list[int] = []
        holder.run(seen.append, 6)
        assert sorted(seen) == list(range(6))
    finally:
        release.set()
        job.join(30)
        holder.close()


def test_choose_takes_the_fastest_count_and_looks_again_later(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    cost = {1: 1.0, 2: 0.6, 4: 0.58}  # four gain less than a tenth over two
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])

    def probe() -> None:
        clock[0] += cost[workers.active]

    workers.choose(probe)
    assert workers.active == 2
    cost[2] = 5.0
    workers.choose(probe)
    assert workers.active == 2
    clock[0] += module.RECALIBRATE_AFTER_S
    workers.choose(probe)
    assert workers.active == 4


@pytest.mark.parametrize("tokens", [1, 2, 16, 48, 49, 200])
@pytest.mark.parametrize("rows", [7, 1000])
def test_products_in_pieces_and_blocks_equal_the_plain_product(rows: int, tokens: int, workers: Workers) -> None:
    random = np.random.default_rng(rows + tokens)
    weight = random.normal(size=(rows, 300)).astype(np.float32)
    x = random.normal(size=(300, tokens)).astype(np.float32)
    expected = weight.astype(np.float64) @ x
    np.testing.assert_allclose(multiply(weight, x, workers), expected, atol=1e-3)
    np.testing.assert_allclose(multiply_to_rows(weight, x, workers), expected.T, atol=1e-3)


def test_the_thread_count_comes_from_argument_environment_or_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    assert requested_threads(None) is None
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "3")
    assert requested_threads(None) == 3
    assert requested_threads(2) == 2
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "many")
    with pytest.raises(EngineError, match="'many' is neither a positive number nor 'auto'"):
        requested_threads(None)
