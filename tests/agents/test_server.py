"""Does a server's output reach the record as it was sampled, and is nothing else ever taken for one?"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stamina.instrumentation
import yaml
from transformers import PreTrainedTokenizerFast

from srpo_env.agents.chat import Chat
from srpo_env.agents.http_client import retry_after_s
from srpo_env.agents.server import ServerPolicy, ServerSettings, _home
from srpo_env.batch import EventBatch
from srpo_env.config import PolicyUse, Recipe
from srpo_env.errors import ContextExceeded, InvalidRecipe, MissingModel, PolicyError, Untrainable
from srpo_env.jobs import Job
from srpo_env.portal import on_background_loop, run
from srpo_env.protocols import RequestKey, SampleRequest
from srpo_env.records import Message, Output, Sampling
from srpo_env.rollouts import rollout
from srpo_env.testing import check_policy
from srpo_env.trainers.srpo.admission import admit
from srpo_env.training import sample

KEY = "sk-abc123"
Serve = Callable[..., Any]


def first(fault: Any, times: int = 1) -> Callable[[int, Any], Any]:
    """A fault of the first calls; the probe's are spared."""
    left = [times]

    def fault_of(number: int, body: Any) -> Any:
        if body.get("logprobs") == 1 or left[0] == 0:
            return None
        left[0] -= 1
        return fault

    return fault_of


def always(fault: Any) -> Callable[[int, Any], Any]:
    return first(fault, -1)


def of_episode(episode: int, step: int = 0, text: str = "hi") -> SampleRequest:
    message = Message(role="user", content=text)
    return SampleRequest((message,), Sampling(max_tokens=4), 7, RequestKey(0, episode, step, 0))


@pytest.fixture
def one(serve: Serve, folder: Path, ask: Any, quick: None) -> Callable[..., Any]:
    """Asks a server with a fault for one output."""

    def one(fault: Any = None, *, text: str = "hi", settings: Any = None, **given: Any) -> Any:
        server = serve(fault=(lambda number, body: None) if fault is None else fault, **given)
        policy = ServerPolicy([server.url], **({"model": folder, "attempts": 3, "timeout_s": 20.0} | (settings or {})))
        (outcome,) = ask.outcomes(policy, [ask.request(text, seed=5, max_tokens=6)])
        return server, outcome

    return one


# What is asked, and what is kept.


def test_ids_go_out_and_ids_and_logprobs_are_kept_as_they_came(
    one: Callable[..., Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    server, output = one()
    (body,) = server.bodies()
    prompt = Chat(tokenizer).prompt_ids((Message(role="user", content="hi"),))
    assert body["prompt"] == list(prompt) == list(output.prompt_ids)
    ids, logprobs = server.draw(None, 1.0, 6, 5)
    assert (list(output.output_ids), list(output.logprobs)) == (ids, logprobs)
    assert (output.attempts, output.logprobs_mode, output.policy_version) == (1, "processed", 0)


def test_the_stop_token_is_among_the_ids_and_not_in_the_text(
    one: Callable[..., Any], fake: Any, tokenizer: PreTrainedTokenizerFast
) -> None:
    end = tokenizer.eos_token_id
    _, output = one(draw=fake.fixed({end: 0.0}, end))
    assert (output.output_ids, output.text, output.finish_reason) == ((end,), "", "stop")


def test_every_setting_that_changes_the_distribution_is_named(serve: Serve, folder: Path, ask: Any) -> None:
    server = serve()
    request = ask.request("hi", seed=9, temperature=0.5, top_p=0.9, top_k=4, max_tokens=3, stop=("x",))
    plain = ask.request("hi", seed=9, max_tokens=3)
    ask.outputs(ServerPolicy([server.url], model=folder), [request])
    ask.outputs(ServerPolicy([server.url], model=folder), [plain])
    given, default = server.bodies()
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "max_tokens": 3, "stop": ["x"], "seed": 9, **neutral}
    assert {key: given[key] for key in wanted} == wanted
    assert {key: default[key] for key in neutral} == neutral
    assert (default["top_k"], default["top_p"], default["temperature"]) == (-1, 1.0, 1.0)


def test_template_arguments_reach_the_template(one: Callable[..., Any], tokenizer: PreTrainedTokenizerFast) -> None:
    server, _ = one(settings={"template_arguments": {"think": True}})
    assert server.bodies()[0]["prompt"][-1] == tokenizer.convert_tokens_to_ids("<think>")


def test_without_a_model_messages_go_out_and_text_comes_back(one: Callable[..., Any]) -> None:
    server, output = one(settings={"model": None, "template_arguments": {"enable_thinking": False}})
    (body,) = server.bodies("/v1/chat/completions")
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"top_k", "return_token_ids", "prompt"} & set(body)
    assert output.text == server.decode(server.draw(None, 1.0, 6, 5)[0])
    assert (output.prompt_ids, output.output_ids, output.logprobs, output.finish_reason) == (None, None, None, "stop")


