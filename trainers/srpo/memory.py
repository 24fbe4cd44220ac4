"""How much memory will the learner take for a policy? Told by a model without data, before any weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface

from srpo_env.config import PolicyTraining
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.gradients import trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 64
_ATTENTION = "srpo_outline"


def learner_memory(outline: PreTrainedModel, config: SRPOConfig, training: PolicyTraining) -> dict[str, int]:
    """Bytes that the learner takes beside a policy's weights, on one rank that has all of them.

        gradients     one for each trained parameter, in the weights' type
        optimiser     AdamW's two moments, the same
        reference     the weights again, where there is a KL and no adapter to turn off
        activations   what autograd keeps of a full micro-batch, and the gradient of the output layer, made apart

    Not counted: copies of the keys and values of beginnings that rows share, and logits, of which 16 MiB are held.

    Args:
        outline: The model without data, its adapter included.
        config: Settings of the learner.
        training: Of the policy.
    """
    changed = sum(each.nbytes for each in trained(outline))
    weights = sum(each.nbytes for each in outline.parameters())
    head = outline.get_output_embeddings()
    of_head = 4 * head.weight.numel() if head is not None and head.weight.requires_grad else 0
    casts = sum(2 * each.numel() for each in outline.parameters()) if training.autocast else 0
    return {
        "gradients": changed,
        "optimiser": 2 * changed,
        "reference": weights if config.kl_coefficient and training.lora is None else 0,
        "activations": config.micro_batch_tokens * kept_per_token(outline, training.autocast) + of_head + casts,
    }


def kept_per_token(outline: PreTrainedModel, autocast: str | None = None) -> int:
    """Bytes that autograd keeps of each token that passes through a model, its output layer aside.

    The model is run on tensors that have shapes and no data; attention keeps queries, keys, values and outputs, as the
    fused kernels do.

    Args:
        outline: The model without data; autocast changes it to that type.
        autocast: Type of the forward pass, where it differs from the weights'.
    """
    model: Any = outline
    if autocast:
        model = model.to(torch.bfloat16)
    base = model.get_base_model().base_model if hasattr(model, "get_base_model") else model.base_model
    known = {each.untyped_storage()._cdata for each in model.parameters()}  # noqa: SLF001 (tells storages apart)
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:  # noqa: SLF001
            kept[storage._cdata] = storage  # noqa: SLF001
        return tensor

    base.set_attn_implementation(_ATTENTION)
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        result = base(input_ids=ids, position_ids=ids, use_cache=False)
        total = sum(storage.nbytes() for storage in kept.values())
        del result
    return total // _TOKENS


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Any:
    out: Tensor = _Keep.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out.transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)
