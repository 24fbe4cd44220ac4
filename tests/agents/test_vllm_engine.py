"""The backend `vllm`: what it asks of the engine and makes of the answers; a stub stands in for vLLM."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from srpo_env.agents.vllm_engine import VLLMPolicy
from srpo_env.errors import ContextExceeded, InvalidRecipe, MissingExtra, PolicyError
from srpo_env.protocols import Policy, Resting, Trainable
from srpo_env.records import Output

STOP = SimpleNamespace(finish_reason="stop", stop_reason=None)


class StubEngine:
    """Answers each request in the step after it came, by `answer(number of the request, its parameters)`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=160))
        self.engine_core = SimpleNamespace(shutdown=lambda: self.did.append("shutdown"))
        self.did: list[Any] = []
        self.asked: list[Any] = []
        self.waiting: dict[str, Any] = {}
        self.batches: list[int] = []
        self.answer: Any = lambda number, params: completion(params, (5, 6, 2))
        self.hold = threading.Event()
        self.hold.set()

    def add_request(self, number: str, prompt: Any, params: Any, *, lora_request: Any = None) -> None:
        if params.temperature == 13:
            raise ValueError("temperature is\nunlucky")
        self.asked.append(SimpleNamespace(prompt=prompt, params=params, adapter=lora_request))
        self.waiting[number] = (prompt, params)

    def step(self) -> list[Any]:
        self.hold.wait(10)
        self.batches.append(len(self.waiting))
        answered = [
            SimpleNamespace(
                request_id=number,
                finished=True,
                prompt_token_ids=prompt["prompt_token_ids"],
                outputs=[self.answer(at, params)],
            )
            for at, (number, (prompt, params)) in enumerate(self.waiting.items())
        ]
        self.waiting.clear()
        return answered

    def abort_request(self, numbers: list[str]) -> None:
        self.did.append(("abort", len(numbers)))
        for number in numbers:
            self.waiting.pop(number, None)

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.did.append((method, dict(kwargs["weights_iterator"])))

    def reset_prefix_cache(self) -> None:
        self.did.append("reset_prefix_cache")

    def sleep(self, level: int) -> None:
        self.did.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.did.append("wake_up")

    def add_lora(self, adapter: Any) -> None:
        self.did.append(("add_lora", adapter.lora_int_id, Path(adapter.path).is_dir()))

    def remove_lora(self, number: int) -> None:
        self.did.append(("remove_lora", number))


def completion(params: Any, ids: tuple[int, ...], logprob: float = -0.5, **changes: Any) -> Any:
    logprobs = [{token: SimpleNamespace(logprob=logprob)} for token in ids]
    return SimpleNamespace(**{"token_ids": list(ids), "logprobs": logprobs, **vars(STOP), **changes})


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what is waited for happens in a thread)
        await asyncio.sleep(0.001)


class Stub:
    """The modules of vLLM that the policy imports, and the engines that were made."""

    def __init__(self) -> None:
        self.engines: list[StubEngine] = []
        self.can_sleep = False

    @property
    def engine(self) -> StubEngine:
        (engine,) = self.engines
        return engine

    def modules(self) -> dict[str, dict[str, Any]]:
        def engine(config: Any, **how: Any) -> StubEngine:
            assert how == {"executor_class": "executor", "log_stats": False, "multiprocess_mode": False}
            self.engines.append(StubEngine(config))
            return self.engines[-1]

        def arguments(**given: Any) -> Any:
            if "no_such" in given:
                raise TypeError("unexpected keyword argument 'no_such'")
            return SimpleNamespace(create_engine_config=lambda: given)

        lora = lambda name, number, path: SimpleNamespace(name=name, lora_int_id=number, path=path)  # noqa: E731
        platform = SimpleNamespace(is_sleep_mode_available=lambda: self.can_sleep)
        return {
            "vllm": {
                "EngineArgs": arguments,
                "LLMEngine": engine,
                "SamplingParams": lambda **given: SimpleNamespace(**given),
            },
            "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY="final")},
            "vllm.v1": {},
            "vllm.v1.executor": {"Executor": SimpleNamespace(get_class=lambda config: "executor")},
            "vllm.lora": {},
            "vllm.lora.request": {"LoRARequest": lora},
            "vllm.platforms": {"current_platform": platform},
        }


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    for name, content in stub.modules().items():
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return stub