def test_the_learner_refuses_outputs_without_ids_and_says_what_to_do(serve: Serve) -> None:
    log = rollout("single_agent", policies=ServerPolicy([serve().url]), episodes=2, group_size=2)
    with pytest.raises(Untrainable, match=r"has no token ids.*with the policy's `model`"):
        admit(EventBatch.from_events(log), ["main"])


@pytest.mark.parametrize("key", ["message", "finish_reason"])
def test_a_chat_reply_that_is_not_whole_is_no_output(one: Callable[..., Any], key: str) -> None:
    server, output = one(first(f"missing {key}"), settings={"model": None})
    assert (output.attempts, len(server.bodies("/v1/chat/completions"))) == (2, 2)


# What the server is, asked once.


def test_the_server_is_asked_what_it_is_once(serve: Serve, folder: Path, ask: Any) -> None:
    server = serve()
    policy = ServerPolicy([server.url], model=folder)
    for _ in range(2):
        ask.outputs(policy, [ask.request("hi", seed=seed, max_tokens=2) for seed in range(5)])
    assert [each.path for each in server.calls].count("/v1/models") == 1
    assert len([each for each in server.calls if each.path == "/v1/completions"]) - len(server.bodies()) == 2
    assert [each["model"] for each in server.bodies()] == ["fake"] * 10


@pytest.mark.parametrize(("raw", "mode", "warnings"), [(False, "processed", 0), (True, "raw", 1)])
def test_logprobs_that_do_not_change_with_the_temperature_are_raw(
    serve: Serve, folder: Path, ask: Any, caplog: pytest.LogCaptureFixture, raw: bool, mode: str, warnings: int
) -> None:
    policy = ServerPolicy([serve(raw=raw).url], model=folder)
    outputs = ask.outputs(policy, [ask.request("hi", max_tokens=2)] * 2) + ask.outputs(policy, [ask.request("hi")])
    assert [output.logprobs_mode for output in outputs] == [mode] * 3
    said = [each for each in caplog.records if "--logprobs-mode processed_logprobs" in each.getMessage()]
    assert len(said) == warnings


def test_raw_logprobs_are_used_at_temperature_1_alone(serve: Serve, folder: Path) -> None:
    policy = ServerPolicy([serve(raw=True).url], model=folder, context_length=4096)

    def batch(temperature: float) -> EventBatch:
        sampling = Sampling(max_tokens=4, temperature=temperature)
        return rollout("single_agent", policies=policy, episodes=2, group_size=2, sampling=sampling).batch()

    admit(batch(1.0), ["main"], needs_logprobs=True)
    with pytest.raises(Untrainable, match="from before the temperature"):
        admit(batch(0.5), ["main"], needs_logprobs=True)


def test_the_only_model_is_taken_and_adapters_are_none(one: Callable[..., Any]) -> None:
    server, _ = one(others=[{"id": "earlier", "parent": "fake"}])
    assert server.bodies()[0]["model"] == "fake"


