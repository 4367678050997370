"""In-flight batching, limits, scores and the background loop of the reference engine."""

from __future__ import annotations

import queue
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import pipeline.engines.reference as reference_package
from pipeline.engines.reference import EngineError, EngineLoop, ReferenceEngine, Request, Sampling, TokenEvent

CHECKPOINT = Path(__file__).parents[2] / "data" / "engine" / "llama_gqa"
LONG_CHECKPOINT = CHECKPOINT.with_name("llama_rope_llama3")
RANDOM = Sampling(temperature=1.5, top_k=20, top_p=0.95, seed=7)


def load(path: Path = CHECKPOINT, **options: int) -> ReferenceEngine:
    return ReferenceEngine.load(path, **{"threads": 1, **options})


def run_all(engine: ReferenceEngine) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            events[event.request_id].append(event)
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def test_greedy_takes_the_largest_logit_at_every_step() -> None:
    engine = load()
    prompt = (3, 1, 4, 1, 5)
    generation = engine.generate([Request("a", prompt, 6)])[0]
    logits = engine.logits(prompt + generation.token_ids)
    # The logits of the whole text at once are the oracle for the cached, step by step run.
    assert list(generation.token_ids) == logits[len(prompt) - 1 : -1].argmax(axis=1).tolist()
    assert generation.finish_reason == "length"


@pytest.mark.parametrize("sampling", [Sampling(), RANDOM], ids=["greedy", "random"])
def test_tokens_are_the_same_whatever_joins_and_leaves_the_batch(sampling: Sampling) -> None:
    requests = [Request(f"r{n}", tuple(range(n + 1, 2 * n + 3)), 12, sampling) for n in range(6)]
    alone = [load().generate([request])[0].token_ids for request in requests]
    engine = load(max_batch_size=3, max_num_tokens=5)
    events: dict[str, list[TokenEvent]] = defaultdict(list)
    for request in requests:  # one joins every second step, more than there are slots
        engine.submit(request)
        for event in engine.step() + engine.step():
            events[event.request_id].append(event)
    for name, more in run_all(engine).items():
        events[name] += more
    assert [tuple(tokens_of(events[request.request_id])) for request in requests] == alone


def test_a_long_prompt_does_not_hold_up_a_running_request() -> None:
    engine = load(LONG_CHECKPOINT, max_num_tokens=16)
    engine.submit(Request("short", (1, 2), 10))
    engine.step()
    engine.submit(Request("long", tuple(range(60)), 1))
    made = [[event.request_id for event in engine.step()] for _ in range(4)]
    assert made == [["short"], ["short"], ["short"], ["short", "long"]]


def test_cancel_ends_a_request_and_leaves_the_others() -> None:
    engine = load()
    alone = load().generate([Request("b", (9, 8), 8)])[0].token_ids
    engine.submit(Request("a", (1, 2, 3), 50))
    engine.submit(Request("b", (9, 8), 8))
    first = engine.step()
    engine.cancel("a")
    engine.cancel("nobody")
    events = run_all(engine)
    assert [event.finish_reason for event in events["a"]] == ["cancelled"]
    assert tuple(tokens_of([event for event in first if event.request_id == "b"] + events["b"])) == alone
    assert engine.live == 0


def test_end_ids_end_the_request_and_min_tokens_puts_them_off() -> None:
    engine = load()
    free = engine.generate([Request("a", (5, 6), 8)])[0].token_ids
    ended = engine.generate([Request("a", (5, 6), 8, end_ids=(free[2],))])[0]
    assert ended.token_ids == free[: free.index(free[2]) + 1]
    assert ended.finish_reason == "stop"
    later = engine.generate([Request("a", (5, 6), 8, end_ids=(free[0],), min_tokens=4)])[0]
    assert free[0] not in later.token_ids[:4]
    assert len(later.token_ids) >= 4


def test_stop_sequences_end_the_request_and_stay_in_the_output() -> None:
    engine = load()
    free = engine.generate([Request("a", (5, 6), 8)])[0].token_ids
    stopped = engine.generate([Request("a", (5, 6), 8, stop_sequences=((99,), free[2:4]))])[0]
    assert stopped.token_ids == free[:4]
    assert stopped.finish_reason == "stop"


