"""The sampler against the definitions, computed the slow way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.engines.reference.request import Request, Sampling
from pipeline.engines.reference.sampling import Sampler, token_logprobs

VOCAB = 50
LOGITS = np.random.default_rng(3).normal(0, 2, VOCAB).astype(np.float32)
DRAWS = 4000


def allowed_by_definition(sampling: Sampling) -> npt.NDArray[np.float64]:
    """Return the distribution that temperature, top-k, top-p and min-p define, over all tokens."""
    p = np.exp(LOGITS.astype(np.float64) / sampling.temperature)
    order = np.argsort(-p, kind="stable")
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    p[p < sampling.min_p * p.max()] = 0
    result: npt.NDArray[np.float64] = p / p.sum()
    return result


def draw(sampling: Sampling, count: int = DRAWS) -> list[int]:
    return [Sampler(Request("a", (1,), 1, replace(sampling, seed=seed)), seed).choose(LOGITS) for seed in range(count)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.3, top_p=0.7),
        Sampling(temperature=1.0, min_p=0.2),
        Sampling(temperature=1.5, top_k=12, top_p=0.8, min_p=0.1),
    ],
    ids=["temperature 1", "temperature 0.5", "top-k", "top-p", "min-p", "all"],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    expected = allowed_by_definition(sampling)
    counts = np.bincount(draw(sampling), minlength=VOCAB)
    assert not counts[expected == 0].any()
    # Chi-square over the tokens expected often enough; 5 sigma above its mean is never reached by chance.
    often = expected * DRAWS >= 5
    chi_square = (np.square(counts - expected * DRAWS) / np.maximum(expected * DRAWS, 1e-9))[often].sum()
    freedom = max(1, often.sum() - 1)
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_the_same_seed_gives_the_same_draws_and_places_differ() -> None:
    sampling = Sampling(temperature=1.0)
    request = Request("a", (1,), 20, sampling)
    first, second = Sampler(request, -5), Sampler(request, -5)
    made = [first.choose(LOGITS) for _ in range(20)]
    assert made == [second.choose(LOGITS) for _ in range(20)]
    assert len(set(made)) > 3


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    assert set(draw(Sampling(temperature=1e-6), 20)) == {int(LOGITS.argmax())}


def test_penalties_follow_their_definitions() -> None:
    # Token 0 is in the prompt, token 1 becomes output twice.
    logits = np.array([3.0, 2.9, -1.0, 1.0], np.float32)
    request = Request("a", (0,), 9, Sampling(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0))
    sampler = Sampler(request, 0)
    # 0: 3/2 = 1.5 (prompt counts for repetition only); 1: 2.9
    assert sampler.choose(logits) == 1
    # 1: 2.9/2 - 0.25 - 0.5 = 0.7; 0: 1.5
    assert sampler.choose(logits) == 0
    # 0: 1.5 - 0.75 = 0.75; 1: 0.7; 3: 1.0
    assert sampler.choose(logits) == 3
    # 3: 0.5 - 0.75 = -0.25; 0 again (0.75), then 0 is 1.5 - 0.25 - 1.0 = 0.25 and 1 leads with 0.7
    assert [sampler.choose(logits), sampler.choose(logits)] == [0, 1]


def test_repetition_penalty_lowers_negative_logits() -> None:
    request = Request("a", (0,), 1, Sampling(repetition_penalty=1.5))
    assert Sampler(request, 0).choose(np.array([-1.0, -1.4], np.float32)) == 1


def test_logit_bias_moves_and_bans_tokens() -> None:
    best, second = np.argsort(-LOGITS)[:2].tolist()
    request = Request("a", (1,), 1, Sampling(logit_bias={best: -np.inf}))
    assert Sampler(request, 0).choose(LOGITS) == second


def test_the_nucleus_of_a_flat_large_vocabulary_is_exact() -> None:
    # Nearly equal probabilities force the growing sort to its end; 3000 of 10000 tokens hold 30 percent.
    logits = np.linspace(0.001, 0, 10_000, dtype=np.float32)
    sampling = Sampling(temperature=1.0, top_p=0.3)
    made = [Sampler(Request("a", (1,), 1, sampling), seed).choose(logits) for seed in range(300)]
    assert max(made) <= 3000
    assert max(made) > 2900


def test_logprobs_rank_ties_by_the_number_of_better_tokens() -> None:
    logits = np.array([[1.0, 2.0, 2.0, 0.0]], np.float32)
    (entry,) = token_logprobs(logits, [0], 3)
    assert entry.rank == 3
    assert [token for token, _ in entry.top] == [1, 2, 0]
    total = np.log(np.exp([1.0, 2.0, 2.0, 0.0]).sum())
    assert entry.logprob == pytest.approx(1.0 - total)