def test_a_server_of_several_models_needs_the_name_of_one(one: Callable[..., Any]) -> None:
    _, outcome = one(others=[{"id": "b"}])
    assert isinstance(outcome, PolicyError)
    assert "the server has 2 models (fake, b); name one as `served_model`" in str(outcome)
    server, _ = one(others=[{"id": "b"}], settings={"served_model": "b"})
    assert server.bodies()[0]["model"] == "b"


def test_a_server_that_gives_no_ids_is_named_with_the_remedy(one: Callable[..., Any]) -> None:
    _, outcome = one(gives_ids=False)
    assert isinstance(outcome, PolicyError)
    assert "token_ids" in str(outcome)
    assert "leave the policy's `model` out" in str(outcome)


# The tokenizer.


def test_the_server_encodes_an_awkward_text_as_the_model_does(
    one: Callable[..., Any], tokenizer: PreTrainedTokenizerFast
) -> None:
    server, output = one(tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False))
    assert isinstance(output, Output)
    (body,) = [call.body for call in server.calls if call.path == "/tokenize"]
    text = body["prompt"]
    assert all(each in text for each in ("ï", "ç", "–", "42", "🚲", "  ", "\n", "<|im_end|>", "<|bos|>"))
    vllm, llama_cpp = {"prompt": text, "add_special_tokens": False}, {"content": text, "add_special": False}
    assert body == {"model": "fake", **vllm, **llama_cpp}


@pytest.mark.parametrize(
    "spoil",
    [lambda ids: ids[1:], lambda ids: [0, *ids], lambda ids: [*ids[:-1], 3]],
    ids=["one less", "a BOS of its own", "another special token"],
)
def test_a_server_with_another_tokenizer_is_named_with_both_lists_of_ids(  # B044
    one: Callable[..., Any], tokenizer: PreTrainedTokenizerFast, spoil: Callable[[list[int]], list[int]]
) -> None:
    theirs: list[int] = []

    def tokenize(text: str) -> list[int]:
        theirs[:] = spoil(tokenizer.encode(text, add_special_tokens=False))
        return theirs

    server, outcome = one(tokenize=tokenize)
    assert isinstance(outcome, PolicyError)
    (body,) = [call.body for call in server.calls if call.path == "/tokenize"]
    ours = tokenizer.encode(body["prompt"], add_special_tokens=False)
    for said in (f"{server.url.removesuffix('/v1')}/tokenize", repr(body["prompt"]), f"{theirs} there", f"{ours} here"):
        assert said in str(outcome)
    assert "own tokenizer" in str(outcome)
    assert server.bodies() == []


@pytest.mark.parametrize("answer", [(404, {}, {}), (405, {}, {}), (200, {}, {"tokens": None}), (200, {}, [])], ids=str)
def test_a_server_that_encodes_nothing_is_sampled_all_the_same(
    serve: Serve, folder: Path, ask: Any, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "srpo_env")
    server = serve(answers={"/tokenize": answer})
    ask.outputs(ServerPolicy([server.url], model=folder), [ask.request("hi", max_tokens=2)])
    (said,) = [each.getMessage() for each in caplog.records if "was not compared" in each.getMessage()]
    assert "/tokenize" in said


def test_a_server_that_gets_messages_needs_no_tokenizer(one: Callable[..., Any]) -> None:
    server, _ = one(settings={"model": None})
    assert "/tokenize" not in [call.path for call in server.calls]


# The context.


@pytest.mark.parametrize(("context", "limit"), [(None, 6), (20, 6), (19, 6), (15, 2), (14, 1)])
def test_an_output_gets_what_the_prompt_leaves_of_the_context(
    one: Callable[..., Any], context: int | None, limit: int
) -> None:
    server, output = one(settings={"context_length": context})
    assert len(output.prompt_ids) == 13
    assert server.bodies()[0]["max_tokens"] == limit


@pytest.mark.parametrize("context", [13, 12])
def test_a_prompt_that_leaves_no_room_makes_no_request(one: Callable[..., Any], context: int) -> None:
    server, outcome = one(settings={"context_length": context})
    assert isinstance(outcome, ContextExceeded)
    assert f"a prompt of 13 tokens leaves no room for an output in the context of {context} tokens" in str(outcome)
    assert server.bodies() == []


