"""Where a policy's model comes from: a transformers folder, a registered name or the hub.

Each `load_model` gives weights of its own, and the policy that asked shares them between its sampler and its learner:
two policies from one folder are two models. `load_shared` is for those that never change them: the model below
adapters.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from srpo_env.adapters import is_adapter, load_adapter, model_below
from srpo_env.errors import MissingModel, UnknownName, nearest
from srpo_env.registry import load, registered

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16", "float16"]

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_one_at_a_time = threading.Lock()
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_shared: WeakValueDictionary[tuple[str, str, str], LoadedModel] = WeakValueDictionary()
_sharing = threading.Lock()


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedModel:
    """A causal language model, ready to sample and to train.

    Attributes:
        model: In eval mode, on `device`.
        tokenizer: Has a chat template and a pad token.
        context_length: Most tokens of prompt and output together.
        stop_ids: Tokens that end an output.
        device: Where the weights lie.
        below: What it shares weights with, if anything.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context_length: int
    stop_ids: frozenset[int]
    device: torch.device
    below: LoadedModel | None = None


def resolve_model(name: str) -> Path | str:
    """Returns the folder that a model's name stands for, or the hub id itself; nothing is loaded or fetched.

    Args:
        name: A transformers folder, the folder of an adapter, a name of the entry point group `srpo_env.models`, or a
            hub id `org/name`.

    Raises:
        MissingModel: The folder is not there, or lacks config, weights or tokenizer.
        UnknownName: Not a folder, not registered, and no hub id.
    """
    path = Path(name).expanduser()
    if path.is_dir() or path.is_absolute() or name.startswith("."):
        return _checked(path)
    models = registered("model")
    if name in models:
        return _checked(Path(load("model", name)()))
    if _HUB_ID.fullmatch(name):
        return name
    raise UnknownName(
        f"model {name!r} is neither a folder nor a registered name ({', '.join(sorted(models)) or 'none'})."
        f"{nearest(name, models)} Give one of these, the path of a transformers folder, or a hub id `org/name`."
    )


def load_model(name: str, dtype: Dtype = "float32", device: str = "auto") -> LoadedModel:
    """Loads a model and its tokenizer; every call gives weights of its own.

    Args:
        name: As for `resolve_model`.
        dtype: Type of the weights.
        device: A torch device, or `auto`: CUDA where there is one, else the CPU.

    Raises:
        MissingModel: The folder or hub model can't be loaded, or can't be used for a chat.
        UnknownName: As for `resolve_model`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    place = resolve_model(name)
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if isinstance(place, Path) and is_adapter(place):
        loaded = load_model(model_below(place), dtype, device)
        return replace(loaded, model=load_adapter(loaded.model, place))
    tokenizer = load_tokenizer(name)
    automatic: Any = AutoModelForCausalLM
    with _loading(name):
        model, found = automatic.from_pretrained(place, dtype=getattr(torch, dtype), output_loading_info=True)
    if lacking := sorted(found["missing_keys"]):
        # transformers would go on with random weights in their place.
        raise MissingModel(
            f"model {name!r}: its weights lack {len(lacking)} of the model's parameters, {lacking[0]!r} among them; "
            "config.json and the weights belong to different models. Save both with `save_pretrained`."
        )
    stop_ids = _stop_ids(model, tokenizer)
    if not stop_ids:
        raise MissingModel(
            f"model {name!r}: neither its generation config nor its tokenizer names an end token, so no output could "
            "end; set `eos_token` in the folder's tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else min(stop_ids)
    return LoadedModel(model.to(where), tokenizer, _context_length(model.config, tokenizer), stop_ids, where)


def outline(name: str, dtype: Dtype = "float32") -> PreTrainedModel:
    """Returns a model without data: its shapes, from its config.json alone; nothing is fetched.

    Args:
        name: As for `resolve_model`.
        dtype: Type of the weights.

    Raises:
        MissingModel: The config is not on this machine.
        UnknownName: As for `resolve_model`.
    """
    import torch
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoConfig, AutoModelForCausalLM

    place = resolve_model(name)
    if isinstance(place, Path) and is_adapter(place):
        return outline(model_below(place), dtype)
    if not isinstance(place, Path):
        found = try_to_load_from_cache(place, "config.json")
        if not isinstance(found, str):
            raise MissingModel(
                f"model {name!r}: its config.json is not on this machine; `hf download {name} config.json` brings it."
            )
        place = Path(found).parent
    automatic: Any = AutoModelForCausalLM
    with _loading(name):
        config = AutoConfig.from_pretrained(place)
    with torch.device("meta"):
        model: PreTrainedModel = automatic.from_config(config, dtype=getattr(torch, dtype))
    return model


def load_shared(name: str, dtype: Dtype = "float32", device: str = "auto") -> LoadedModel:
    """Loads a model whose weights nobody will change: those who name the same one get the same one.

    Args:
        name: As for `resolve_model`, but not an adapter.
        dtype: As for `load_model`.
        device: As for `load_model`.

    Raises:
        MissingModel, UnknownName: As for `load_model`.
    """
    key = (str(resolve_model(name)), dtype, device)
    with _sharing:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = load_model(name, dtype, device)
    return found


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer, which must have a chat template.

    Args:
        name: As for `resolve_model`.

    Raises:
        MissingModel: The folder or hub model has no tokenizer that can be loaded and used for a chat.
        UnknownName: As for `resolve_model`.
    """
    from transformers import AutoTokenizer

    place = resolve_model(name)
    with _loading(name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place)
    if not tokenizer.chat_template:
        raise MissingModel(
            f"model {name!r}: its tokenizer has no chat template, so messages can't become a prompt; "
            "take an instruction-tuned model, or put a chat_template.jinja into the folder."
        )
    return tokenizer


