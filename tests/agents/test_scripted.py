"""Outputs from a function or a table."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from srpo_env.agents.scripted import ScriptedPolicy
from srpo_env.errors import ContextExceeded, InvalidInput, InvalidRecipe, PolicyError, UnknownName
from srpo_env.protocols import Policy, SampleRequest
from srpo_env.records import Output


def test_it_is_a_policy() -> None:
    assert isinstance(ScriptedPolicy(["a"]), Policy)


def test_a_list_is_taken_in_turn(ask: Any) -> None:
    policy = ScriptedPolicy(["a", "b"])
    assert [o.text for o in ask.outputs(policy, [ask.request("q")] * 3)] == ["a", "b", "a"]


def test_a_table_looks_at_the_last_message(ask: Any) -> None:
    policy = ScriptedPolicy({"2+2": "4", "2+": "?", "*": "no idea"})
    outputs = ask.outputs(policy, [ask.request(word) for word in ("what is 2+2", "2+3", "hello")])
    assert [o.text for o in outputs] == ["4", "?", "no idea"]


def test_a_message_outside_the_table_fails_alone(ask: Any) -> None:
    found, lost = ask.outcomes(ScriptedPolicy({"a": "b"}), [ask.request("a"), ask.request("z")])
    assert found.text == "b"
    assert isinstance(lost, PolicyError)
    assert "'z'" in str(lost)


def test_a_function_may_wait_answer_in_full_or_refuse(ask: Any) -> None:
    async def script(request: SampleRequest) -> str | Output:
        await asyncio.sleep(0.02 * (3 - request.key.member))
        if request.key.member == 1:
            raise ContextExceeded("too long")
        return Output(text="whole", policy_version=7) if request.key.member == 2 else "part"

    first, second, third = ask.outcomes(ScriptedPolicy(script), [ask.request("q", index=i) for i in range(3)])
    assert first.text == "part"
    assert isinstance(second, ContextExceeded)
    assert (third.text, third.policy_version) == ("whole", 7)


def test_without_a_tokenizer_there_are_no_ids(ask: Any) -> None:
    (output,) = ask.outputs(ScriptedPolicy(["a"]), [ask.request("q")])
    assert output == Output(text="a", finish_reason="stop")


def test_with_a_tokenizer_there_are_ids_and_certainty(ask: Any, tokenizer: Any, folder: Path) -> None:
    for source in (tokenizer, str(folder)):
        policy = ScriptedPolicy(["the answer 🙂<|im_end|>"], tokenizer=source)
        policy.version = 3
        (output,) = ask.outputs(policy, [ask.request("q")])
        assert output.text == "the answer 🙂<|im_end|>"
        assert tokenizer.decode(output.prompt_ids) == "<|bos|><|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
        assert output.output_ids[-1] == tokenizer.eos_token_id
        assert output.output_ids.count(tokenizer.eos_token_id) == 1
        assert output.logprobs == (0.0,) * len(output.output_ids)
        assert (output.finish_reason, output.policy_version) == ("stop", 3)


def test_a_long_output_is_cut_at_max_tokens(ask: Any, tokenizer: Any) -> None:
    policy = ScriptedPolicy(["zzzzzzzz"], tokenizer=tokenizer)
    (output,) = ask.outputs(policy, [ask.request("q", max_tokens=3)])
    assert (output.text, len(output.output_ids), output.finish_reason) == ("zzz", 3, "length")


def test_a_recipe_describes_a_policy(tmp_path: Path, ask: Any) -> None:
    (tmp_path / "script.py").write_text("def echo(request):\n    return request.messages[-1].content[::-1]\n")
    function = ScriptedPolicy.from_config("main", {"use": f"{tmp_path}/script.py:echo"})
    table = ScriptedPolicy.from_config("main", {"outputs": {"*": "x"}})
    listed = ScriptedPolicy.from_config("main", {"outputs": ["y"], "dtype": "float32", "device": "cpu"})
    assert [ask.outputs(p, [ask.request("abc")])[0].text for p in (function, table, listed)] == ["cba", "x", "y"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, InvalidRecipe, "policies.main.sample: .*give either"),
        ({"outputs": []}, InvalidRecipe, "give either"),
        ({"outputs": ["a"], "use": "a:b"}, InvalidRecipe, "give either"),
        ({"output": ["a"]}, InvalidRecipe, r"output: no such setting\. Did you mean 'outputs'"),
        ({"use": "./nowhere.py:f"}, InvalidInput, "nowhere.py"),
        ({"outputs": ["a"], "model": "nothing"}, UnknownName, "nothing"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ScriptedPolicy.from_config("main", settings)
