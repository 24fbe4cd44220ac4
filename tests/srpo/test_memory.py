"""Is the memory that a dry run tells the sum that a hand gets, and what autograd really keeps?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from srpo_env.adapters import add_adapter
from srpo_env.agents import LocalPolicy
from srpo_env.config import Lora, PolicyTraining
from srpo_env.errors import MissingModel
from srpo_env.jobs import Job
from srpo_env.memory import PROCESS_BYTES, Memory, estimate
from srpo_env.models import load_model, outline
from srpo_env.records import Message
from srpo_env.trainers.srpo import SRPOConfig
from srpo_env.trainers.srpo.memory import kept_per_token, learner_memory

PARAMETERS = 308_736  # of the tiny Qwen3
HEAD = 102 * 128  # vocabulary times hidden size


def learner(training: PolicyTraining | None = None, *, model: Any = None, **settings: Any) -> dict[str, int]:
    model = model or outline("tiny_arithmetic")
    return learner_memory(model, SRPOConfig(clip=0.2, **settings), training or PolicyTraining())


def test_an_outline_has_shapes_and_no_data() -> None:
    model = outline("tiny_arithmetic", "bfloat16")
    assert sum(each.numel() for each in model.parameters()) == PARAMETERS
    assert {(each.device.type, each.dtype) for each in model.parameters()} == {("meta", torch.bfloat16)}


def test_gradients_are_as_large_as_the_weights_and_adams_moments_twice_that() -> None:
    found = learner()
    assert (found["gradients"], found["optimiser"]) == (4 * PARAMETERS, 8 * PARAMETERS)


@pytest.mark.parametrize(("coefficient", "expected"), [(0.0, 0), (0.1, 4 * PARAMETERS)])
def test_a_kl_needs_the_weights_again(coefficient: float, expected: int) -> None:
    assert learner(kl_coefficient=coefficient)["reference"] == expected


def test_of_an_adapter_only_its_own_weights_count() -> None:
    lora = Lora(rank=4, targets=("q_proj",))
    adapted = add_adapter(outline("tiny_arithmetic"), lora, 0)
    found = learner(PolicyTraining(lora=lora), model=adapted, kl_coefficient=0.1)
    own = 2 * 4 * (128 + 128)  # layers, rank, in and out
    assert (found["gradients"], found["optimiser"], found["reference"]) == (4 * own, 8 * own, 0)


def test_activations_are_those_of_a_full_micro_batch_and_the_heads_gradient() -> None:
    one, two = (learner(micro_batch_tokens=tokens)["activations"] for tokens in (1000, 2000))
    assert two - one == 1000 * kept_per_token(outline("tiny_arithmetic"))
    assert 2 * one - two == 4 * HEAD


@pytest.mark.parametrize("tokens", [128, 384])
def test_what_a_pass_without_data_keeps_is_what_a_real_one_keeps(tokens: int) -> None:
    model = load_model("tiny_arithmetic").model
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    kept: dict[int, int] = {}
    alive = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # so that no address is used twice
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)
    assert kept_per_token(outline("tiny_arithmetic")) == pytest.approx(sum(kept.values()) / tokens, rel=0.05)


def test_the_cache_is_that_of_the_rows_at_their_longest_and_of_their_prompts() -> None:
    prompt = [Message(role="user", content="1+1=")]
    length = len(LocalPolicy("tiny_arithmetic")._chat.prompt_ids(prompt))
    assert length < 24
    settings = {"model": "tiny_arithmetic"}
    per_token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, head size, bytes
    found = LocalPolicy.cache_bytes("main", settings, prompt, 6, 10)
    assert found == per_token * 10 * (64 + length)  # 32 columns at least for the output, in steps of 32


def test_the_rows_cache_is_bounded_by_the_policys_own_limits() -> None:
    prompt = [Message(role="user", content="1+1=")]
    settings = {"model": "tiny_arithmetic", "cache_gib": 0.001}
    found = LocalPolicy.cache_bytes("main", settings, prompt, 6, 10_000)
    prefill = min(1024 * len(LocalPolicy("tiny_arithmetic")._chat.prompt_ids(prompt)), 8192)
    assert found == int(0.001 * 2**30) + prefill * 1024  # of 1,024 rows, 1 KiB a token


def test_the_peak_is_while_sampling_or_while_learning() -> None:
    memory = Memory(process=1, weights=2, reference=4, optimiser=8, cache=100, gradients=30, activations=40)
    assert memory.peak == 45 + 100
    assert memory.model_copy(update={"activations": 120}).peak == 45 + 120


def test_weights_that_adapters_share_count_once() -> None:
    adapted = "{model: tiny_arithmetic, train: {lora: {rank: 4}}}"
    alone = Job.prepare("arithmetic_tiny", [f"policies.main={adapted}"])
    both = Job.prepare("arithmetic_tiny", [f"policies={{main: {adapted}, other: {adapted}}}"])
    found = [estimate(job) for job in (both, alone)]
    assert [each.weights for each in found if isinstance(each, Memory)] == [4 * PARAMETERS] * 2
    assert [each.process for each in found if isinstance(each, Memory)] == [PROCESS_BYTES] * 2


def test_where_tools_lengthen_the_prompts_of_a_sampler_in_this_process_nothing_is_estimated() -> None:
    found = estimate(Job.prepare("search_tiny"))
    assert isinstance(found, str)
    assert "prompts grow by what tools answer" in found
    server = "{backend: server, urls: ['http://127.0.0.1:1/v1'], sync: checkpoint, sync_folder: /dev/shm/x}"
    assert isinstance(estimate(Job.prepare("search_tiny", [f"policies.main.sample={server}"])), Memory)


def test_a_config_that_is_not_here_is_named_and_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("the network was asked"))
    with pytest.raises(MissingModel, match=r"'nobody/nothing': its config\.json is not on this machine; `hf download"):
        outline("nobody/nothing")