def test_only_allowed_tokens_follow_and_none_allowed_ends_the_request() -> None:
    engine, seen = load(), []

    def allowed(output: Sequence[int]) -> np.ndarray:
        seen.append(list(output))
        mask = np.zeros(engine.info.vocab_size, np.bool_)
        if len(output) < 3:
            mask[[7, 11]] = True
        return mask

    engine.submit(Request("guided", (1, 2, 3), 10, logprobs=0, allowed=allowed))
    engine.submit(Request("free", (1, 2, 3), 10))
    events = run_all(engine)
    guided = tokens_of(events["guided"])
    assert len(guided) == 3 and set(guided) <= {7, 11}
    assert events["guided"][-1] == TokenEvent("guided", finish_reason="stop")
    assert seen == [guided[:count] for count in range(4)]
    engine.submit(Request("free", (1, 2, 3), 10))
    assert tokens_of(run_all(engine)["free"]) == tokens_of(events["free"])


def test_a_guide_that_cannot_go_on_ends_its_request_with_its_text() -> None:
    def allowed(output: Sequence[int]) -> np.ndarray:
        raise ValueError("the grammar is too complex")

    engine = load()
    engine.submit(Request("guided", (1, 2, 3), 10, allowed=allowed))
    assert run_all(engine)["guided"] == [
        TokenEvent("guided", finish_reason="error", error="the grammar is too complex")
    ]


def test_scores_are_the_raw_log_softmax_with_ranks_and_alternatives() -> None:
    engine = load()
    prompt = (3, 1, 4, 1, 5, 9, 2, 6)
    engine.submit(
        Request(
            "a",
            prompt,
            3,
            Sampling(logit_bias={7: 100.0}),
            logprobs=3,
            prompt_logprobs=2,
            return_context_logits=True,
            return_generation_logits=True,
        )
    )
    events = run_all(engine)["a"]
    assert tokens_of(events) == [7, 7, 7]
    logits = engine.logits((*prompt, 7, 7))
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    first = events[0]
    assert first.prompt_logprobs is not None and first.context_logits is not None
    assert first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == len(prompt)
    np.testing.assert_allclose(first.context_logits, logits[: len(prompt)], atol=1e-5)
    entries = [*first.prompt_logprobs[1:], *(event.logprob for event in events)]
    for row, (entry, token) in enumerate(zip(entries, (*prompt[1:], 7, 7, 7), strict=True)):
        assert entry is not None and entry.token_id == token
        assert entry.logprob == pytest.approx(logprobs[row, token], abs=1e-5)
        assert entry.rank == 1 + (logprobs[row] > logprobs[row, token]).sum()
        best = np.argsort(-logprobs[row])[: len(entry.top)]
        assert [token for token, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], logprobs[row, best], atol=1e-5)
    for event, row in zip(events, logits[len(prompt) - 1 :], strict=True):
        assert event.generation_logits is not None
        np.testing.assert_allclose(event.generation_logits, row, atol=1e-5)


def test_prompt_scores_do_not_depend_on_chunks() -> None:
    request = Request("a", tuple(range(40)), 0, prompt_logprobs=0, return_context_logits=True)
    results = []
    for max_num_tokens in (64, 9):
        engine = load(max_num_tokens=max_num_tokens)
        engine.submit(request)
        results.append(run_all(engine)["a"])
    for (event,) in results:
        assert event.token_id is None and event.finish_reason == "length"
        assert event.prompt_logprobs is not None and event.context_logits is not None
    whole, chunked = (events[0] for events in results)
    assert whole.prompt_logprobs is not None and chunked.prompt_logprobs is not None
    np.testing.assert_allclose(
        [entry.logprob for entry in whole.prompt_logprobs if entry],
        [entry.logprob for entry in chunked.prompt_logprobs if entry],
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("a", (), 1), "prompt is empty"),
        (Request("a", (1,) * 129, 1), "129 tokens is longer than the context of 128"),
        (Request("a", (1,) * 128, 1), "128 tokens leaves no room in the context of 128"),
        (Request("a", (1, 64), 1), "token id 64 is outside the vocabulary of 64"),
        (Request("a", (1,), -1), "max_tokens is -1"),
        (Request("a", (1,), 1, Sampling(top_p=0.0)), "top_p is 0.0; expected in (0, 1]"),
        (Request("a", (1,), 1, Sampling(temperature=float("nan"))), "temperature is nan"),
        (Request("a", (1,), 1, Sampling(logit_bias={64: 1.0})), "logit_bias names token 64"),
        (Request("a", (1,), 1, logprobs=-1), "logprobs is -1"),
    ],
)
def test_a_request_that_cannot_run_gets_an_error_event(request_: Request, words: str) -> None:
    engine = load()
    engine.submit(request_)
    (event,) = run_all(engine)["a"]
    assert event.finish_reason == "error"
    assert words in event.error
    with pytest.raises(EngineError, match="request 'a'"):
        engine.generate([request_])


