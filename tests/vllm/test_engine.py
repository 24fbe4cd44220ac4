"""The backend `vllm` on a real engine: its tokens, its log-probs, and new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import srpo_env
from srpo_env.agents.vllm_engine import VLLMPolicy
from srpo_env.records import Output, Sampling
from srpo_env.testing import check_policy

pytest.importorskip("vllm", reason="vLLM is not installed here: `make vllm`")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

ENGINE = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 64, "kv_cache_memory_bytes": 2**28}


@pytest.fixture(scope="module")
def policy(model_name: str) -> Iterator[VLLMPolicy]:
    policy = VLLMPolicy(model_name, deterministic=False, engine=ENGINE)
    yield policy
    asyncio.run(policy.aclose())


def outputs(policy: VLLMPolicy, requests: Any) -> list[Any]:
    return asyncio.run(policy.sample(requests))


def test_log_probs_are_those_of_the_learner(policy: VLLMPolicy, kit: Any) -> None:
    asked = kit.requests()
    assert kit.worst(policy.model, asked, outputs(policy, asked)) < kit.largest


def test_an_output_ends_with_its_stop_token_or_at_its_limit(policy: VLLMPolicy, kit: Any) -> None:
    asked = kit.requests(24)
    found = outputs(policy, asked)
    assert {output.finish_reason for output in found} >= {"length"}
    for request, output in zip(asked, found, strict=True):
        at_limit = len(output.output_ids) == request.sampling.max_tokens
        stopped = output.output_ids[-1] == policy.tokenizer.eos_token_id
        assert stopped if output.finish_reason == "stop" else at_limit and not stopped
        assert policy.tokenizer.eos_token not in output.text


def test_a_stop_string_ends_an_output_and_is_kept(policy: VLLMPolicy, kit: Any) -> None:
    (before,) = outputs(policy, kit.requests(1, temperature=0.0, max_tokens=8))
    (output,) = outputs(policy, kit.requests(1, temperature=0.0, max_tokens=8, stop=(before.text[0],)))
    assert output.text.startswith(before.text[0])
    assert (output.finish_reason, output.output_ids) == ("stop", before.output_ids[: len(output.output_ids)])
    assert len(output.output_ids) < len(before.output_ids)


def test_equal_seeds_give_equal_outputs_and_others_do_not(policy: VLLMPolicy, kit: Any) -> None:
    asked = kit.requests(1, temperature=1.7, max_tokens=16) * 2 + kit.requests(8, temperature=1.7, max_tokens=16)[4:]
    first, second, *others = [output.output_ids for output in outputs(policy, asked)]
    assert first == second
    assert any(other != first for other in others)


def test_it_conforms(policy: VLLMPolicy) -> None:
    check_policy(policy, deterministic=False)


def test_a_team_is_logged_with_the_learners_log_probs(policy: VLLMPolicy, model_name: str, kit: Any) -> None:
    workflow = "tiny/solver_verifier" if model_name == "tiny_arithmetic" else "solver_verifier"
    log = srpo_env.rollout(
        workflow, policies=policy, episodes=8, group_size=4, sampling=Sampling(max_tokens=24), deterministic=False
    )
    assert len(log) >= 8 * 2
    assert kit.worst_of_learner(policy.model, list(log)) < kit.largest


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "from a folder"])
def test_new_weights_are_sampled_and_nothing_of_the_old_ones_is_left(
    policy: VLLMPolicy, model_name: str, kit: Any, tmp_path: Path, in_place: bool
) -> None:
    # More than one block of the prefix cache, which holds 128 tokens on a CPU.
    asked = kit.requests(before="1+1=2 " * 40, temperature=1.0)
    old = kit.load(model_name)
    assert kit.worst(old, asked, outputs(policy, asked)) < kit.largest
    try:
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.1)
        if in_place:
            policy.load_weights(None, 7)
        else:
            policy.model.save_pretrained(tmp_path)
            policy.tokenizer.save_pretrained(tmp_path)
            policy.load_weights(tmp_path, 7)
        found = outputs(policy, asked)
        assert kit.worst(policy.model, asked, found) < kit.largest
        assert kit.worst(old, asked, found) > 0.01
        assert {output.policy_version for output in found} == {7}
    finally:
        policy.load_weights(old.state_dict(), 0)
    assert kit.worst(old, asked, outputs(policy, asked)) < kit.largest


def test_a_cancelled_call_leaves_the_engine_to_others(policy: VLLMPolicy, kit: Any) -> None:
    async def cancel() -> list[Any]:
        call = asyncio.create_task(policy.sample(kit.requests(4, max_tokens=400, temperature=1.7)))
        await asyncio.sleep(0.5)
        call.cancel()
        return await policy.sample(kit.requests(1, max_tokens=1))

    (output,) = asyncio.run(cancel())
    assert isinstance(output, Output)
    assert policy._rows == {}
