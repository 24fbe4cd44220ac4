"""Does the chunked head give the log-probs, entropies and gradients of a whole log-softmax?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from srpo_env.trainers.srpo import head as head_module
from srpo_env.trainers.srpo.head import from_hidden

COUNT, HIDDEN, VOCABULARY = 7, 5, 11


@pytest.fixture(autouse=True)
def _three_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "_CHUNK_LOGITS", 0)
    monkeypatch.setattr(head_module, "_CHUNK_TOKENS", 3)


def drawn(dtype: torch.dtype, *, bias: bool = True) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """Hidden states, a head, tokens and a temperature for each."""
    torch.manual_seed(0)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    hidden = (3 * torch.randn(COUNT, HIDDEN, dtype=dtype)).requires_grad_()
    return hidden, head, torch.randint(VOCABULARY, (COUNT,)), torch.linspace(0.3, 2.0, COUNT)


def plain(hidden: Tensor, head: nn.Linear, ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies a token at a time."""
    logprobs, entropies = [], []
    for h, token, T in zip(hidden, ids.tolist(), temperature, strict=True):
        z = head(h)
        z = z.to(torch.promote_types(z.dtype, torch.float32)) / T
        logprobs.append(z[token] - z.exp().sum().log())
        p = z.exp() / z.exp().sum()
        entropies.append(-(p * p.log()).sum())
    return torch.stack(logprobs), torch.stack(entropies).detach()


def gradients(logprobs: Tensor, hidden: Tensor, head: nn.Linear) -> list[Tensor | None]:
    weights = torch.linspace(-1, 2, COUNT, dtype=logprobs.dtype)
    wanted = [hidden, *head.parameters()]
    return list(torch.autograd.grad((weights * logprobs).sum(), wanted))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_a_whole_softmax(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    hidden, head, ids, temperature = drawn(dtype, bias=bias)
    expected, spread = plain(hidden, head, ids, temperature)
    found, entropy = from_hidden(hidden, head, ids, temperature, entropy=True)
    assert entropy is not None
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy, spread, rtol=tolerance, atol=tolerance)
    for one, other in zip(gradients(found, hidden, head), gradients(expected, hidden, head), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_the_derivative_is_that_of_finite_differences() -> None:
    hidden, head, ids, temperature = drawn(torch.float64)

    def logprobs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        with torch.no_grad():
            head.weight.copy_(weight), head.bias.copy_(bias)
        return head_module._FromHidden.apply(hidden, weight, bias, ids, temperature, False)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, head.weight.clone(), head.bias.clone()))


def test_bf16_weights_give_float32_log_probs_and_bf16_gradients() -> None:
    hidden, head, ids, temperature = drawn(torch.bfloat16)
    found, _ = from_hidden(hidden, head, ids, temperature)
    expected, _ = plain(hidden, head, ids, temperature)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(found, hidden, head), gradients(expected, hidden, head), strict=True):
        assert one is not None
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_autocast_multiplies_in_bf16_and_leaves_the_gradients_in_float32() -> None:
    hidden, head, ids, temperature = drawn(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = from_hidden(hidden, head, ids, temperature)
        expected, _ = plain(hidden, head, ids, temperature)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(found, hidden, head), gradients(expected, hidden, head), strict=True):
        assert one is not None
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_a_frozen_head_gets_no_gradient_and_passes_one_on() -> None:
    hidden, head, ids, temperature = drawn(torch.float64)
    (expected,) = torch.autograd.grad(plain(hidden, head, ids, temperature)[0].sum(), hidden)
    head.requires_grad_(False)
    from_hidden(hidden, head, ids, temperature)[0].sum().backward()
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-10, atol=1e-10)
    assert head.weight.grad is None


def test_nothing_as_wide_as_the_vocabulary_and_as_long_as_the_tokens_is_kept() -> None:
    hidden, head, ids, temperature = drawn(torch.float64)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        from_hidden(hidden, head, ids, temperature)
    assert kept
    assert all(tuple(each.shape) != (COUNT, VOCABULARY) for each in kept)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("kind", ["subclass", "hook", "own forward", "parametrised"])
def test_a_head_that_is_no_plain_linear_is_called(kind: str) -> None:
    """An adapter on the head adds to its output; reading its weight alone would leave that out."""
    hidden, head, ids, temperature = drawn(torch.float64, bias=False)
    twice = plain(2 * hidden, head, ids, temperature)[0]
    if kind == "subclass":

        class Adapted(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        adapted = Adapted(HIDDEN, VOCABULARY, bias=False, dtype=torch.float64)
        adapted.weight = head.weight
        head = adapted
    elif kind == "hook":
        head.register_forward_hook(lambda _module, _args, output: 2 * output)
    elif kind == "own forward":
        forward = head.forward
        head.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]
    else:
        parametrize.register_parametrization(head, "weight", Doubled())
    torch.testing.assert_close(from_hidden(hidden, head, ids, temperature)[0], twice, rtol=1e-10, atol=1e-10)


def test_no_token_gives_no_log_prob_and_a_gradient_of_0() -> None:
    hidden, head, ids, temperature = drawn(torch.float64)
    found: Any = from_hidden(hidden[:0], head, ids[:0], temperature[:0])[0]
    found.sum().backward()
    assert len(found) == 0
    assert float(head.weight.grad.abs().max()) == 0  # type: ignore[union-attr]