@pytest.mark.parametrize(("served", "context"), [(64, 64), (None, 160)])
def test_the_context_is_the_servers_and_else_the_models(
    serve: Serve, folder: Path, ask: Any, served: int | None, context: int
) -> None:
    policy = ServerPolicy([serve(context_length=served).url], model=folder)
    (outcome,) = ask.outcomes(policy, [ask.request("x" * 500)])
    assert f"in the context of {context} tokens" in str(outcome)


def test_a_server_that_counts_for_itself_truncates_the_episode(one: Callable[..., Any]) -> None:
    reply = (400, {}, {"error": {"message": "This model's maximum context length is 8 tokens", "code": 400}})
    _, outcome = one(always(reply), settings={"model": None})
    assert isinstance(outcome, ContextExceeded)


# Attempts.

BY_STATUS = ["429", "500", "502", "503", "408"]
BY_BODY = [
    "half",
    "bytes",
    "NaN",
    "-inf",
    "1.0",
    "fewer",
    "duplicate",
    "repeated",
    "null finish_reason",
    "other prompt",
]
BY_FIELD = [f"missing {key}" for key in ("text", "token_ids", "prompt_token_ids", "logprobs", "finish_reason")]


@pytest.mark.parametrize("transport", ["aiohttp", "httpx"])
@pytest.mark.parametrize("fault", [*BY_STATUS, "reset", "cut", "no HTTP", *BY_BODY, *BY_FIELD])
def test_a_fault_costs_an_attempt_and_is_never_an_output(one: Callable[..., Any], fault: str, transport: str) -> None:
    server, output = one(first(fault), settings={"transport": transport})
    assert isinstance(output, Output)
    assert (output.attempts, len(server.bodies())) == (2, 2)
    assert list(output.output_ids or ()) == server.draw(None, 1.0, 6, 5)[0]


@pytest.mark.parametrize("transport", ["aiohttp", "httpx"])
def test_a_stall_costs_an_attempt(one: Callable[..., Any], transport: str) -> None:
    _, output = one(first("stall"), settings={"timeout_s": 1.0, "transport": transport})
    assert output.attempts == 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", "/v1/completions: HTTP 500: engine dead"),
        ("cut", "/v1/completions: ReadError"),
        ("half", "is not JSON"),
        ("missing finish_reason", "finish_reason: Field required"),
        ("fewer", "token ids and"),
        ("duplicate", "exactly one choice"),
        ("other prompt", "prompt_token_ids are not the ids that were sent"),
    ],
)
def test_when_all_attempts_fail_the_outcome_says_how_the_last_one_did(
    one: Callable[..., Any], fault: str, said: str
) -> None:
    server, outcome = one(always(fault))
    assert isinstance(outcome, PolicyError)
    assert "policy 'main': all 3 attempts failed, the last one: " in str(outcome)
    assert said in str(outcome)
    assert len(server.bodies()) == 3


@pytest.mark.parametrize("status", [307, 400, 401, 403, 404, 409, 422])
def test_what_is_wrong_with_the_call_itself_is_not_tried_again(one: Callable[..., Any], status: int) -> None:
    server, outcome = one(always((status, {}, {"error": {"message": "bad\nthing"}})))
    assert isinstance(outcome, PolicyError)
    assert f"HTTP {status}: bad thing" in str(outcome)
    assert len(server.bodies()) == 1


def test_one_refused_request_does_not_fail_its_neighbours(serve: Serve, folder: Path, ask: Any) -> None:
    server = serve(fault=lambda number, body: (400, {}, {}) if body["seed"] == 1 else None)
    requests = [ask.request("hi", seed=seed, max_tokens=2) for seed in range(3)]
    outcomes = ask.outcomes(ServerPolicy([server.url], model=folder), requests)
    assert [isinstance(each, Output) for each in outcomes] == [True, False, True]


