"""Are KL and entropy those of the contract, and blind to padding?"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo.divergence import entropy_estimate, kl_penalty, kl_per_token
from srpo_env.trainers.srpo.objective import (
    srpo_loss,
)
from srpo_env.trainers.srpo.weights import token_weights
from tests.srpo.loss_cases import CLIP, NAN, Batch, Settings, cases


@given(cases(), st.sampled_from(["k2", "k3"]))
def test_the_kl_penalty_is_the_weighted_sum_over_counted_tokens(case: tuple[Batch, Settings], kind: str) -> None:
    batch, chosen = case
    weight = token_weights(
        batch.mask,
        batch.event,
        batch.advantage,
        reduction=chosen["reduction"],
        constant_length=7.0,
        episode=batch.episode,
    )
    leaf = batch.new.clone().requires_grad_()
    penalty = kl_penalty(leaf, batch.old, weight, kind)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(penalty, leaf)
    total, slopes = 0.0, torch.zeros_like(batch.new)
    for i, t in torch.nonzero(weight).tolist():
        d = float(batch.old[i, t] - batch.new[i, t])
        total += float(weight[i, t]) * (d * d / 2 if kind == "k2" else math.exp(d) - d - 1)
        slopes[i, t] = float(weight[i, t]) * (-d if kind == "k2" else 1 - math.exp(d))
    assert float(penalty.detach()) == pytest.approx(total, rel=1e-8, abs=1e-12)
    assert torch.allclose(gradient, slopes, rtol=1e-8, atol=1e-12)


def test_k3_is_accurate_and_not_negative_for_tiny_differences() -> None:
    d = torch.logspace(-8, -1, 400)
    for sign in (1, -1):
        new = (sign * d).unsqueeze(0)
        k3 = kl_per_token(new, torch.zeros_like(new), torch.ones_like(new))
        assert bool((k3 >= 0).all())
        exact = torch.expm1(-new.double()) + new.double()
        assert torch.allclose(k3.double(), exact, rtol=1e-2, atol=1e-12)


def test_kl_of_a_token_that_the_policy_all_but_gave_up_stays_finite_and_without_gradient() -> None:
    new = torch.tensor([[-120.0, -math.inf]]).requires_grad_()
    for kind in ("k2", "k3"):
        weight = torch.ones(1, 2)
        penalty = kl_penalty(new, torch.zeros(1, 2), weight, kind)
        (gradient,) = torch.autograd.grad(penalty, new)
        assert penalty.isfinite()
        assert not gradient.any()


def test_kl_is_taken_to_a_constant_reference_in_the_penalty() -> None:
    ref = torch.tensor([[-2.0]]).requires_grad_()
    assert not kl_penalty(torch.tensor([[-1.0]]), ref, torch.ones(1, 1)).requires_grad


def test_kl_in_bfloat16_is_cast_up() -> None:
    new = torch.tensor([[-1.0]], dtype=torch.bfloat16)
    penalty = kl_penalty(new, new - 1, torch.ones(1, 1, dtype=torch.float64))
    assert penalty.dtype == torch.float32
    assert float(penalty) == pytest.approx(0.36788, abs=1e-5)


def test_entropy_passes_a_gradient_to_sampled_tokens_only() -> None:
    logprobs = torch.tensor([[-0.5, NAN]]).requires_grad_()
    (gradient,) = torch.autograd.grad(entropy_estimate(logprobs, torch.tensor([[1, 0]])).sum(), logprobs)
    assert gradient.tolist() == [[-1.0, 0.0]]


def test_k1_is_no_penalty() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(InvalidInput, match="kind: 'k1' is not one of k2, k3"):
        kl_penalty(one, one, one, "k1")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="kind: 'k4' is not one of k1, k2, k3"):
        kl_per_token(one, one, one, "k4")  # type: ignore[arg-type]


def test_the_kl_penalty_pulls_towards_the_reference() -> None:
    """mll-lab-nu/RAGEN#58: added to a loss that is minimised, it lowers a log-prob that is too high."""
    new = torch.tensor([[-1.0]]).requires_grad_()
    ref, one = torch.tensor([[-2.0]]), torch.ones(1, 1)
    event, advantage = torch.tensor([0]), torch.tensor([0.0])
    weight = token_weights(one, event, advantage)
    out = srpo_loss(new, new.detach(), one, event, advantage, **CLIP)
    loss = out.loss + 0.1 * kl_penalty(new, ref, weight)
    (gradient,) = torch.autograd.grad(loss, new)
    assert float(loss.detach()) == pytest.approx(0.036788, abs=1e-6)
    assert float(gradient) > 0  # a descent step lowers the log-prob
    new = new.detach()
    assert float(kl_per_token(new, ref, one, "k1")) == pytest.approx(1.0)
    assert float(kl_per_token(new, ref, one)) == pytest.approx(0.36788, abs=1e-5)
    assert float(kl_per_token(ref, new, one)) == pytest.approx(0.71828, abs=1e-5)


@pytest.mark.parametrize("padding", [1, 8])
def test_entropy_and_kl_do_not_see_padding(padding: int) -> None:
    """huggingface/trl#6121: padding that carries +1.0 once made an entropy negative."""
    logprobs = torch.tensor([[-0.5, -1.5] + [1.0] * padding])
    mask = torch.tensor([[1, 1] + [0] * padding])
    assert entropy_estimate(logprobs, mask).tolist() == [2.0]
    assert float(entropy_estimate(logprobs, mask).sum() / mask.sum()) == 1.0
    kl = kl_per_token(logprobs, torch.zeros_like(logprobs), mask)
    assert float(kl[0, 2:].sum()) == 0.0
    assert float(kl.sum()) == pytest.approx(math.exp(0.5) - 1.5 + math.exp(1.5) - 2.5)
