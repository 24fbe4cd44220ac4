"""Sampled by vLLM in this process and trained beside it: three updates, and an adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from srpo_env import EventLog, train
from srpo_env.agents.vllm_engine import VLLMPolicy
from srpo_env.runs import read_metrics

pytest.importorskip("vllm", reason="vLLM is not installed here: `make vllm`")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


def test_three_updates_are_sampled_by_the_weights_of_each(tmp_path: Path) -> None:
    engine = "{enforce_eager: true, max_model_len: 512, max_num_seqs: 64, kv_cache_memory_bytes: 268435456}"
    changes = [
        f"policies.main.sample={{backend: vllm, engine: {engine}}}",
        "tasks.eval.size=32",
        "rollout={tasks_per_batch: 8, group_size: 8, deterministic: false}",
        "updates=3",
        f"run={tmp_path / 'run'}",
    ]
    lines: list[str] = []
    result = train("arithmetic_tiny", changes, say=lines.append)
    print("\n".join(lines))
    assert result.updates == 3
    events = [event for event in EventLog(tmp_path / "run") if event.batch.startswith("update-")]
    versions = {event.batch: {member.output.policy_version for member in event.members} for event in events}
    assert versions == {"update-1": {0}, "update-2": {1}, "update-3": {2}}
    updates = [line["metrics"] for line in read_metrics(tmp_path / "run") if line["kind"] == "update"]
    assert len(updates) == 3
    assert max(each["sampler_mismatch_token"] for each in updates) < 1e-4


def test_an_adapter_is_sampled_in_place_of_the_weights(kit: Any) -> None:
    peft = pytest.importorskip("peft", reason="LoRA needs peft: pip install 'srpo-env[lora]'")
    engine = {"enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 2**28}
    policy = VLLMPolicy("tiny_arithmetic", engine=engine | {"enable_lora": True, "max_lora_rank": 8})
    base = kit.load("tiny_arithmetic")
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    adapted = peft.get_peft_model(kit.load("tiny_arithmetic"), settings).eval()
    policy._trained = SimpleNamespace(model=adapted)  # type: ignore[assignment]
    asked = kit.requests(temperature=1.0)
    assert kit.worst(base, asked, asyncio.run(policy.sample(asked))) < kit.largest
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.2)
        policy.load_weights(None, version)
        found = asyncio.run(policy.sample(asked))
        assert kit.worst(adapted, asked, found) < kit.largest
        assert kit.worst(base, asked, found) > 0.01
        assert {output.policy_version for output in found} == {version}
    asyncio.run(policy.aclose())