@pytest.fixture
def policy(folder: Path, vllm: Stub) -> VLLMPolicy:
    return VLLMPolicy(folder, device="cpu")


def test_it_is_a_trainable_policy_that_can_rest(policy: VLLMPolicy) -> None:
    assert isinstance(policy, Policy)
    assert isinstance(policy, Trainable)
    assert isinstance(policy, Resting)
    assert policy.in_process


def test_a_missing_vllm_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"backend 'vllm'.*pip install 'srpo-env\[vllm\]'") as caught:
        VLLMPolicy.from_config("main", {"model": str(folder)})
    assert "\n" not in str(caught.value)


def test_nothing_is_started_before_it_is_needed(policy: VLLMPolicy, vllm: Stub) -> None:
    policy.rest()
    asyncio.run(policy.aclose())
    assert vllm.engines == []


def test_the_engine_is_started_with_the_log_probs_of_the_sampled_distribution(
    folder: Path, vllm: Stub, ask: Any
) -> None:
    policy = VLLMPolicy.from_config(
        "main", {"model": str(folder), "dtype": "bfloat16", "engine": {"max_model_len": 99}, "device": "cpu"}
    )
    ask.outputs(policy, [ask.request("a")])
    assert vllm.engine.arguments == {
        "model": str(folder),
        "tokenizer": str(folder),
        "dtype": "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": False,
        "disable_log_stats": True,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 99,
    }


def test_an_engine_argument_of_the_recipe_wins(folder: Path, vllm: Stub, ask: Any) -> None:
    ask.outputs(VLLMPolicy(folder, engine={"gpu_memory_utilization": 0.3}, device="cpu"), [ask.request("a")])
    assert vllm.engine.arguments["gpu_memory_utilization"] == 0.3


def test_an_engine_argument_that_follows_from_other_settings_is_refused(folder: Path, vllm: Stub) -> None:
    with pytest.raises(InvalidRecipe, match=r"policies.main.sample.engine.logprobs_mode"):
        VLLMPolicy(folder, engine={"logprobs_mode": "raw_logprobs"})


def test_an_engine_argument_that_vllm_does_not_know_is_told_in_one_line(folder: Path, vllm: Stub, ask: Any) -> None:
    policy = VLLMPolicy(folder, engine={"no_such": 1}, device="cpu")
    with pytest.raises(PolicyError, match=r"vLLM refuses to start: unexpected keyword argument 'no_such'"):
        ask.outcomes(policy, [ask.request("a")])


def test_each_row_has_its_own_settings_and_seed(policy: VLLMPolicy, vllm: Stub, ask: Any) -> None:
    ask.outputs(
        policy,
        [
            ask.request("a", seed=2**62 + 1, temperature=0.7, top_p=0.9, top_k=3, max_tokens=5, stop=("x",)),
            ask.request("a", seed=4),
        ],
    )
    first, second = (vars(each.params) for each in vllm.engine.asked)
    assert first == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 3,
        "max_tokens": 5,
        "stop": ["x"],
        "seed": 2**62 + 1,
        "logprobs": 0,
        "detokenize": True,
        "output_kind": "final",
    }
    assert (second["seed"], second["temperature"], second["top_k"], second["detokenize"]) == (4, 1.0, 0, False)


def test_the_prompt_goes_out_as_the_ids_that_the_chat_template_makes(
    policy: VLLMPolicy, vllm: Stub, ask: Any, shared_policy: Any
) -> None:
    request = ask.request("the <|im_end|> sum", max_tokens=1)
    (output,) = ask.outputs(policy, [request])
    (expected,) = ask.outputs(shared_policy, [request])
    assert output.prompt_ids == expected.prompt_ids
    assert tuple(vllm.engine.asked[0].prompt["prompt_token_ids"]) == expected.prompt_ids


