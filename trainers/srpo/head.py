"""How likely is each token under a model's head? Log-probs and entropies, from hidden states or from logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Logits held at a time, and fewest tokens. Measured on a CPU, forward and backward: half as many take 25% longer, twice
# as many 2% less.
_CHUNK_LOGITS = 1 << 22
_CHUNK_TOKENS = 64


def from_logits(
    logits: Tensor, ids: Tensor, temperature: Tensor, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of tokens, and the entropies of the distributions that they were drawn from.

        log p(t) = z_t[id_t] / T - log Σ_v exp(z_t[v] / T)        in float32 at least

    Args:
        logits: [n, vocabulary] z, carries the gradient.
        ids: [n] int64 tokens.
        temperature: [n] float32 T.
        entropy: Whether to compute the entropies.

    Returns:
        [n] log-probs, and [n] entropies in nats, detached; None where they were not asked for.
    """
    log_p = torch.log_softmax(logits / temperature.unsqueeze(1), dim=-1)
    return log_p.gather(1, ids.unsqueeze(1)).squeeze(1), _entropy(log_p.detach()) if entropy else None


def from_hidden(
    hidden: Tensor, head: nn.Module, ids: Tensor, temperature: Tensor, *, entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Gives what `from_logits(head(hidden), ...)` gives, without the [n, vocabulary] matrix.

    Logits are made for some tokens at a time, and made again in the backward pass. A head that is no plain `nn.Linear`
    (an adapter, a quantised weight, a hook) is called as it is.

    Args:
        hidden: [n, hidden] states; carries the gradient.
        head: Its weight and bias get their gradients, unless frozen.
    """
    if not _is_plain(head):
        return from_logits(head(hidden), ids, temperature, entropy=entropy)
    device, dtype = hidden.device.type, head.weight.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    weight, bias = head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)
    logprobs, spread = _FromHidden.apply(hidden.to(dtype), weight, bias, ids, temperature, entropy)  # type: ignore[no-untyped-call]
    return logprobs, spread if entropy else None


def _is_plain(head: nn.Module) -> TypeGuard[nn.Linear]:
    hooked = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)  # noqa: SLF001
    return type(head) is nn.Linear and not hooked


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: Tensor,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, normaliser = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(2))
        spread = torch.empty(len(hidden) if entropy else 0, dtype=dtype, device=hidden.device)
        for part, z in _tempered_logits(hidden, weight, bias, temperature):
            normaliser[part] = z.logsumexp(1)
            logprobs[part] = z.gather(1, ids[part].unsqueeze(1)).squeeze(1) - normaliser[part]
            if entropy:
                spread[part] = _entropy(z.sub_(normaliser[part].unsqueeze(1)))
        ctx.save_for_backward(hidden, weight, bias, ids, temperature, normaliser)
        ctx.mark_non_differentiable(spread)
        return logprobs, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, temperature, normaliser = ctx.saved_tensors
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(each, dtype=dtype) if wanted else None
            for each, dtype, wanted in zip(
                (hidden, weight, bias),
                (hidden.dtype, normaliser.dtype, normaliser.dtype),
                ctx.needs_input_grad,
                strict=False,
            )
        )
        scale = gradient / temperature
        for part, z in _tempered_logits(hidden, weight, bias, temperature):
            # d log p / d z = (1 at the token, 0 elsewhere) - p
            z.sub_(normaliser[part].unsqueeze(1)).exp_().mul_(-scale[part].unsqueeze(1))
            z.scatter_add_(1, ids[part].unsqueeze(1), scale[part].unsqueeze(1))
            if of_bias is not None:
                of_bias += z.sum(0)
            of_z = z.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(of_z, weight, out=of_hidden[part])
            if of_weight is None:
                continue
            if of_weight.dtype == of_z.dtype:
                of_weight.addmm_(of_z.T, hidden[part])
            else:  # a sum over many parts needs more digits than the products
                of_weight += of_z.T @ hidden[part]
        return of_hidden, _as(weight, of_weight), _as(bias, of_bias), None, None, None


def _tempered_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yields parts of the tokens with their logits, in float32 at least and in the same memory each time."""
    count, vocabulary = len(hidden), len(weight)
    step = max(1, min(count, max(_CHUNK_TOKENS, _CHUNK_LOGITS // vocabulary)))
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    memory = torch.empty(step, vocabulary, dtype=dtype, device=hidden.device)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        z = memory[: part.stop - start]
        if dtype != hidden.dtype:
            z.copy_(nn.functional.linear(hidden[part], weight, bias))
        elif bias is None:
            torch.mm(hidden[part], weight.T, out=z)
        else:
            torch.addmm(bias, hidden[part], weight.T, out=z)
        yield part, z.div_(temperature[part].unsqueeze(1))


def _entropy(log_p: Tensor) -> Tensor:
    lowest = torch.finfo(log_p.dtype).min  # 0 * -inf would be NaN
    return -(log_p.exp() * log_p.clamp(min=lowest)).sum(-1)


def _as(like: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    return None if like is None or gradient is None else gradient.to(like.dtype)
