"""Do new weights reach every server, and does each output say which weights it came from?"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from srpo_env.agents.server import ServerPolicy
from srpo_env.config import Lora, Recipe
from srpo_env.errors import InvalidRecipe, PolicyError
from srpo_env.eventlog import EventLog
from srpo_env.models import load_tokenizer, resolve_model
from srpo_env.portal import run
from srpo_env.training import train

Serve = Callable[..., Any]
Forced = Callable[..., list[float]]
AFTER = ["/reset_prefix_cache", "/update_weight_version", "/resume"]


@pytest.fixture
def loading(fake: Any, serve: Serve) -> Callable[..., Any]:
    """Starts a server that samples a folder's model and takes new weights as vLLM does."""

    def loading(folder: Path, end: int) -> Any:
        weights = fake.Weights(folder, end)

        def on_call(call: Any) -> None:
            if call.path == "/collective_rpc":
                weights.load(Path(call.body["kwargs"]["weights_path"]))

        return serve(draw=weights, on_call=on_call)

    return loading


def handed_over(server: Any) -> list[str]:
    """The paths of the calls that are about weights."""
    others = ("/v1/models", "/v1/completions", "/tokenize")
    return [each.path for each in server.calls if not each.path.startswith(others)]


def test_the_models_own_weights_and_then_new_ones_reach_every_server_and_its_outputs(
    loading: Callable[..., Any],
    folder: Path,
    other_folder: Path,
    tmp_path: Path,
    ask: Any,
    forced: Forced,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    servers = [loading(left, tokenizer.eos_token_id) for left in (folder, other_folder)]
    urls = [each.url for each in servers]
    policy = ServerPolicy(urls, model=folder, sync="checkpoint", sync_folder=tmp_path / "weights")
    requests = [ask.request("hi", seed=seed, index=seed, max_tokens=6) for seed in range(4)]
    before = ask.outputs(policy, requests)
    policy.load_weights(other_folder, 3)
    after = ask.outputs(policy, requests)
    for outputs, weights, version in ((before, folder, 0), (after, other_folder, 3)):
        model = AutoModelForCausalLM.from_pretrained(weights)
        for output in outputs:
            expected = forced(model, output.prompt_ids, output.output_ids)
            assert output.logprobs == pytest.approx(expected, abs=1e-5)
            assert output.policy_version == version
    for server in servers:
        first, second = ["/pause?mode=wait", "/collective_rpc", *AFTER], ["/weight_info", "/pause?mode=wait"]
        assert handed_over(server) == [*first, *second, "/collective_rpc", *AFTER]
        assert server.weights == "main-3"


def test_what_was_cached_is_forgotten_before_the_next_request(
    loading: Callable[..., Any], folder: Path, ask: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    server = loading(folder, tokenizer.eos_token_id)
    policy = ServerPolicy([server.url], model=folder, sync="checkpoint")
    ask.outputs(policy, [ask.request("hi", max_tokens=2)])
    policy.load_weights(None, 1)
    ask.outputs(policy, [ask.request("hi", max_tokens=2)])
    paths = [each.path for each in server.calls]
    loaded = paths.index("/collective_rpc", -8)
    assert paths[loaded - 3 :] == [
        "/v1/completions",
        "/weight_info",
        "/pause?mode=wait",
        "/collective_rpc",
        *AFTER,
        "/v1/completions",
    ]


def test_the_output_layer_is_written_with_weights_of_its_own(
    serve: Serve, folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    policy = ServerPolicy([serve().url], model=folder, sync="checkpoint", sync_folder=tmp_path)
    policy.load_weights(other_folder, 1)
    (written,) = tmp_path.iterdir()
    state = load_file(written / "model.safetensors")
    expected = load_file(other_folder / "model.safetensors")["model.embed_tokens.weight"]
    torch.testing.assert_close(state["lm_head.weight"], expected)
    torch.testing.assert_close(state["model.embed_tokens.weight"], expected)
    assert json.loads((written / "config.json").read_text())["tie_word_embeddings"] is False


def test_what_the_learner_changed_in_place_is_handed_over(
    serve: Serve, folder: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    policy = ServerPolicy([serve().url], model=folder, sync="checkpoint", sync_folder=tmp_path)
    assert policy.tokenizer.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.fill_(0.25)
    policy.load_weights(None, 1)
    (written,) = tmp_path.iterdir()
    assert load_file(written / "model.safetensors")["lm_head.weight"].unique().tolist() == [0.25]


def test_of_old_weights_nothing_is_left_and_of_others_everything(serve: Serve, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    policy = ServerPolicy([serve().url], model=folder, sync="checkpoint", sync_folder=tmp_path, name="main")
    for version in (1, 2):
        policy.load_weights(None, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["main-000002", "mine"]


def test_a_temporary_folder_goes_with_the_policy(serve: Serve, folder: Path) -> None:
    server = serve()
    policy = ServerPolicy([server.url], model=folder, sync="checkpoint")
    policy.load_weights(None, 1)
    written = Path(next(each for each in server.calls if each.path == "/collective_rpc").body["kwargs"]["weights_path"])
    assert (written / "model.safetensors").is_file()
    del policy
    assert not written.parent.exists()


def test_a_server_without_the_endpoints_is_told_how_to_start(serve: Serve, folder: Path, ask: Any) -> None:
    policy = ServerPolicy([serve().url, serve(dev=False).url], model=folder, sync="checkpoint")
    said = r"/pause\?mode=wait: HTTP 404.*not handed over.*VLLM_SERVER_DEV_MODE=1"
    with pytest.raises(PolicyError, match=said):
        policy.load_weights(None, 1)
    assert policy.version == 0
    (outcome,) = ask.outcomes(policy, [ask.request("hi")])
    assert isinstance(outcome, PolicyError)
    assert re.search(said, str(outcome))


def test_an_output_carries_the_version_it_was_asked_with(serve: Serve, folder: Path, ask: Any) -> None:
    server = serve(fault=lambda number, body: "hold" if number == 2 else None)  # after the probe's two
    # The place of the call that is under way is no other's, and new weights must not wait for it.
    policy = ServerPolicy([server.url], model=folder, sync="checkpoint", max_in_flight=1)
    found: list[Any] = []
    sampling = threading.Thread(target=lambda: found.extend(ask.outputs(policy, [ask.request("hi", max_tokens=2)])))
    sampling.start()
    assert server.asked.wait(10)
    policy.load_weights(None, 1)
    server.released.set()
    sampling.join()
    found += ask.outputs(policy, [ask.request("hi", max_tokens=2)])
    assert [output.policy_version for output in found] == [0, 1]


class Adapted:
    """A trained model with an adapter, as far as a hand-over needs one."""

    def __init__(self) -> None:
        self.model = self
        self.version = 0

    def load_weights(self, source: Any, version: int) -> None:
        self.version = version

    def save_pretrained(self, folder: Path, *, save_embedding_layers: bool) -> None:
        assert not save_embedding_layers
        (folder / "adapter_config.json").write_text("{}")


def test_an_adapter_is_loaded_in_place_and_then_asked_for(serve: Serve, folder: Path, tmp_path: Path, ask: Any) -> None:
    seen: list[bool] = []

    def on_call(call: Any) -> None:
        if call.path == "/v1/load_lora_adapter":
            seen.append((Path(call.body["lora_path"]) / "adapter_config.json").is_file())

    servers = [serve(on_call=on_call) for _ in range(2)]
    policy = ServerPolicy([each.url for each in servers], model=folder, sync="lora", lora=Lora(), sync_folder=tmp_path)
    policy.__dict__["_trained"] = Adapted()
    request = ask.request("hi", max_tokens=2)
    versions = [output.policy_version for output in ask.outputs(policy, [request])]
    for version in (1, 2):
        policy.load_weights(None, version)
        versions += [output.policy_version for output in ask.outputs(policy, [request])]
    bodies = [body for each in servers for body in each.bodies()]
    assert [body["model"] for body in bodies] == ["srpo_env-main"] * 3
    assert versions == [0, 1, 2]
    for server in servers:
        paths = [each for each in handed_over(server) if each != "/weight_info"]
        assert paths == ["/pause?mode=wait", "/v1/load_lora_adapter", *AFTER] * 3
        loads = server.bodies("/v1/load_lora_adapter")
        assert [(body["lora_name"], body["load_inplace"]) for body in loads] == [("srpo_env-main", True)] * 3
        assert len({body["lora_path"] for body in loads}) == 3
    assert seen == [True] * 6


def test_a_server_without_adapters_is_told_how_to_start(serve: Serve, folder: Path) -> None:
    server = serve(answers={"/v1/load_lora_adapter": (404, {}, {"detail": "Not Found"})})
    policy = ServerPolicy([server.url], model=folder, sync="lora", lora=Lora())
    policy.__dict__["_trained"] = Adapted()
    with pytest.raises(PolicyError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"):
        policy.load_weights(None, 1)


def test_weights_may_be_handed_over_from_inside_a_running_loop(serve: Serve, folder: Path) -> None:
    policy = ServerPolicy([serve().url], model=folder, sync="checkpoint")

    async def hand_over() -> None:
        await asyncio.to_thread(policy.load_weights, None, 1)
        policy.load_weights(None, 2)

    run(hand_over)
    assert policy.version == 2


# Servers that restart: they come up with the weights that they began with.


def test_a_replica_that_restarts_gets_the_last_weights_before_it_is_sampled_again(
    loading: Callable[..., Any],
    folder: Path,
    other_folder: Path,
    ask: Any,
    forced: Forced,
    quick: None,
    tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = loading(folder, tokenizer.eos_token_id)
    policy = ServerPolicy([server.url], model=folder, sync="checkpoint", attempts=3)
    policy.load_weights(other_folder, 3)
    server.weights, server.draw.model = "default", AutoModelForCausalLM.from_pretrained(folder)
    server.fault = lambda number, body: "reset" if number == 2 else None  # after the probe's two
    outputs = ask.outputs(policy, [ask.request("hi", seed=seed, max_tokens=6) for seed in range(4)])
    model = AutoModelForCausalLM.from_pretrained(other_folder)
    late = [output for output in outputs if output.attempts == 2]
    assert len(late) == 1
    assert late[0].logprobs == pytest.approx(forced(model, late[0].prompt_ids, late[0].output_ids), abs=1e-5)
    assert late[0].policy_version == 3
    again = ["/weight_info", "/pause?mode=wait", "/collective_rpc", *AFTER]
    assert handed_over(server)[-len(again) :] == again
    (said,) = [each.getMessage() for each in caplog.records if "restarted" in each.getMessage()]
    assert f"{server.url} has restarted since it got the weights of version 3" in said


def test_a_failed_call_to_a_replica_that_did_not_restart_moves_no_weights(
    serve: Serve, folder: Path, ask: Any, quick: None
) -> None:
    server = serve(fault=lambda number, body: "reset" if number == 2 else None)
    policy = ServerPolicy([server.url], model=folder, sync="checkpoint", attempts=3)
    (output,) = ask.outputs(policy, [ask.request("hi", max_tokens=2)])
    assert output.attempts == 2
    assert handed_over(server).count("/weight_info") == 1
    assert handed_over(server).count("/collective_rpc") == 1


def test_many_calls_that_fail_with_a_replica_make_it_load_once(
    serve: Serve, folder: Path, ask: Any, quick: None
) -> None:
    server = serve(fault=lambda number, body: "reset" if 2 <= number < 12 else None)
    policy = ServerPolicy([server.url], model=folder, sync="checkpoint", attempts=10)
    policy.load_weights(None, 1)
    server.weights = "default"
    ask.outputs(policy, [ask.request("hi", seed=seed, max_tokens=2) for seed in range(10)])
    assert handed_over(server).count("/collective_rpc") == 2


def test_a_restart_between_calls_is_told_at_the_next_hand_over(
    serve: Serve, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    servers = [serve(), serve()]
    policy = ServerPolicy([each.url for each in servers], model=folder, sync="checkpoint")
    policy.load_weights(None, 1)
    servers[1].weights = "default"
    policy.load_weights(None, 2)
    (said,) = [each.getMessage() for each in caplog.records if "restarted" in each.getMessage()]
    assert f"{servers[1].url} has restarted since it got the weights of version 1" in said
    assert [each.weights for each in servers] == ["main-2", "main-2"]


# Training.


def recipe_of(url: str, tmp_path: Path, **sample: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "workflow": "tiny/parallel_proposers",
            "tasks": {"train": {"use": "arithmetic", "size": 8}},
            "policies": {
                "main": {
                    "model": "tiny_arithmetic",
                    "device": "cpu",
                    "sample": {"backend": "server", "urls": [url]} | sample,
                    "train": {"lr": 1e-3},
                }
            },
            "sampling": {"train": {"max_tokens": 4}},
            "rollout": {"tasks_per_batch": 2, "group_size": 4},
            "learner": {"preset": "srpo", "clip": 0.2, "length_norm": "sum", "old_logprobs": "sampler"},
            "updates": 2,
            "run": str(tmp_path / "run"),
        }
    )


def test_a_policy_is_trained_here_and_sampled_there(
    loading: Callable[..., Any], tmp_path: Path, forced: Forced
) -> None:
    model = Path(resolve_model("tiny_arithmetic"))
    end = load_tokenizer("tiny_arithmetic").eos_token_id
    server = loading(model, end)
    train(recipe_of(server.url, tmp_path, sync="checkpoint"))
    trained = AutoModelForCausalLM.from_pretrained(model)
    versions = []
    for event in EventLog(tmp_path / "run"):
        for member in event.members:
            versions.append((event.batch, member.output.policy_version))
            if event.batch == "update-1":
                expected = forced(trained, member.output.prompt_ids, member.output.output_ids)
                assert member.output.logprobs == pytest.approx(expected, abs=1e-4)
    assert set(versions) == {("eval-0", 0), ("update-1", 0), ("update-2", 1), ("eval-2", 1)}
    last = server.draw.model.state_dict()["model.embed_tokens.weight"]
    checkpoint = load_file(tmp_path / "run" / "checkpoints" / "000002" / "main" / "model.safetensors")
    torch.testing.assert_close(last, checkpoint["model.embed_tokens.weight"])


def test_training_without_sync_is_refused_before_anything_is_written(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(InvalidRecipe, match=r"Set sample\.sync to lora, checkpoint or nccl"):
        train(recipe_of(serve().url, tmp_path))
    assert list(tmp_path.iterdir()) == []