@pytest.mark.parametrize(
    ("header", "wait_s"),
    [
        ("3", 3.0),
        ("0.5", 0.5),
        ("Wed, 21 Oct 2015 07:28:03 GMT", 3.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0),
        ("86400", 120.0),
        ("soon", None),
        ("nan", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str, wait_s: float | None) -> None:
    assert retry_after_s({"Retry-After": header}, now=1445412480.0) == wait_s


def test_without_retry_after_there_is_no_wait_asked_for() -> None:
    assert retry_after_s({}, now=0.0) is None


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_is_given_the_time_that_it_asks_for(one: Callable[..., Any], status: int) -> None:
    waits: list[float] = []
    stamina.instrumentation.set_on_retry_hooks([lambda details: waits.append(details.wait_for)])
    try:
        _, output = one(first((status, {"Retry-After": "0.2"}, {}), times=2))
    finally:
        stamina.instrumentation.set_on_retry_hooks(None)
    assert output.attempts == 3
    assert [round(wait, 1) for wait in waits] == [0.2, 0.2]
    assert min(waits) >= 0.2


def test_retries_are_not_logged_one_by_one(one: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    one(first("500"))
    assert [each for each in caplog.records if each.name == "stamina"] == []


def test_waiting_for_a_turn_is_no_time_out(serve: Serve, folder: Path, ask: Any) -> None:
    server = serve(fault=always("slow"))  # 50 ms each
    policy = ServerPolicy([server.url], model=folder, max_in_flight=2, timeout_s=1.0)
    outputs = ask.outputs(policy, [ask.request("hi", seed=seed, max_tokens=2) for seed in range(50)])
    assert {output.attempts for output in outputs} == {1}
    assert server.most_at_once == 2


# Servers that come and go.


def test_a_server_that_is_not_up_yet_is_waited_for(serve: Serve, folder: Path, ask: Any, quick: None) -> None:
    server = serve()
    server.stop()
    policy = ServerPolicy([server.url], model=folder, attempts=10_000)
    starting = threading.Timer(0.1, server.start, [server.port])
    starting.start()
    (output,) = ask.outputs(policy, [ask.request("hi", max_tokens=2)])
    starting.join()
    assert output.attempts == 1  # the question what the server is took the others


def test_a_server_that_never_comes_up_is_an_outcome_of_every_request(
    serve: Serve, folder: Path, ask: Any, quick: None
) -> None:
    server = serve()
    server.stop()
    policy = ServerPolicy([server.url], model=folder, attempts=2)
    outcomes = ask.outcomes(policy, [ask.request("hi"), ask.request("ho")])
    assert [type(each) for each in outcomes] == [PolicyError] * 2
    server.start(server.port)
    assert isinstance(ask.outcomes(policy, [ask.request("hi")])[0], Output)


def test_the_calls_of_an_episode_go_to_one_replica(serve: Serve, folder: Path, ask: Any) -> None:
    servers = [serve() for _ in range(3)]
    policy = ServerPolicy([each.url for each in servers], model=folder)
    requests = [of_episode(episode, step, f"{episode}") for step in range(3) for episode in range(31)]
    ask.outputs(policy, requests)
    episodes = [{tuple(body["prompt"]) for body in each.bodies()} for each in servers]
    assert [len(each.bodies()) for each in servers] == [3 * len(mine) for mine in episodes]
    assert sum(map(len, episodes)) == 31
    assert all(episodes)


def test_a_dead_replica_costs_its_requests_one_attempt(serve: Serve, folder: Path, ask: Any, quick: None) -> None:
    servers = [serve() for _ in range(3)]
    policy = ServerPolicy([each.url for each in servers], model=folder)
    ask.outputs(policy, [of_episode(0)])
    servers[1].stop()
    outputs = ask.outputs(policy, [of_episode(episode) for episode in range(30)])
    assert {output.attempts for output in outputs} == {1, 2}
    again = ask.outputs(policy, [of_episode(episode) for episode in range(30)])
    assert {output.attempts for output in again} == {1}


def test_the_requests_of_a_dead_replica_go_to_the_least_busy(serve: Serve, folder: Path, ask: Any) -> None:
    servers = [serve(fault=always("slow")) for _ in range(3)]
    policy = ServerPolicy([each.url for each in servers], model=folder)
    policy._http.replicas[0].doubted_until = float("inf")
    ask.outputs(policy, [each for each in map(of_episode, range(90)) if _home(each.key) % 3 == 0])
    counts = [len(each.bodies()) for each in servers]
    assert counts[0] == 0
    assert min(counts[1:]) > 5


# Loops, cancelling, closing.


def test_one_policy_may_be_sampled_from_one_loop_after_the_other(serve: Serve, folder: Path) -> None:
    server = serve()
    policy = ServerPolicy([server.url], model=folder)

    async def once() -> list[Any]:
        return await policy.sample([of_episode(0)])

    async def from_a_running_loop() -> list[Any]:
        return run(once)  # as a notebook does

    found = [asyncio.run(once()), asyncio.run(once()), on_background_loop(once), asyncio.run(from_a_running_loop())]
    assert [type(outcome) for (outcome,) in found] == [Output] * 4
    assert len(server._connections) == 1


async def test_cancelling_a_call_ends_its_requests(serve: Serve, folder: Path) -> None:
    server = serve(fault=always("stall"))
    policy = ServerPolicy([server.url], model=folder, timeout_s=60.0)
    call = asyncio.create_task(policy.sample([of_episode(0)]))
    assert await asyncio.to_thread(server.asked.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(server.disconnected.wait, 10)
    assert len(server.bodies()) == 1


async def test_closing_cancels_the_calls_under_way(serve: Serve, folder: Path) -> None:
    server = serve(fault=always("stall"))
    policy = ServerPolicy([server.url], model=folder, timeout_s=60.0)
    call = asyncio.create_task(policy.sample([of_episode(0)]))
    assert await asyncio.to_thread(server.asked.wait, 10)
    await policy.aclose()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(PolicyError, match="is closed"):
        await policy.sample([of_episode(0)])
    await policy.aclose()


async def test_a_caller_that_gives_up_does_not_keep_others_from_the_first_answer(serve: Serve, folder: Path) -> None:
    policy = ServerPolicy([serve().url], model=folder)
    calls = [asyncio.create_task(policy.sample([of_episode(episode)])) for episode in range(2)]
    await asyncio.sleep(0)
    calls[0].cancel()
    assert isinstance((await calls[1])[0], Output)


def test_a_policy_that_nobody_closes_leaves_no_connection_behind(serve: Serve, folder: Path, ask: Any) -> None:
    server = serve()
    policy = ServerPolicy([server.url], model=folder)
    ask.outputs(policy, [of_episode(0)])
    del policy
    gc.collect()
    for _ in range(500):
        if not server._connections:
            break
        threading.Event().wait(0.01)
    assert not server._connections


# Keys.


def recipe_of(url: str, **sample: Any) -> Recipe:
    policy = {"sample": {"backend": "server", "urls": [url], "api_key_env": "TEST_KEY", "attempts": 2} | sample}
    return Recipe.model_validate(
        {
            "workflow": "single_agent",
            "tasks": {"train": {"use": "arithmetic", "size": 2}},
            "policies": {"main": policy},
            "rollout": {"tasks_per_batch": 2, "group_size": 2},
        }
    )


def test_a_key_is_sent_and_written_nowhere(
    serve: Serve,
    tmp_path: Path,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    echo = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
    cut = {"error": {"message": f"{'x' * 294} {KEY}"}}
    server = serve(fault=lambda number, body: [None, "500", "cut", (401, {}, echo), (401, {}, cut)][number % 5])
    recipe = recipe_of(server.url).model_copy(update={"run": str(tmp_path / "run")})
    sample(recipe, episodes=12)
    job = Job.prepare(recipe)
    assert {call.headers.get("authorization") for call in server.calls} == {f"Bearer {KEY}"}
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(written) > 3
    assert any(b"HTTP 401" in content for content in written)
    said = "\n".join([*map(str, vars(job.policies["main"]).values()), repr(job), caplog.text, *capfd.readouterr()])
    assert not any(KEY.encode() in content or b"sk-a" in content for content in [*written, said.encode()])


@pytest.mark.parametrize(
    "sample",
    [
        {"urls": [f"https://h/v1?api_key={KEY}"]},
        {"urls": f"https://h/v1?api_key={KEY}"},
        {"urls": [f"https://{KEY}@h/v1"]},
        {"urls": [f"https://u:{KEY}@h/v1"]},
        {"urls": [f"{KEY}"]},
        {"api_key": KEY},
        {"headers": {"Authorization": f"Bearer {KEY}"}},
        {"api_key_env": KEY},
        {"api_key_env": "NOT_SET_ANYWHERE"},
    ],
    ids=str,
)
def test_a_key_in_a_recipe_is_refused_and_not_repeated(sample: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "x")
    with pytest.raises(InvalidRecipe, match=r"policies\.main\.sample\.") as caught:
        Job.prepare(recipe_of("http://127.0.0.1:1/v1", **sample))
    assert KEY not in str(caught.value)


# Settings.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "urls: this setting is missing"),
        ({"urls": []}, "urls: .* at least 1"),
        ({"urls": ["localhost:8000"]}, "urls: one is not a URL such as http"),
        ({"url": "http://h/v1", "urls": ["http://h"]}, "url: no such setting. Did you mean 'urls'"),
        ({"urls": ["http://h"], "sync": "magic"}, "sync: 'magic' is not allowed"),
        ({"urls": ["http://h"], "sync": "lora"}, "sync: 'lora' without a model"),
        (
            {"urls": ["http://h"], "model": "tiny_arithmetic", "sync": "lora"},
            "sync: 'lora' where the policy trains no adapter",
        ),
        (
            {"urls": ["http://h"], "model": "tiny_arithmetic", "sync": "nccl", "lora": {"rank": 8}},
            "sync: 'nccl' where the policy trains an adapter",
        ),
        ({"urls": ["http://h"], "context_length": 99}, "context_length: 99 without a model"),
        ({"urls": ["http://h"], "attempts": 0}, "attempts: 0 is not allowed"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecipe, match=message):
        ServerPolicy.from_config("main", settings)


def test_a_model_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(MissingModel, match="does not exist"):
        ServerPolicy.from_config("main", {"urls": ["http://h"], "model": str(tmp_path / "none")})


@pytest.mark.parametrize("url", ["http://127.0.0.1:{}", "http://127.0.0.1:{}/", "http://127.0.0.1:{}/v1/"])
def test_an_address_may_lack_the_common_path(serve: Serve, folder: Path, ask: Any, url: str) -> None:
    policy = ServerPolicy([url.format(serve().port)], model=folder)
    assert isinstance(ask.outcomes(policy, [ask.request("hi")])[0], Output)


# The docs.

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "servers.md").read_text(encoding="utf-8")


def test_the_policies_in_the_docs_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_API_KEY", "x")
    (block,) = re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    for label, given in yaml.safe_load(block)["policies"].items():
        use = PolicyUse.model_validate(given)
        assert use.sample.backend == "server"
        weights = {} if use.model is None else {"model": use.model, "dtype": use.dtype, "device": use.device}
        ServerPolicy.from_config(label, {**(use.sample.model_extra or {}), **weights})


def test_the_docs_have_every_setting_and_its_default() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", DOCS, re.MULTILINE)
    defaults = {name: default for names, default in rows for name in re.findall(r"`(\w+)`", names)}
    fields = ServerSettings.model_fields
    assert set(defaults) == set(fields) - {"model", "dtype", "device", "lora", "seed", "frozen"}
    for name in ("max_in_flight", "timeout_s", "attempts"):
        assert float(defaults[name]) == fields[name].default
    assert defaults["transport"] == f"`{fields['transport'].default}`"


# The kit.


def test_the_policy_conforms_with_and_without_ids(serve: Serve, folder: Path) -> None:
    check_policy(ServerPolicy([serve().url], model=folder), deterministic=True)
    check_policy(ServerPolicy([serve().url]), deterministic=True)