def test_max_tokens_is_clipped_to_the_context() -> None:
    generation = load(max_seq_len=10).generate([Request("a", (1, 2, 3), 100)])[0]
    assert len(generation.token_ids) == 7
    assert generation.finish_reason == "length"


def test_a_live_id_is_refused() -> None:
    engine = load()
    engine.submit(Request("a", (1,), 4))
    with pytest.raises(EngineError, match="'a' is taken"):
        engine.submit(Request("a", (2,), 4))


def test_two_workers_give_the_same_tokens_as_one() -> None:
    requests = [Request(str(n), (n, n + 1), 10, RANDOM) for n in range(5)]
    assert load(threads=2).generate(requests) == load(threads=1).generate(requests)


def test_info_tells_checkpoints_apart() -> None:
    info, other = load().info, load(LONG_CHECKPOINT, max_seq_len=200).info
    assert info.checkpoint_digest != other.checkpoint_digest
    assert (info.kind, info.vocab_size, info.max_seq_len) == ("reference", 64, 128)
    assert other.max_seq_len == 200


def collect(loop: EngineLoop, request: Request) -> list[TokenEvent]:
    events: queue.Queue[TokenEvent] = queue.Queue()
    loop.submit(request, events.put)
    got = [events.get(timeout=30)]
    while got[-1].finish_reason is None:
        got.append(events.get(timeout=30))
    return got


def test_loop_serves_requests_and_survives_bad_ones() -> None:
    loop = EngineLoop(load())
    try:
        expected = load().generate([Request("a", (1, 2), 5)])[0].token_ids
        assert "empty" in collect(loop, Request("bad", (), 5))[-1].error

        def broken_callback(event: TokenEvent) -> None:
            raise RuntimeError("the receiver is gone")

        loop.submit(Request("broken", (1, 2), 5), broken_callback)
        assert tuple(tokens_of(collect(loop, Request("a", (1, 2), 5)))) == expected
    finally:
        loop.close()
    with pytest.raises(EngineError, match="closed"):
        loop.submit(Request("late", (1,), 1), lambda event: None)


def test_loop_reports_an_engine_failure_to_every_live_request_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    loop = EngineLoop(engine)
    healthy = engine.model.forward
    try:
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.model), "forward", lambda *args: 1 / 0)
            for name in ("a", "b"):
                (event,) = collect(loop, Request(name, (1, 2), 5))
                assert event.finish_reason == "error"
                assert "ZeroDivisionError" in event.error
        assert engine.model.forward == healthy
        assert len(tokens_of(collect(loop, Request("a", (1, 2), 5)))) == 5
    finally:
        loop.close()


def test_loop_cancels_and_close_ends_what_is_live() -> None:
    loop = EngineLoop(load(LONG_CHECKPOINT))
    seen: dict[str, queue.Queue[TokenEvent]] = {"a": queue.Queue(), "b": queue.Queue()}
    for name, events in seen.items():
        loop.submit(Request(name, (1, 2), 200), events.put)
        events.get(timeout=30)
    loop.cancel("a")
    while (event := seen["a"].get(timeout=30)).finish_reason is None:
        pass
    assert event.finish_reason == "cancelled"
    loop.close()
    last = list(seen["b"].queue)[-1]
    assert last.finish_reason in ("cancelled", "length")


def test_the_folder_runs_alone(tmp_path: Path) -> None:
    source = Path(reference_package.__file__).parent
    shutil.copytree(source, tmp_path / "reference", ignore=shutil.ignore_patterns("__pycache__"))
    program = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pipeline", "threadpoolctl", "safetensors"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
sys.path.insert(0, {str(tmp_path)!r})
import reference
engine = reference.ReferenceEngine.load({str(CHECKPOINT)!r}, threads=1)
print(engine.generate([reference.Request("a", (3, 1, 4), 4)])[0].token_ids)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(load().generate([Request("a", (3, 1, 4), 4)])[0].token_ids)
