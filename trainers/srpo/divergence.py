"""How far are two policies apart, and how random is one? Estimates from the sampled tokens."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from srpo_env.trainers.srpo.rows import MAX_LOG_RATIO, masked_difference, one_of, same_shape

KLKind = Literal["k1", "k2", "k3"]


def kl_per_token(new_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: KLKind = "k3") -> Tensor:
    """Estimate of KL(π_new || π_ref) at each sampled token, 0 elsewhere.

        d = log π_ref - log π_new,  at most 20, no gradient beyond
        k1 = -d      k2 = d² / 2      k3 = exp(d) - 1 - d

    Schulman, "Approximating KL Divergence" (2020). k2 and k3 are never negative; k1 may be. With
    π_old in the place of π_ref it is the approximate KL of an update.

    Returns:
        [M, T] tensor in nats; carries the gradient of both arguments.

    Raises:
        InvalidInput: `kind` is none of the three, or shapes differ.

    Example:
        >>> new, ref, mask = torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.ones(1, 1)
        >>> [round(float(kl_per_token(new, ref, mask, kind)), 5) for kind in ("k1", "k2", "k3")]
        [1.0, 0.5, 0.36788]
    """
    one_of("kind", kind, get_args(KLKind))
    same_shape(new_logprobs, ref_logprobs=ref_logprobs, mask=mask)
    d = masked_difference(ref_logprobs, new_logprobs, mask != 0).clamp(max=MAX_LOG_RATIO)
    if kind == "k1":
        return -d
    return d.square() / 2 if kind == "k2" else torch.expm1(d) - d  # exp(d) - 1 loses small d


def kl_penalty(
    new_logprobs: Tensor,
    ref_logprobs: Tensor,
    weight_MT: Tensor,
    kind: Literal["k2", "k3"] = "k3",
) -> Tensor:
    """KL to the reference, to be ADDED to the loss: loss + β Σ_t W_t k(t).

    Args:
        new_logprobs: [M, T]; carries the gradient.
        ref_logprobs: [M, T]; taken as a constant.
        weight_MT: W_t from `token_weights`, 0 where a token does not count.
        kind: "k3" or "k2"; k1 is for the log only, its expected gradient is zero.

    Returns:
        Scalar in nats.

    Raises:
        InvalidInput: `kind` is neither, or shapes differ.

    Example:
        >>> new, ref = torch.tensor([[-1.0]]), torch.tensor([[-2.0]])
        >>> kl_penalty(new, ref, torch.tensor([[1.0]]))
        tensor(0.3679)
    """
    one_of("kind", kind, ("k2", "k3"))
    kl_MT = kl_per_token(new_logprobs, ref_logprobs.detach(), weight_MT, kind)
    return (weight_MT.to(kl_MT.dtype) * kl_MT).sum()


def entropy_estimate(logprobs: Tensor, mask: Tensor) -> Tensor:
    """One-sample estimate of each row's entropy: -Σ_t log π(t) over its sampled tokens.

    Returns:
        [M] tensor in nats, 0 for a row without such a token; divide sums of it by the sum of their
        tokens for a mean per token.

    Raises:
        InvalidInput: shapes differ.

    Example:
        >>> entropy_estimate(torch.tensor([[-0.5, -1.5, 1.0]]), torch.tensor([[1, 1, 0]]))
        tensor([2.])
    """
    same_shape(logprobs, mask=mask)
    return masked_difference(torch.zeros_like(logprobs), logprobs, mask != 0).sum(1)
