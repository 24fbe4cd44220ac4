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
            settings = {"save_embedding_layers": False} if has_adapter(policy.model) else {}
            policy.model.save_pretrained(folder / label, **settings)
            policy.tokenizer.save_pretrained(folder / label)
    torch.save(dict(state), folder / _STATE)


def read_state(folder: Path, policies: Mapping[str, Trainable]) -> dict[str, Any]:
    """Reads the state of the learner, without changing anything.

    Raises:
        InvalidInput: The folder is not a checkpoint of these policies.
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
    return state