def load_context_length(name: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns a model's context length without loading its weights.

    Args:
        name: As for `resolve_model`.
        tokenizer: The model's.

    Raises:
        MissingModel, UnknownName: As for `load_model`.
    """
    from transformers import AutoConfig

    place = resolve_model(name)
    with _loading(name):
        config = AutoConfig.from_pretrained(place)
    return _context_length(config, tokenizer)


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Keeps transformers' progress bars off the terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Keeps transformers' progress bar off the terminal, and turns its errors into one line; one thread at a time.

    While transformers loads a model it changes state of the whole process: a second thread would tie no weights.
    """
    from safetensors import SafetensorError

    try:
        with _one_at_a_time, without_progress_bar():
            yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise MissingModel(
            f"model {name!r} can't be loaded: {reason} Give a folder written by `save_pretrained` with its tokenizer, "
            "or a hub id that this machine holds or can fetch."
        ) from error


def _checked(folder: Path) -> Path:
    """Returns the folder if it holds a config, weights and a tokenizer."""
    if is_adapter(folder):
        return folder
    if not folder.is_dir():
        raise MissingModel(
            f"model folder '{folder}' does not exist; give a folder written by `save_pretrained`, a registered name "
            f"({', '.join(sorted(registered('model'))) or 'none'}) or a hub id `org/name`."
        )
    lacking = []
    if not (folder / "config.json").is_file():
        lacking.append("config.json")
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        lacking.append("weights (*.safetensors)")
    if not any((folder / file).is_file() for file in _TOKENIZERS):
        lacking.append("a tokenizer (tokenizer.json)")
    if lacking:
        raise MissingModel(
            f"'{folder}' is not a complete transformers folder: no {', no '.join(lacking)}. "
            "Write model and tokenizer there with `save_pretrained`, or give another folder."
        )
    return folder


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    stops = {tokenizer.eos_token_id}
    for config in (model.generation_config, model.config):
        declared = getattr(config, "eos_token_id", None)
        stops.update(declared if isinstance(declared, list | tuple) else [declared])
    return frozenset(stop for stop in stops if stop is not None)


def _context_length(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    config = config.get_text_config()
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    # A tokenizer without a limit of its own reports 1e30.
    limits = [int(limit) for limit in (length, tokenizer.model_max_length) if limit and limit < 1e9]
    return min(limits, default=2048)
