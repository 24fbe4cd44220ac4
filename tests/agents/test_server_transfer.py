"""Are weights sent from GPU to GPU to every server, and does a fault in it end the wait and say what to do?

vLLM's engine, which needs GPUs, is stood in for; tests/vllm has it with another wire.
"""

from __future__ import annotations

import importlib.util
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from srpo_env.agents import weight_transfer
from srpo_env.agents.server import ServerPolicy
from srpo_env.agents.weight_sync import named_weights
from srpo_env.errors import InvalidRecipe, MissingExtra, PolicyError
from srpo_env.models import load_model

Serve = Callable[..., Any]
EVERY_TIME = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
AFTER = ["/reset_prefix_cache", "/update_weight_version", "/resume"]
REMEDY = r"""started with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '\{"backend": "nccl"\}'.*--resume"""


class Engine:
    """Asks the servers what vLLM's engine asks, and waits where that would: for the other side, and for ever."""

    def __init__(self, model: Any, servers: Any, address: str, ranks: int) -> None:
        self.model, self.servers = model, servers
        self.release = threading.Event()
        self.waits = self.breaks = False
        place = {"master_address": address, "master_port": 29500, "rank_offset": 1, "world_size": ranks}
        self.together(lambda: servers.init_weight_transfer_engine({**place, "packed": True}))

    def together(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PolicyError:
            self.release.wait()

    def send_weights(self) -> None:
        if self.breaks:
            raise RuntimeError("NCCL error:\nunhandled cuda error")
        if self.waits:
            self.release.wait()
        self.servers.start_weight_update()
        names = [name for name, _ in named_weights(self.model)]
        self.together(lambda: self.servers.update_weights({"names": names}))
        self.servers.finish_weight_update()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """The engines that were opened."""
    found: list[Engine] = []

    def open_engine(*given: Any) -> Engine:
        engine = Engine.__new__(Engine)
        found.append(engine)
        engine.__init__(*given)  # type: ignore[misc]
        return engine

    monkeypatch.setattr(weight_transfer, "open_engine", open_engine)
    monkeypatch.setattr(weight_transfer, "require_gpu", lambda model, policy: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    yield found
    for engine in found:
        engine.release.set()


@pytest.fixture
def policy_of(folder: Path, engines: list[Engine]) -> Callable[..., ServerPolicy]:
    def policy_of(*servers: Any, **settings: Any) -> ServerPolicy:
        return ServerPolicy([each.url for each in servers], model=folder, sync="nccl", **settings)

    return policy_of


def paths(server: Any) -> list[str]:
    others = ("/v1/models", "/v1/completions", "/tokenize")
    return [each.path for each in server.calls if not each.path.startswith(others)]


def test_servers_pause_take_the_weights_forget_what_they_cached_and_go_on(
    serve: Serve, policy_of: Any, ask: Any
) -> None:
    servers = [serve(), serve()]
    policy = policy_of(*servers)
    first = ask.outputs(policy, [ask.request("hi", max_tokens=2)])
    policy.load_weights(None, 4)
    second = ask.outputs(policy, [ask.request("hi", max_tokens=2)])
    for server in servers:
        opening = ["/pause?mode=wait", "/get_world_size", "/init_weight_transfer_engine", *EVERY_TIME, *AFTER]
        assert paths(server) == [*opening, "/weight_info", "/pause?mode=wait", *EVERY_TIME, *AFTER]
        assert server.weights == "main-4"
    assert [output.policy_version for output in first + second] == [0, 4]


def test_the_workers_of_all_servers_get_ranks_after_the_learners(serve: Serve, policy_of: Any) -> None:
    servers = [serve(workers=workers) for workers in (2, 1, 4)]
    policy_of(*servers).load_weights(None, 1)
    infos = [server.bodies("/init_weight_transfer_engine")[0]["init_info"] for server in servers]
    assert [info["rank_offset"] for info in infos] == [1, 3, 4]
    assert [info["world_size"] for info in infos] == [8, 8, 8]
    assert {(info["master_address"], info["master_port"], info["packed"]) for info in infos} == {
        ("127.0.0.1", 29500, True)
    }


def test_a_tied_output_layer_is_sent_too_and_by_the_names_of_the_models_files(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    sent = dict(named_weights(model))
    assert set(sent) == {*dict(model.named_parameters()), "lm_head.weight"}
    torch.testing.assert_close(sent["lm_head.weight"], model.model.embed_tokens.weight.detach())
    assert not any(tensor.requires_grad for tensor in sent.values())


def test_what_the_learner_changed_in_place_is_what_is_sent(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(0.25)
    assert dict(named_weights(model))["lm_head.weight"].unique().tolist() == [0.25]


def test_who_asks_for_an_output_while_weights_are_sent_waits_and_gets_the_new_ones(
    serve: Serve, policy_of: Any, engines: list[Engine], ask: Any
) -> None:
    server = serve()
    policy = policy_of(server, max_in_flight=1)
    ask.outputs(policy, [ask.request("hi", max_tokens=2)])
    engines[0].waits = True
    found: list[Any] = []
    sending = threading.Thread(target=policy.load_weights, args=(None, 1))
    asking = threading.Thread(target=lambda: found.extend(ask.outputs(policy, [ask.request("ho", max_tokens=2)])))
    sending.start()
    while paths(server)[-1] != "/pause?mode=wait":
        threading.Event().wait(0.01)
    asking.start()
    threading.Event().wait(0.1)
    assert len(server.bodies()) == 1
    engines[0].release.set()
    sending.join()
    asking.join()
    assert [output.policy_version for output in found] == [1]


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", *EVERY_TIME])
@pytest.mark.parametrize("status", [404, 500])
def test_a_server_that_fails_ends_the_wait_of_all_and_is_named(
    serve: Serve, policy_of: Any, path: str, status: int
) -> None:
    sound, broken = serve(), serve(answers={path: (status, {}, {"detail": "no such engine"})})
    policy = policy_of(sound, broken)
    said = rf"{broken.url.removesuffix('/v1')}{path}: HTTP {status}: no such engine.*not handed over.*{REMEDY}"
    for _ in range(2):
        with pytest.raises(PolicyError, match=said):
            policy.load_weights(None, 1)
    assert paths(broken).count(path) == 1
    assert "/resume" not in paths(sound) + paths(broken)
    assert policy.version == 0


def test_a_key_is_not_in_the_error_of_a_transfer(serve: Serve, policy_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "sk-abc123")
    server = serve(answers={"/update_weights": (500, {}, {"detail": "no: Bearer sk-abc123"})})
    with pytest.raises(PolicyError, match="no: Bearer \\*\\*\\*") as caught:
        policy_of(server, api_key_env="TEST_KEY").load_weights(None, 1)
    assert "sk-a" not in "".join(traceback.format_exception(caught.value))


def test_outputs_are_refused_once_weights_did_not_arrive(serve: Serve, policy_of: Any, ask: Any) -> None:
    server = serve(answers={"/update_weights": (500, {}, {})})
    (outcome,) = ask.outcomes(policy_of(server), [ask.request("hi")])
    assert isinstance(outcome, PolicyError)
    assert server.bodies() == []


def test_a_failure_of_vllm_in_this_process_is_told_in_one_line(
    serve: Serve, policy_of: Any, engines: list[Engine]
) -> None:
    policy = policy_of(serve())
    policy.load_weights(None, 1)
    engines[0].breaks = True
    with pytest.raises(PolicyError, match=rf"policy 'main': .*RuntimeError: NCCL error: unhandled.*{REMEDY}"):
        policy.load_weights(None, 2)


def test_a_server_that_restarted_is_not_waited_for(serve: Serve, policy_of: Any) -> None:
    servers = [serve(), serve()]
    policy = policy_of(*servers)
    policy.load_weights(None, 1)
    servers[1].weights = "default"
    with pytest.raises(PolicyError, match=rf"{servers[1].url} has restarted .* version 1.*start all servers anew"):
        policy.load_weights(None, 2)
    assert paths(servers[0]).count("/update_weights") == 1


def test_a_server_that_fails_to_say_how_many_workers_it_has_is_named(serve: Serve, policy_of: Any, quick: None) -> None:
    server = serve(answers={"/get_world_size": (200, {}, {})})
    with pytest.raises(PolicyError, match="/get_world_size: the reply has no `world_size`"):
        policy_of(server, attempts=2).load_weights(None, 1)


def test_weights_that_lie_on_no_gpu_are_not_sent() -> None:
    model = load_model("tiny_arithmetic", "float32", "cpu").model
    with pytest.raises(InvalidRecipe, match=r"policies\.a\.sample\.sync: 'nccl'.* on 'cpu'; set it to checkpoint"):
        weight_transfer.require_gpu(model, "a")


def test_without_vllm_there_is_nothing_to_send_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"policies\.main\.sample\.sync: 'nccl'.*srpo-env\[vllm\]"):
        ServerPolicy(["http://h"], model=folder, sync="nccl")


@pytest.mark.parametrize(
    ("hosts", "address"),
    [(["127.0.0.1"], "127.0.0.1"), (["gpu7"], "10.0.0.5"), (["127.0.0.1", "gpu7"], "10.0.0.5")],
)
def test_the_group_meets_at_an_address_that_every_server_reaches(
    hosts: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Route:
        def __init__(self, *kind: Any) -> None:
            self.host = ""

        def __enter__(self) -> Route:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def connect(self, place: tuple[str, int]) -> None:
            self.host = place[0]

        def getsockname(self) -> tuple[str, int]:
            return ("127.0.0.1" if self.host == "127.0.0.1" else "10.0.0.5"), 1

    monkeypatch.setattr(weight_transfer.socket, "socket", Route)
    assert weight_transfer.own_address([f"http://{host}:8001/v1" for host in hosts]) == address
