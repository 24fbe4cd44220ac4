"""What is a LoRA adapter to a model: how it is put on, what its weights are, and where they come from.

A policy with an adapter has modules of its own and shares the weights below them with every policy on the same model,
so no policy has to be switched on or off while another samples.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srpo_env.errors import InvalidRecipe, MissingExtra, MissingModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from srpo_env.config import Lora

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"


def add_adapter(model: PreTrainedModel, lora: Lora, seed: int) -> PreTrainedModel:
    """Returns a `peft.PeftModel` on the model's own weights, whose adapter alone can be trained.

        y = W x + (alpha / rank) B A x      A: [rank, in], random;  B: [out, rank], 0

    Args:
        model: Its modules stay as they are; its weights are frozen.
        lora: Size and place of the adapter.
        seed: Draws A.

    Raises:
        MissingExtra: peft is not installed.
        InvalidRecipe: The targets are not in the model, or are its output layer.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    peft: Any = _peft()
    head = model.get_output_embeddings()
    outermost = {name.rpartition(".")[2] for name, each in model.named_modules() if each is head}
    if outermost & {target.rpartition(".")[2] for target in lora.targets or ()}:
        raise InvalidRecipe(
            f"lora.targets {list(lora.targets or ())}: the output layer is among them; its weights are used without "
            "its module, so an adapter there would not be seen. Leave it out."
        )
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules="all-linear" if lora.targets is None else list(lora.targets),
        fan_in_fan_out=any(isinstance(each, Conv1D) for each in model.modules()),
    )
    with torch.random.fork_rng(devices=[]), _without_deprecations():
        torch.manual_seed(seed)
        try:
            made = peft.get_peft_model(_twin(model), settings)
        except ValueError as error:
            raise InvalidRecipe(
                f"lora.targets {list(lora.targets or ())}: {' '.join(str(error).split())} Give names of linear modules "
                "such as [q_proj, v_proj], or leave targets out for all of them."
            ) from error
    adapted: PreTrainedModel = made.eval()
    return adapted


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """The model below a `peft.PeftModel`, which stays as it is: modules of its own on the same weights."""
    below: PreTrainedModel = _twin(model).unload().eval()  # type: ignore[operator]
    return below


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """Other modules, the same tensors."""
    return copy.deepcopy(model, {id(each): each for each in chain(model.parameters(), model.buffers())})


def has_adapter(model: torch.nn.Module) -> bool:
    """Whether a model is a `peft.PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def transformer(model: PreTrainedModel) -> PreTrainedModel:
    """The transformers model of a policy's model, adapter included: what has embeddings, a head and a cache."""
    return model.get_base_model() if has_adapter(model) else model  # type: ignore[operator]


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / _CONFIG).is_file() and (folder / _WEIGHTS).is_file()


def model_below(folder: Path) -> str:
    """The name of the model that a folder's adapter belongs to.

    Raises:
        MissingModel: The folder does not say.
    """
    name = json.loads((folder / _CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise MissingModel(
            f"adapter '{folder}': its {_CONFIG} has no base_model_name_or_path, so it is not known which model it "
            "belongs to. Add it."
        )
    return str(name)


def load_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Returns a `peft.PeftModel` with a folder's adapter, frozen.

    Raises:
        MissingExtra: peft is not installed.
    """
    peft: Any = _peft()
    with _without_deprecations():
        adapted: PreTrainedModel = peft.PeftModel.from_pretrained(model, folder).eval()
    return adapted


def read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder's adapter, by the names of `adapter_weights`."""
    from safetensors.torch import load_file

    return load_file(folder / _WEIGHTS)


def adapter_weights(model: PreTrainedModel, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The weights of a model's adapter, by the names that its folder has; from a state dict, where one is given."""
    found: dict[str, torch.Tensor] = _peft().get_peft_model_state_dict(
        model, None if state is None else dict(state), save_embedding_layers=False
    )
    return found


def set_adapter_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copies weights of these names into a model's adapter."""
    _peft().set_peft_model_state_dict(model, dict(weights))


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Keeps to itself that peft 0.21 asks transformers 5.24 for an attribute by its former name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtra(
            "LoRA needs the package 'peft', which is not installed: pip install 'srpo-env[lora]'."
        ) from (error)
    return peft
