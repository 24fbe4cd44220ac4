"""Weights sent to two real vLLM servers by vLLM's own transfer, whose GPU parts alone are stood in for (wire.py)."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from srpo_env.agents import weight_transfer
from srpo_env.agents.server import ServerPolicy
from srpo_env.agents.serving import vllm_arguments

pytest.importorskip("vllm", reason="vLLM is not installed here: `make vllm`")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def wire() -> Any:
    spec = importlib.util.spec_from_file_location("wire_of_tests", Path(__file__).with_name("wire.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["wire_of_tests"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def urls(wire: Any, start: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    arguments = vllm_arguments(dtype="float32", context_length=512, transfer=True)
    path = {"PYTHONPATH": wire.plugin(tmp_path_factory.mktemp("plugin") / "path")}
    return start("tiny_arithmetic", arguments, environment=path, count=2)


def test_new_weights_reach_every_server_tied_layer_and_all(
    urls: list[str], wire: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in wire.CHANGES.items():
        monkeypatch.setattr(name, value)
    monkeypatch.setattr(weight_transfer, "require_gpu", lambda model, policy: None)
    policies = [ServerPolicy([url], model="tiny_arithmetic") for url in urls]
    both = ServerPolicy(urls, model="tiny_arithmetic", sync="nccl")
    asked = kit.requests(before="1+1=2 " * 40, temperature=1.0)  # more than a block of the prefix cache
    old = kit.load("tiny_arithmetic")
    for version in (7, 8):
        with torch.no_grad():
            for parameter in both.model.parameters():
                parameter.mul_(1.05)
        both.load_weights(None, version)
        for policy in (*policies, both):
            found = asyncio.run(policy.sample(asked))
            worst = kit.worst(both.model, asked, found)
            print(f"version {version}: log-probs differ by at most {worst:.1e}")
            assert worst < kit.largest
            assert kit.worst(old, asked, found) > 0.01
        assert {output.policy_version for output in found} == {version}
    for policy in (*policies, both):
        asyncio.run(policy.aclose())