def test_an_output_keeps_ids_log_probs_and_the_stop_token(policy: VLLMPolicy, vllm: Stub, ask: Any) -> None:
    stop = policy.tokenizer.eos_token_id
    word = policy.tokenizer.encode("sum", add_special_tokens=False)[0]
    ask.outcomes(policy, [ask.request("a")])
    vllm.engine.answer = lambda number, params: completion(params, (word, stop))
    (output,) = ask.outputs(policy, [ask.request("a")])
    assert (output.output_ids, output.logprobs, output.logprobs_mode) == ((word, stop), (-0.5, -0.5), "processed")
    assert output.finish_reason == "stop"
    assert output.text == policy.tokenizer.decode([word])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"finish_reason": "length"}, 2),
        ({"finish_reason": "stop", "stop_reason": "x"}, 2),
        ({"finish_reason": "stop", "stop_reason": 7}, 1),
        ({"finish_reason": "stop", "stop_reason": None}, 1),
    ],
)
def test_only_a_stop_token_is_left_out_of_the_text(
    policy: VLLMPolicy, vllm: Stub, ask: Any, changes: dict[str, Any], said: int
) -> None:
    first, second = policy.tokenizer.encode("xy", add_special_tokens=False)[:2]
    ask.outcomes(policy, [ask.request("a")])
    vllm.engine.answer = lambda number, params: completion(params, (first, second), **changes)
    (output,) = ask.outputs(policy, [ask.request("a")])
    assert output.finish_reason == changes["finish_reason"]
    assert output.text == policy.tokenizer.decode([first, second][:said])


def test_a_greedy_row_is_drawn_from_one_point(policy: VLLMPolicy, ask: Any) -> None:
    sampled, greedy = ask.outputs(policy, [ask.request("a"), ask.request("a", temperature=0.0)])
    assert (sampled.logprobs[0], greedy.logprobs[0]) == (-0.5, 0.0)


def test_a_row_that_fails_does_not_fail_its_neighbours(policy: VLLMPolicy, vllm: Stub, ask: Any) -> None:
    ask.outcomes(policy, [ask.request("a")])
    answers = [{}, {"finish_reason": "abort"}, {"logprob": float("nan")}]
    vllm.engine.answer = lambda number, params: completion(params, (5, 2), **answers[number])
    good, aborted, diverged, long, unlucky = ask.outcomes(
        policy,
        [
            ask.request("a"),
            ask.request("b"),
            ask.request("c"),
            ask.request("sum " * 200),
            ask.request("d", temperature=13),
        ],
    )
    assert isinstance(good, Output)
    assert isinstance(aborted, PolicyError)
    assert "'abort'" in str(aborted)
    assert isinstance(diverged, PolicyError)
    assert "diverged" in str(diverged)
    assert isinstance(long, ContextExceeded)
    assert isinstance(unlucky, PolicyError)
    assert "temperature is unlucky" in str(unlucky)


def test_an_output_is_no_longer_than_the_context_leaves(policy: VLLMPolicy, vllm: Stub, ask: Any) -> None:
    (output,) = ask.outputs(policy, [ask.request("a", max_tokens=5000)])
    assert vllm.engine.asked[0].params.max_tokens == 160 - len(output.prompt_ids)


def test_an_error_of_the_engine_reaches_all_who_wait_and_nobody_after_them(
    policy: VLLMPolicy, vllm: Stub, ask: Any
) -> None:
    ask.outcomes(policy, [ask.request("a")])
    fine = vllm.engine.step

    def broken() -> Any:
        vllm.engine.step = fine  # type: ignore[method-assign]
        raise RuntimeError("the engine is dead")

    vllm.engine.step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the engine is dead"):
        ask.outcomes(policy, [ask.request("a"), ask.request("b")])
    assert ("abort", 2) in vllm.engine.did
    assert len(ask.outputs(policy, [ask.request("a")])) == 1


def test_an_engine_that_can_not_be_emptied_either_leaves_nobody_waiting(
    policy: VLLMPolicy, vllm: Stub, ask: Any
) -> None:
    ask.outcomes(policy, [ask.request("a")])

    def dead(*_: Any) -> Any:
        raise RuntimeError("the engine is dead")

    vllm.engine.step = vllm.engine.abort_request = dead  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the engine is dead") as found:
            ask.outcomes(policy, [ask.request("b")])
        assert found.value.__notes__ == ["The batch could not be emptied, either: RuntimeError: the engine is dead"]


def test_weights_changed_in_place_reach_the_engine_with_the_tied_head_and_an_empty_prefix_cache(
    policy: VLLMPolicy, vllm: Stub, ask: Any
) -> None:
    ask.outcomes(policy, [ask.request("a")])
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.fill_(3.0)
    vllm.engine.did.clear()
    policy.load_weights(None, 4)
    (method, weights), reset = vllm.engine.did
    assert (method, reset) == ("reload_weights", "reset_prefix_cache")
    assert policy.model.config.tie_word_embeddings
    assert float(weights["model.embed_tokens.weight"].min()) == float(weights["lm_head.weight"].max()) == 3.0
    assert weights.keys() == policy.model.state_dict().keys()
    assert policy.version == 4
    assert ask.outputs(policy, [ask.request("a")])[0].policy_version == 4


