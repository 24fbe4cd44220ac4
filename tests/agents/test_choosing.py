"""How a token is drawn, by hand-worked numbers and by frequency."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from srpo_env.agents.choosing import Settings, choose, filtered, uniform
from srpo_env.records import Sampling

CPU = torch.device("cpu")


def draws(logits: list[float], count: int, **sampling: float) -> tuple[torch.Tensor, torch.Tensor]:
    settings = Settings.of([Sampling(**sampling)] * count, range(count), CPU)
    return choose(torch.tensor([logits] * count), settings, [3] * count)


def test_logprobs_are_of_the_tempered_distribution() -> None:
    """trl#4159: log-softmax([2, 0] / 0.5) at token 0 is -0.01815; untempered it would be -0.12693."""
    ids, logprobs = draws([2.0, 0.0], 200, temperature=0.5)
    assert logprobs[ids == 0].unique().item() == pytest.approx(-0.01815, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_frequencies_follow_the_probabilities(temperature: float) -> None:
    logits = [1.0, -0.5, 0.2, -1.0, 0.0]
    ids, _ = draws(logits, 20_000, temperature=temperature)
    expected = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, -1) * 20_000
    assert chisquare(torch.bincount(ids, minlength=5).numpy(), expected.numpy()).pvalue > 1e-3


def test_a_token_without_probability_is_never_drawn() -> None:
    ids, logprobs = draws([-math.inf, 0.0, -math.inf, 0.0, -math.inf], 5_000)
    assert set(ids.tolist()) == {1, 3}
    assert logprobs.unique().tolist() == pytest.approx([math.log(0.5)])


def test_a_draw_on_a_boundary_skips_tokens_without_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srpo_env.agents.choosing.uniform", lambda *_: np.array([0.0, 0.5]))
    ids, _ = draws([-math.inf, 0.0, -math.inf, 0.0], 2)
    assert ids.tolist() == [1, 3]


def test_greedy_rows_take_the_first_maximum_and_their_neighbours_sample() -> None:
    settings = Settings.of([Sampling(temperature=0), Sampling()] * 300, range(600), CPU)
    ids, logprobs = choose(torch.tensor([[0.0, 1.0, 1.0]] * 600), settings, [0] * 600)
    assert set(ids[0::2].tolist()) == {1}
    assert set(logprobs[0::2].tolist()) == {0.0}
    assert set(ids[1::2].tolist()) == {0, 1, 2}


def test_filters_keep_what_they_say() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]])).repeat(5, 1)
    kept = filtered(logits, torch.tensor([0, 2, 0, 3, 1]), torch.tensor([1.0, 1.0, 0.7, 0.8, 0.1])).isfinite()
    assert kept.tolist() == [
        [True, True, True, True],
        [False, True, False, True],
        [False, True, False, True],  # 0.5 < 0.7 <= 0.5 + 0.25
        [False, True, False, True],  # of the top three, renormalised: 0.556 + 0.278 >= 0.8
        [False, True, False, False],
    ]


def test_large_batches_are_drawn_as_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    sampling = [Sampling(temperature=(0, 1, 2)[i % 3], top_k=i % 4, top_p=(1, 0.5)[i % 2]) for i in range(50)]
    settings = Settings.of(sampling, range(50), CPU)
    whole = choose(logits, settings, range(50))
    monkeypatch.setattr("srpo_env.agents.choosing._LOGITS_AT_ONCE", 7 * 8)
    parts = choose(logits, settings, range(50))
    assert torch.equal(whole[0], parts[0])
    assert torch.allclose(whole[1], parts[1])


def test_logits_that_are_not_numbers_give_nan() -> None:
    _, logprobs = choose(
        torch.tensor([[math.nan, 0.0], [0.0, 0.0]]),
        Settings.of([Sampling(temperature=0), Sampling()], [0, 1], CPU),
        [0, 0],
    )
    assert logprobs.isnan().tolist() == [True, False]


def test_random_numbers_are_even_over_seeds_and_over_steps() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    over_seeds = uniform(Settings.of([Sampling()] * 20_000, range(20_000), CPU).streams, np.zeros_like(seeds))
    over_steps = uniform(np.repeat(Settings.of([Sampling()], [5], CPU).streams, 20_000), seeds)
    for numbers in (over_seeds, over_steps):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert chisquare(np.histogram(numbers, 100, (0, 1))[0]).pvalue > 1e-3
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_random_numbers_stay_what_they_are() -> None:
    """A run can be repeated with a later release; -1 and 2**64 - 1 are the same seed."""
    streams = Settings.of([Sampling()] * 3, [0, -1, 2**64 - 1], CPU).streams
    numbers = uniform(streams, np.zeros(3, dtype=np.uint64))
    assert numbers[1] == numbers[2]
    # SplitMix64's first output from state 0 is 0xE220A8397B1DCDAF; a seed of 0 mixes to state 0.
    assert numbers[0] == (0xE220A8397B1DCDAF >> 11) * 2.0**-53
