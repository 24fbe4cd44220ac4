"""The backend `server` on a real vLLM: its tokens and log-probs, new weights, an adapter, and training against it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

import srpo_env
from srpo_env import EventLog, Sampling, train
from srpo_env.agents.serving import vllm_arguments
from srpo_env.errors import PolicyError
from srpo_env.models import load_tokenizer
from srpo_env.registry import load
from srpo_env.runs import read_metrics
from srpo_env.testing import check_policy

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def url(model_name: str, start: Callable[..., list[str]]) -> str:
    """The address of a server of the model, started for this module."""
    return start(model_name, vllm_arguments(dtype="float32", context_length=512, lora_rank=8))[0]


@pytest.fixture
def policy(url: str, model_name: str, tmp_path: Path) -> Iterator[Any]:
    settings = {"model": model_name, "urls": [url], "sync": "checkpoint", "sync_folder": str(tmp_path / "weights")}
    policy = load("backend", "server").from_config("main", settings)
    yield policy
    asyncio.run(policy.aclose())


def outputs(policy: Any, requests: Any) -> list[Any]:
    return asyncio.run(policy.sample(requests))


def test_a_server_knows_whether_it_got_weights(url: str, policy: Any, kit: Any) -> None:
    info = url.removesuffix("/v1") + "/weight_info"
    before = httpx.get(info, trust_env=False).json()
    outputs(policy, kit.requests(1))
    after = httpx.get(info, trust_env=False).json()
    assert [before["weight_version"], after["weight_version"]] == ["default", "main-0"]


def test_a_server_with_another_tokenizer_is_refused(url: str, model_name: str, kit: Any, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model_name)
    tokenizer.add_tokens(["façade"])
    tokenizer.save_pretrained(tmp_path)
    kit.load(model_name).save_pretrained(tmp_path)
    policy = load("backend", "server").from_config("main", {"model": str(tmp_path), "urls": [url]})
    (outcome,) = outputs(policy, kit.requests(1))
    asyncio.run(policy.aclose())
    assert isinstance(outcome, PolicyError)
    assert "makes other ids of" in str(outcome)


def test_it_conforms(policy: Any) -> None:
    check_policy(policy, deterministic=False)


def test_a_solver_and_a_verifier_are_logged_with_the_learners_log_probs(policy: Any, model_name: str, kit: Any) -> None:
    workflow = "tiny/solver_verifier" if model_name == "tiny_arithmetic" else "solver_verifier"
    log = srpo_env.rollout(workflow, policies=policy, episodes=8, group_size=4, sampling=Sampling(max_tokens=24))
    found = [member.output for event in log for member in event.members]
    assert len(found) >= 8 * 2
    assert {len(each.output_ids) - len(each.logprobs) for each in found} == {0}
    assert {each.logprobs_mode for each in found} == {"processed"}
    worst = kit.worst_of_learner(kit.load(model_name), list(log))
    print(f"{model_name}: {len(found)} outputs, log-probs differ by at most {worst:.1e}")
    assert worst < kit.largest


def test_new_weights_are_sampled_and_nothing_of_the_old_ones_is_left(policy: Any, model_name: str, kit: Any) -> None:
    # More than one block of the prefix cache, which holds 128 tokens on a CPU.
    asked = kit.requests(before="1+1=2 " * 40, temperature=1.0)
    old = kit.load(model_name)
    assert kit.worst(old, asked, outputs(policy, asked)) < kit.largest
    try:
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.1)
        policy.load_weights(None, 7)
        found = outputs(policy, asked)
        print(f"{model_name}: new weights, at most {kit.worst(policy.model, asked, found):.1e}")
        assert kit.worst(policy.model, asked, found) < kit.largest
        assert kit.worst(old, asked, found) > 0.01
        assert {output.policy_version for output in found} == {7}
    finally:
        policy.load_weights(old.state_dict(), 0)
    assert kit.worst(old, asked, outputs(policy, asked)) < kit.largest


def test_an_adapter_is_sampled_in_place_of_the_weights(url: str, model_name: str, kit: Any, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft: pip install 'srpo-env[lora]'")
    settings = {"model": model_name, "urls": [url], "sync": "lora", "sync_folder": str(tmp_path / "weights")}
    settings["lora"] = {"rank": 4, "alpha": 8}
    policy = load("backend", "server").from_config("main", settings)
    base = kit.load(model_name)
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(kit.load(model_name), adapter).eval()
    policy._trained = SimpleNamespace(model=adapted, version=0, load_weights=lambda source, version: None)
    asked = kit.requests(temperature=1.0)
    assert kit.worst(base, asked, outputs(policy, asked)) < kit.largest
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.05)
        policy._trained.version = version
        policy.load_weights(None, version)
        found = outputs(policy, asked)
        print(f"{model_name}: adapter {version}, at most {kit.worst(adapted, asked, found):.1e}")
        assert kit.worst(adapted, asked, found) < kit.largest
        assert kit.worst(base, asked, found) > 0.01
        assert {output.policy_version for output in found} == {version}
    asyncio.run(policy.aclose())


def test_three_updates_are_sampled_by_the_weights_of_each(url: str, model_name: str, tmp_path: Path) -> None:
    if model_name != "tiny_arithmetic":
        pytest.skip("the recipe is for the tiny model")
    run = tmp_path / "run"
    changes = [
        f"policies.main.sample={{backend: server, urls: ['{url}'], sync: checkpoint, sync_folder: {tmp_path}/weights}}",
        "tasks.eval.size=32",
        "rollout={tasks_per_batch: 8, group_size: 8}",
        "updates=3",
        f"run={run}",
    ]
    lines: list[str] = []
    result = train("arithmetic_tiny", changes, say=lines.append)
    print("\n".join(lines))
    assert result.updates == 3
    events = [event for event in EventLog(run) if event.batch.startswith("update-")]
    versions = {event.batch: {member.output.policy_version for member in event.members} for event in events}
    assert versions == {"update-1": {0}, "update-2": {1}, "update-3": {2}}
    updates = [line["metrics"] for line in read_metrics(run) if line["kind"] == "update"]
    assert max(each["sampler_mismatch_token"] for each in updates) < 1e-4
