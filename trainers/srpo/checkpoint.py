"""What does a learner need to go on? Each policy as a transformers or peft folder, and `trainer.pt` beside them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from srpo_env.adapters import has_adapter
from srpo_env.errors import InvalidInput
from srpo_env.models import without_progress_bar
from srpo_env.protocols import Trainable

_STATE = "trainer.pt"


def save(folder: Path, policies: Mapping[str, Trainable], state: Mapping[str, Any]) -> None:
    """Writes each policy's model and tokenizer to a folder of its label, and the state of the learner."""
    with without_progress_bar():
        for label, policy in policies.items():
            # peft would ask a hub whether the vocabulary has grown.
            settings: dict[str, Any] = {"save_embedding_layers": False} if has_adapter(policy.model) else {}
            policy.model.save_pretrained(folder / label, **settings)
            policy.tokenizer.save_pretrained(folder / label)
    torch.save(dict(state), folder / _STATE)


def read_state(folder: Path, policies: Mapping[str, Trainable], references: Mapping[str, int]) -> dict[str, Any]:
    """Reads the state of the learner, without changing anything.

    Args:
        folder: What `save` wrote.
        policies: Those that are trained, by label.
        references: Checksums of the weights that KL is to, by label; none without KL.

    Raises:
        InvalidInput: The folder is not a checkpoint of these policies, or KL was to other weights.
    """
    try:
        state: dict[str, Any] = torch.load(folder / _STATE, weights_only=True)
        found = set(state["optimisers"])
    except (OSError, KeyError, TypeError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InvalidInput(
            f"checkpoint {folder}: {_STATE} can't be read ({type(error).__name__}); a checkpoint is a folder that this "
            "trainer wrote, such as runs/mine/checkpoints/000100. Give one."
        ) from error
    lacking = [label for label in policies if label not in found or not (folder / label).is_dir()]
    if lacking:
        raise InvalidInput(
            f"checkpoint {folder}: it has no policy {lacking[0]!r}, which is trained; it has "
            f"{', '.join(sorted(found))}. Give a checkpoint of the same recipe."
        )
    began = state.get("references", {})  # 0.1.0 wrote none
    other = [label for label, checksum in references.items() if began.get(label, checksum) != checksum]
    if other:
        raise InvalidInput(
            f"checkpoint {folder}: KL is to the weights that training began from, and those of policy {other[0]!r} are "
            f"others now (checksum {references[other[0]]:08x}, not {began[other[0]]:08x}). Put back the model that the "
            "run began with, or begin a new run from this checkpoint's."
        )
    return state


def whole_state(optimiser: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimiser as if its parameters were whole; where they are in shards, all ranks must ask."""
    found = optimiser.state_dict()
    state = {
        key: {name: each.full_tensor().cpu() if _in_shards(each) else each for name, each in values.items()}
        for key, values in found["state"].items()
    }
    return found | {"state": state}


def load_state(optimiser: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Takes up what `whole_state` gave, each rank its shard."""
    parameters = [each for group in optimiser.param_groups for each in group["params"]]
    state = {
        key: {name: _as_shard(each, parameters[key]) for name, each in values.items()}
        for key, values in saved["state"].items()
    }
    optimiser.load_state_dict({**saved, "state": state})


def _as_shard(value: Any, parameter: Any) -> Any:
    if not _in_shards(parameter) or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


def _in_shards(value: Any) -> bool:
    """Whether a value is a DTensor, whose module takes seconds to import."""
    return hasattr(value, "full_tensor")
