"""Names of models, and folders that are not models."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from srpo_env.errors import MissingModel, UnknownName
from srpo_env.models import load_context_length, load_model, resolve_model


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def test_a_folder_stands_for_itself_and_a_hub_id_too(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_model_is_loaded_ready_to_sample(folder: Path, tokenizer: Any) -> None:
    loaded = load_model(str(folder), "bfloat16", "cpu")
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training
    assert loaded.context_length == 160
    assert loaded.stop_ids == {tokenizer.eos_token_id}


def test_threads_may_load_models_at_the_same_time(folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load_model(str(folder)).model, range(8)))
    assert all(model.get_output_embeddings().weight is model.get_input_embeddings().weight for model in loaded)


def test_the_context_length_is_known_without_the_weights(copy: Path, tokenizer: Any) -> None:
    (copy / "model.safetensors").write_bytes(b"")
    edit(copy / "config.json", max_position_embeddings=96)
    assert load_context_length(str(copy), tokenizer) == 96


def test_all_declared_end_tokens_stop(copy: Path, tokenizer: Any) -> None:
    edit(copy / "generation_config.json", eos_token_id=[7, 9])
    assert load_model(str(copy)).stop_ids == {7, 9, tokenizer.eos_token_id}


def test_a_missing_pad_token_is_the_end_token(copy: Path) -> None:
    edit(copy / "tokenizer_config.json", pad_token=None)
    loaded = load_model(str(copy))
    assert loaded.tokenizer.pad_token_id == loaded.tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json"], "no config.json"),
        (["model.safetensors"], "no weights"),
        (["tokenizer.json"], "no a tokenizer|no tokenizer"),
        (["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"], "no config.json, no weights"),
    ],
)
def test_an_incomplete_folder_is_named_with_what_it_lacks(copy: Path, files: list[str], message: str) -> None:
    for file in files:
        (copy / file).unlink()
    with pytest.raises(MissingModel, match=message):
        resolve_model(str(copy))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "../nowhere"])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(MissingModel, match="does not exist"):
        resolve_model(name)


def test_an_unknown_name_brings_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'tiny_arithmetic'"):
        resolve_model("tiny_aritmetic")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_damaged_file_is_one_line(copy: Path, file: str) -> None:
    (copy / file).write_bytes(b"{ nonsense")
    with pytest.raises(MissingModel, match="can't be loaded") as caught:
        load_model(str(copy))
    assert "\n" not in str(caught.value)


def test_weights_of_another_model_are_not_filled_up_at_random(copy: Path) -> None:
    edit(copy / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(MissingModel, match=r"lack 11 of the model's parameters, 'model\.layers\.2"):
        load_model(str(copy))


def test_a_tokenizer_without_chat_template_is_refused(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(MissingModel, match="no chat template"):
        load_model(str(copy))


def test_a_model_without_end_token_is_refused(copy: Path) -> None:
    edit(copy / "tokenizer_config.json", eos_token=None)
    edit(copy / "config.json", eos_token_id=None)
    edit(copy / "generation_config.json", eos_token_id=None)
    with pytest.raises(MissingModel, match="end token"):
        load_model(str(copy))


def test_the_backends_load_neither_torch_nor_transformers_before_they_must() -> None:
    code = (
        "import sys, srpo_env.agents.local, srpo_env.agents.scripted, srpo_env.agents.tiny, srpo_env.models\n"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