def test_a_folder_of_weights_reaches_both_the_engine_and_the_training_copy(
    policy: VLLMPolicy, vllm: Stub, other_folder: Path
) -> None:
    before = policy.model.get_input_embeddings().weight.clone()
    policy.load_weights(other_folder, 1)
    after = policy.model.get_input_embeddings().weight
    assert not torch.equal(before, after)
    assert torch.equal(vllm.engine.did[0][1]["lm_head.weight"], after)


def test_each_adapter_gets_an_id_of_its_own_and_takes_the_last_ones_place(
    policy: VLLMPolicy, vllm: Stub, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy.model, "peft_config", {"default": None}, raising=False)
    monkeypatch.setattr(policy.model, "get_base_model", lambda: None, raising=False)
    monkeypatch.setattr(policy.model, "save_pretrained", lambda folder, **how: None)
    policy.load_weights(None, 1)
    policy.load_weights(None, 2)
    assert vllm.engine.did == [
        ("add_lora", 1, True),
        "reset_prefix_cache",
        ("add_lora", 2, True),
        ("remove_lora", 1),
        "reset_prefix_cache",
    ]
    ask.outcomes(policy, [ask.request("a")])
    adapter = vllm.engine.asked[0].adapter
    assert (adapter.name, adapter.lora_int_id) == ("main-2", 2)
    asyncio.run(policy.aclose())
    assert not Path(adapter.path).exists()


def test_it_rests_until_it_is_sampled_or_gets_new_weights(policy: VLLMPolicy, vllm: Stub, ask: Any) -> None:
    vllm.can_sleep = True
    ask.outcomes(policy, [ask.request("a")])
    vllm.engine.did.clear()
    policy.rest()
    policy.rest()
    policy.load_weights(None, 1)
    policy.rest()
    ask.outcomes(policy, [ask.request("a")])
    did = [each if isinstance(each, str) else each[0] for each in vllm.engine.did]
    assert did == [
        "sleep 1",
        "wake_up",
        "reload_weights",
        "reset_prefix_cache",
        "sleep 1",
        "wake_up",
        "reset_prefix_cache",
    ]


def test_it_does_not_rest_where_vllm_can_not_sleep(policy: VLLMPolicy, vllm: Stub, ask: Any) -> None:
    ask.outcomes(policy, [ask.request("a")])
    policy.rest()
    assert "sleep 1" not in vllm.engine.did


@pytest.mark.parametrize(("deterministic", "batches"), [(True, [1, 1, 1]), (False, [1, 2])])
def test_calls_share_a_batch_only_where_that_is_asked_for(
    folder: Path, vllm: Stub, ask: Any, deterministic: bool, batches: list[int]
) -> None:
    policy = VLLMPolicy(folder, deterministic=deterministic, device="cpu")

    async def three() -> None:
        first = asyncio.create_task(policy.sample([ask.request("a")]))
        await until(lambda: bool(vllm.engine.waiting))
        rest = [asyncio.create_task(policy.sample([ask.request(text)])) for text in "bc"]
        await asyncio.sleep(0)
        vllm.engine.hold.set()
        await asyncio.gather(first, *rest)

    policy._awake().hold.clear()
    asyncio.run(three())
    assert vllm.engine.batches == batches


def test_a_cancelled_call_leaves_the_engine(policy: VLLMPolicy, vllm: Stub, ask: Any) -> None:
    engine = policy._awake()
    engine.step = list

    async def cancel() -> None:
        call = asyncio.create_task(policy.sample([ask.request("a"), ask.request("b")]))
        await until(lambda: len(engine.waiting) == 2)
        call.cancel()
        await until(lambda: not engine.waiting)

    asyncio.run(cancel())
    assert ("abort", 2) in engine.did


def test_closing_stops_the_engine_and_refuses_further_calls(policy: VLLMPolicy, vllm: Stub, ask: Any) -> None:
    ask.outcomes(policy, [ask.request("a")])
    asyncio.run(policy.aclose())
    assert vllm.engine.did[-1] == "shutdown"
    with pytest.raises(PolicyError, match="is closed"):
        ask.outcomes(policy, [ask.request("a")])
