"""Which weights is a policy held close to? Those that training began from."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from srpo_env.adapters import has_adapter, without_adapter
from srpo_env.protocols import Trainable
from srpo_env.trainers.srpo.scoring import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def reference_scorers(
    policies: Mapping[str, Trainable], scorer_of: Callable[[str, PreTrainedModel], Scorer]
) -> dict[str, Scorer]:
    """Scorers of the weights that training began from: a frozen copy of each model, or what lies below its adapter.

    A learner that resumes must be made from the weights that training began from, and take up its checkpoint then.

    Args:
        policies: By label, before the first update.
        scorer_of: Makes the scorer of a policy's model.
    """
    return {label: scorer_of(label, _beginning(policy.model)) for label, policy in policies.items()}


def checksums(policies: Mapping[str, Trainable]) -> dict[str, int]:
    """CRC-32 of the weights that `reference_scorers` would score by, by policy.

    Args:
        policies: By label, before the first update.
    """
    return {label: _checksum(policy.model) for label, policy in policies.items()}


def _checksum(model: PreTrainedModel) -> int:
    found = 0
    below = without_adapter(model) if has_adapter(model) else model
    for name, each in sorted(below.state_dict().items()):
        data = each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        found = zlib.crc32(data, zlib.crc32(name.encode(), found))
    return found


def _beginning(model: PreTrainedModel) -> PreTrainedModel:
    if has_adapter(model):
        return without_adapter(model)
    frozen: PreTrainedModel = copy.deepcopy(model).requires_grad_(False).eval()
    return frozen
