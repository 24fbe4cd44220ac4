"""The in-process backend: what it samples, what it reports of it, and when it stops."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from srpo_env.agents.generation import Generator, Row
from srpo_env.agents.local import LocalPolicy
from srpo_env.errors import ContextExceeded, InvalidRecipe, MissingModel, PolicyError
from srpo_env.protocols import Policy, Trainable
from srpo_env.records import Output, Sampling

WORDS = ["", "a", "the sum", "what is the number of two " * 2, "zażółć 数 🙂", "the answer is the number " * 3]


def mixed(ask: Any, count: int = 24, **sampling: Any) -> list[Any]:
    """Requests of many lengths and temperatures, with repeated prompts and some short limits."""
    return [
        ask.request(
            WORDS[index % len(WORDS)],
            seed=index,
            index=index,
            temperature=(1.0, 0.5, 1.7)[index % 3],
            max_tokens=(3, 40, 17, 1)[index % 4],
            **sampling,
        )
        for index in range(count)
    ]


def worst(policy: Any, forced: Any, requests: list[Any], outputs: list[Output]) -> float:
    return max(
        abs(ours - theirs)
        for request, output in zip(requests, outputs, strict=True)
        for ours, theirs in zip(
            output.logprobs,
            forced(policy.model, output.prompt_ids, output.output_ids, request.sampling.temperature),
            strict=True,
        )
    )


def test_it_is_a_trainable_policy(shared_policy: LocalPolicy) -> None:
    assert isinstance(shared_policy, Policy)
    assert isinstance(shared_policy, Trainable)
    assert shared_policy.in_process


def test_logprobs_equal_a_teacher_forced_pass(shared_policy: LocalPolicy, ask: Any, forced: Any) -> None:
    requests = mixed(ask)
    outputs = ask.outputs(shared_policy, requests)
    assert worst(shared_policy, forced, requests, outputs) < 1e-4
    assert all(output.logprobs_mode == "processed" for output in outputs)
    assert len({len(output.prompt_ids) for output in outputs}) > 4
    assert len({len(output.output_ids) for output in outputs}) > 4


@pytest.mark.parametrize("limits", [{"max_rows": 5}, {"cache_gib": 24 * 64 * 256 / 2**30}], ids=["rows", "memory"])
def test_rows_that_wait_or_are_sent_back_are_sampled_right(
    folder: Path, shared_policy: LocalPolicy, ask: Any, forced: Any, limits: dict[str, Any]
) -> None:
    policy = LocalPolicy(folder, **limits)
    requests = mixed(ask)
    outputs = ask.outputs(policy, requests)
    assert worst(policy, forced, requests, outputs) < 1e-4
    assert [o.output_ids for o in outputs] == [o.output_ids for o in ask.outputs(shared_policy, requests)]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LlamaConfig", {}),
        ("MistralConfig", {"sliding_window": 9}),
        (
            "Qwen3Config",
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 9,
                "use_sliding_window": True,
            },
        ),
        ("Gemma3TextConfig", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}),
        ("GPT2Config", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 160}),
    ],
)
def test_left_padding_shifts_no_position_in_any_architecture(
    tmp_path: Path, tokenizer: Any, ask: Any, forced: Any, kind: str, settings: dict[str, Any]
) -> None:
    """transformers#18388: rows of different length in one batch keep the positions that they have alone."""
    import transformers

    torch.manual_seed(0)
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 160,
        "initializer_range": 0.2,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }
    config = getattr(transformers, kind)(**(settings if kind == "GPT2Config" else {}), **(
        {"vocab_size": len(tokenizer), "initializer_range": 0.2, "eos_token_id": tokenizer.eos_token_id}
        if kind == "GPT2Config"
        else common | settings
    ))  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = LocalPolicy(tmp_path)
    requests = mixed(ask, 12)
    outputs = ask.outputs(policy, requests)
    assert worst(policy, forced, requests, outputs) < 1e-4


@pytest.fixture(scope="module")
def engine(shared_policy: LocalPolicy) -> Generator:
    made = Generator(shared_policy.model, frozenset(), lambda ids: "", max_rows=512, cache_bytes=1 << 30)
    rows_of(made, [[20]])  # it tries out whether the model can share
    return made


def rows_of(engine: Generator, prompts: Sequence[Sequence[int]]) -> list[Row]:
    """Rows with these prompts, when they are done."""
    rows = [Row(tuple(prompt), Sampling(temperature=0.8), 1 + seed % 4, seed) for seed, prompt in enumerate(prompts)]
    engine.add(rows)
    while engine.busy:
        engine.step()
    return rows


def prompts_that_part_anywhere(seed: int) -> list[list[int]]:
    """Of two ids: some are equal, some are the beginnings of others."""
    draw = random.Random(seed)
    return [[draw.choice([20, 21]) for _ in range(draw.randint(1, 12))] for _ in range(draw.randint(1, 24))]


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31))
def test_prompts_with_any_common_beginning_are_sampled_as_alone(
    shared_policy: LocalPolicy, engine: Generator, forced: Any, seed: int
) -> None:
    for row in rows_of(engine, prompts_that_part_anywhere(seed)):
        expected = forced(shared_policy.model, row.prompt, row.output, 0.8)
        assert row.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def read(shared_policy: LocalPolicy) -> Iterator[list[int]]:
    """How many tokens each pass over prompts computes."""
    found: list[int] = []
    handle = shared_policy.model.get_input_embeddings().register_forward_hook(
        lambda _, ids, __: found.append(ids[0].numel()) if ids[0].shape[1] > 1 else None
    )
    yield found
    handle.remove()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_each_common_beginning_of_prompts_is_computed_once(engine: Generator, read: list[int], seed: int) -> None:
    prompts = [[18, 19, *prompt] for prompt in prompts_that_part_anywhere(seed)]
    read.clear()
    rows_of(engine, prompts)
    assert read == [len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})]


def test_members_of_a_group_share_their_few_shot_examples(
    shared_policy: LocalPolicy, ask: Any, read: list[int]
) -> None:
    requests = [ask.request("the sum of two numbers is the answer " + task, max_tokens=1) for task in ("1", "2", "2")]
    prompts = [output.prompt_ids for output in ask.outputs(shared_policy, requests)]
    read.clear()
    ask.outputs(shared_policy, requests)
    assert prompts[1] == prompts[2]
    same = next(at for at, (one, two) in enumerate(zip(*prompts[:2], strict=False)) if one != two)
    assert same > 10
    assert read == [len(prompts[0]) + len(prompts[1]) - same]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize(("bound", "value"), [("_PREFILL_TOKENS", 30), ("_PREFILL_LOGITS", 5000)])
def test_prompts_in_passes_of_any_size_give_the_same_rows(
    shared_policy: LocalPolicy,
    engine: Generator,
    read: list[int],
    monkeypatch: pytest.MonkeyPatch,
    bound: str,
    value: int,
    share: bool,
) -> None:
    prompts = [[18, 19, *prompt] for prompt in prompts_that_part_anywhere(5)]
    expected = rows_of(engine, prompts)
    monkeypatch.setattr(f"srpo_env.agents.generation.{bound}", value)
    monkeypatch.setattr("srpo_env.agents.generation.can_share", lambda _: share)
    read.clear()
    other = Generator(shared_policy.model, frozenset(), lambda ids: "", max_rows=512, cache_bytes=1 << 30)
    for row, same in zip(rows_of(other, prompts), expected, strict=True):
        assert row.output == same.output
        assert row.logprobs == pytest.approx(same.logprobs, abs=1e-5)
    assert len(read) > 1


def test_a_model_with_attention_of_its_own_computes_each_prompt_whole(
    folder: Path, ask: Any, forced: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = LocalPolicy(folder)
    policy.model.set_attn_implementation("eager")
    requests = mixed(ask, 12)
    assert worst(policy, forced, requests, ask.outputs(policy, requests)) < 1e-4
    assert "Qwen3ForCausalLM can't share common beginnings" in caplog.text


def test_a_row_depends_on_its_seed_and_not_on_its_neighbours(shared_policy: LocalPolicy, ask: Any) -> None:
    requests = mixed(ask)
    together = ask.outputs(shared_policy, requests)
    backwards = ask.outputs(shared_policy, requests[::-1])[::-1]
    alone = [ask.outputs(shared_policy, [request])[0] for request in requests[:8]]
    assert [o.output_ids for o in together] == [o.output_ids for o in backwards]
    assert [o.output_ids for o in together[:8]] == [o.output_ids for o in alone]


def test_equal_calls_give_equal_outputs_and_other_seeds_others(shared_policy: LocalPolicy, ask: Any) -> None:
    def sampled(shift: int) -> list[tuple[Any, Any]]:
        requests = [ask.request("the sum", seed=seed + shift, max_tokens=12) for seed in range(6)]
        return [(o.output_ids, o.logprobs) for o in ask.outputs(shared_policy, requests)]

    assert sampled(0) == sampled(0)
    assert sampled(0) != sampled(100)
    assert len({ids for ids, _ in sampled(0)}) == 6


def test_temperature_zero_is_what_generate_gives(shared_policy: LocalPolicy, ask: Any) -> None:
    requests = [ask.request(word, seed=7, temperature=0, max_tokens=20) for word in WORDS]
    model = shared_policy.model
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=20,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    for output in ask.outputs(shared_policy, requests):
        theirs = model.generate(torch.tensor([output.prompt_ids]), generation_config=config)
        assert list(output.output_ids) == theirs[0, len(output.prompt_ids) :].tolist()
        assert set(output.logprobs) == {0.0}


def test_logprobs_under_top_k_and_top_p_are_of_the_filtered_distribution(shared_policy: LocalPolicy, ask: Any) -> None:
    requests = [
        ask.request("the sum", seed, temperature=0.8, top_k=(0, 5)[seed % 2], top_p=(0.7, 1.0, 0.9)[seed % 3])
        for seed in range(12)
    ]
    for request, output in zip(requests, ask.outputs(shared_policy, requests), strict=True):
        ids = torch.tensor([[*output.prompt_ids, *output.output_ids]])
        with torch.no_grad():
            logits = shared_policy.model(ids).logits[0, len(output.prompt_ids) - 1 : -1] / 0.8
        if request.sampling.top_k:
            logits = TopKLogitsWarper(request.sampling.top_k)(ids, logits)
        if request.sampling.top_p < 1:
            logits = TopPLogitsWarper(request.sampling.top_p)(ids, logits)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(output.logprobs), expected, atol=1e-4)


def test_first_tokens_are_distributed_as_the_model_says(shared_policy: LocalPolicy, ask: Any) -> None:
    requests = [ask.request("the sum", seed, temperature=2.0, max_tokens=1) for seed in range(6000)]
    outputs = ask.outputs(shared_policy, requests)
    with torch.no_grad():
        logits = shared_policy.model(torch.tensor([outputs[0].prompt_ids])).logits[0, -1]
    expected = torch.softmax(logits.double() / 2.0, -1) * len(outputs)
    counts = torch.bincount(torch.tensor([o.output_ids[0] for o in outputs]), minlength=len(expected))
    often = expected >= 10
    observed = torch.cat([counts[often].double(), counts[~often].sum()[None]])
    wanted = torch.cat([expected[often], expected[~often].sum()[None]])
    assert int(often.sum()) > 20
    assert chisquare(observed.numpy(), wanted.numpy()).pvalue > 1e-3


def test_the_stop_token_is_in_ids_and_logprobs_and_not_in_the_text(
    shared_policy: LocalPolicy, tokenizer: Any, ask: Any, forced: Any
) -> None:
    """trl#4970, OpenRLHF#181: pad is eos here; lengths come from what was sampled, never from token values."""
    requests = [ask.request("the sum", seed, temperature=1.5, max_tokens=100) for seed in range(60)]
    outputs = ask.outputs(shared_policy, requests)
    stopped = [output for output in outputs if output.finish_reason == "stop"]
    assert stopped
    for output in stopped:
        assert output.output_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.eos_token_id not in output.output_ids[:-1]
        assert len(output.logprobs) == len(output.output_ids)
        assert "<|im_end|>" not in output.text
    assert worst(shared_policy, forced, requests, outputs) < 1e-4


def test_an_output_may_be_the_stop_token_alone(folder: Path, ask: Any, tokenizer: Any) -> None:
    policy = LocalPolicy(folder)
    with torch.no_grad():
        embeddings = policy.model.get_input_embeddings().weight
        prompt = ask.outputs(policy, [ask.request("the sum", max_tokens=1)])[0].prompt_ids
        hidden = policy.model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        embeddings[tokenizer.eos_token_id] = 50 * hidden / hidden.norm()
    policy.load_weights(None, 1)
    (output,) = ask.outputs(policy, [ask.request("the sum")])
    assert (output.output_ids, output.text) == ((tokenizer.eos_token_id,), "")
    assert output.finish_reason == "stop"


def test_max_tokens_counts_per_row(shared_policy: LocalPolicy, ask: Any) -> None:
    requests = [ask.request("a", seed, max_tokens=1 + seed % 7) for seed in range(30)]
    for request, output in zip(requests, ask.outputs(shared_policy, requests), strict=True):
        if output.finish_reason == "length":
            assert len(output.output_ids) == request.sampling.max_tokens
        else:
            assert len(output.output_ids) <= request.sampling.max_tokens


def test_a_stop_string_ends_the_row_and_its_tokens_stay(shared_policy: LocalPolicy, ask: Any) -> None:
    """TensorRT-LLM#18190: as many log-probs as ids, and neither is trimmed."""
    free = ask.outputs(shared_policy, [ask.request("a", seed, max_tokens=60) for seed in range(20)])
    stop = next(o.text[9:12] for o in free if len(o.text) > 20 and "\ufffd" not in o.text[9:12])
    requests = [ask.request("a", seed, max_tokens=60, stop=(stop,)) for seed in range(20)]
    outputs = ask.outputs(shared_policy, requests)
    ended = [(o, f) for o, f in zip(outputs, free, strict=True) if stop in o.text]
    assert ended
    for output, unstopped in ended:
        assert output.finish_reason == "stop"
        assert output.output_ids == unstopped.output_ids[: len(output.output_ids)]
        assert len(output.output_ids) < len(unstopped.output_ids)
        assert len(output.logprobs) == len(output.output_ids)
        assert stop not in shared_policy.tokenizer.decode(output.output_ids[:-1])


def test_ids_are_the_sampled_ones_and_not_the_text_encoded_again(
    shared_policy: LocalPolicy, tokenizer: Any, ask: Any
) -> None:
    """rllm#272: the same text has several tokenisations."""
    outputs = ask.outputs(shared_policy, [ask.request("a", seed, max_tokens=30) for seed in range(20)])
    again = [tuple(tokenizer.encode(o.text, add_special_tokens=False)) for o in outputs]
    assert any(o.output_ids[: len(ids)] != ids for o, ids in zip(outputs, again, strict=True))
    assert all(o.text == tokenizer.decode(o.output_ids, skip_special_tokens=True) for o in outputs)


def test_a_prompt_over_the_context_fails_alone(shared_policy: LocalPolicy, ask: Any) -> None:
    requests = [ask.request("a", max_tokens=5), ask.request("x1" * 200), ask.request("a", max_tokens=5)]
    first, long, last = ask.outcomes(shared_policy, requests)
    assert isinstance(long, ContextExceeded)
    assert "160" in str(long)
    assert isinstance(first, Output)
    assert isinstance(last, Output)
    assert first.output_ids == last.output_ids


def test_max_tokens_is_cut_to_what_the_context_leaves(shared_policy: LocalPolicy, ask: Any) -> None:
    requests = [ask.request("x1" * 60, seed, max_tokens=1000) for seed in range(8)]
    outputs = ask.outputs(shared_policy, requests)
    room = 160 - len(outputs[0].prompt_ids)
    assert 0 < room < 40
    assert max(len(o.output_ids) for o in outputs) == room


def test_messages_that_the_template_refuses_fail_alone(tmp_path: Path, folder: Path, ask: Any) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('I refuse') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    refused, fine, empty = ask.outcomes(
        LocalPolicy(tmp_path), [ask.request(word, max_tokens=2) for word in ("no", "yes", "")]
    )
    assert isinstance(refused, PolicyError)
    assert "I refuse" in str(refused)
    assert isinstance(fine, Output)
    assert isinstance(empty, PolicyError)
    assert "empty prompt" in str(empty)


def test_no_requests_give_no_outputs(shared_policy: LocalPolicy, ask: Any) -> None:
    assert ask.outcomes(shared_policy, []) == []


def test_weights_that_diverged_fail_the_row_and_do_not_stay(folder: Path, ask: Any, shared_policy: LocalPolicy) -> None:
    policy = LocalPolicy(folder)
    good = {key: value.clone() for key, value in policy.model.state_dict().items()}
    with torch.no_grad():
        policy.model.get_input_embeddings().weight.fill_(torch.nan)
    (broken,) = ask.outcomes(policy, [ask.request("the sum", max_tokens=4)])
    assert isinstance(broken, PolicyError)
    policy.load_weights(good, 1)
    request = ask.request("a", max_tokens=30)
    assert ask.outputs(policy, [request])[0].output_ids == ask.outputs(shared_policy, [request])[0].output_ids


def test_what_a_diverged_row_leaves_in_the_cache_reaches_no_later_row(folder: Path, ask: Any, forced: Any) -> None:
    policy = LocalPolicy(folder)
    policy._generator.stop_ids = frozenset()
    weight = policy.model.get_input_embeddings().weight
    good, steps = weight.detach().clone(), iter(range(1000))

    def diverge(*_: Any) -> None:
        if next(steps) == 20:
            weight.data.fill_(torch.nan)

    handle = policy.model.register_forward_pre_hook(diverge)
    broken = ask.outcomes(policy, [ask.request("a", seed, max_tokens=60) for seed in range(3)])
    assert all(isinstance(outcome, PolicyError) for outcome in broken)
    handle.remove()
    policy.load_weights({**policy.model.state_dict(), "model.embed_tokens.weight": good, "lm_head.weight": good}, 1)
    # The first row's slot holds NaN in a column that only the second row, longer, brings into view.
    requests = [ask.request("a", max_tokens=12), ask.request("x1" * 8, max_tokens=12)]
    outputs = ask.outputs(policy, requests)
    assert len(outputs[0].prompt_ids) + 20 < len(outputs[1].prompt_ids) + 12
    assert worst(policy, forced, requests, outputs) < 1e-4


@pytest.mark.parametrize("form", ["folder", "state", "untied state", "in place"])
def test_new_weights_change_outputs_and_version(folder: Path, other_folder: Path, ask: Any, form: str) -> None:
    policy, other = LocalPolicy(folder), LocalPolicy(other_folder)
    requests = [ask.request("the sum", seed, max_tokens=10) for seed in range(4)]
    before = ask.outputs(policy, requests)
    state = dict(other.model.state_dict())
    if form == "untied state":
        del state["lm_head.weight"]
    if form == "in place":
        policy.model.load_state_dict(state)
    weights = policy.model.get_input_embeddings().weight
    policy.load_weights({"folder": other_folder, "in place": None}.get(form, state), 5)
    after = ask.outputs(policy, requests)
    assert policy.model.get_input_embeddings().weight is weights
    assert [o.output_ids for o in after] == [o.output_ids for o in ask.outputs(other, requests)]
    assert [o.output_ids for o in after] != [o.output_ids for o in before]
    assert {o.policy_version for o in before} == {0}
    assert {o.policy_version for o in after} == {5} == {policy.version}


def test_weights_of_another_model_are_refused_and_change_nothing(folder: Path) -> None:
    policy = LocalPolicy(folder)
    state = {key: value + 1 for key, value in policy.model.state_dict().items()}
    before = {key: value.clone() for key, value in policy.model.state_dict().items()}
    with pytest.raises(PolicyError, match="extra"):
        policy.load_weights(state | {"extra": torch.zeros(1)}, 1)
    state["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(PolicyError, match=r"model\.norm\.weight.*another shape"):
        policy.load_weights(state, 1)
    del state["model.norm.weight"]
    with pytest.raises(PolicyError, match=r"model\.norm\.weight.*missing"):
        policy.load_weights(state, 1)
    assert all(torch.equal(before[key], value) for key, value in policy.model.state_dict().items())
    assert policy.version == 0


def test_two_policies_from_one_folder_have_weights_of_their_own(folder: Path) -> None:
    one, two = LocalPolicy(folder), LocalPolicy(folder)
    assert one.model is one.model
    with torch.no_grad():
        one.model.get_input_embeddings().weight.zero_()
    assert two.model.get_input_embeddings().weight.abs().sum() > 0


def test_sampling_leaves_the_model_trainable(folder: Path, ask: Any) -> None:
    policy = LocalPolicy(folder)
    policy.model.train()
    ask.outputs(policy, [ask.request("a", max_tokens=3)])
    policy.model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert policy.model.get_input_embeddings().weight.grad is not None


@pytest.mark.parametrize("deterministic", [True, False])
def test_calls_share_a_batch_only_when_free_running(folder: Path, ask: Any, deterministic: bool) -> None:
    policy = LocalPolicy(folder, deterministic=deterministic)
    sizes: list[int] = []
    policy.model.register_forward_pre_hook(
        lambda _, __, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    policy._generator.stop_ids = frozenset()

    async def both() -> list[list[Any]]:
        halves = [[ask.request("a", seed, max_tokens=100) for seed in part] for part in (range(4), range(4, 8))]
        return list(await asyncio.gather(*map(policy.sample, halves)))

    first, second = asyncio.run(both())
    assert max(sizes) == (4 if deterministic else 8)
    alone = LocalPolicy(folder)
    alone._generator.stop_ids = frozenset()
    expected = ask.outputs(alone, [ask.request("a", seed, max_tokens=100) for seed in range(8)])
    assert [o.output_ids for o in first + second] == [o.output_ids for o in expected]


def endless(folder: Path) -> LocalPolicy:
    """A policy whose calls take minutes."""
    policy = LocalPolicy(folder)
    object.__setattr__(policy._loaded, "context_length", 100_000)
    policy._generator.stop_ids = frozenset()
    return policy


def rests(policy: LocalPolicy) -> bool:
    """Whether the policy's thread has nothing left to do within two seconds."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        if not policy._generator.busy:
            return True
        time.sleep(0.02)
    return False


async def test_a_cancelled_call_stops_within_two_seconds_and_the_next_one_works(folder: Path, ask: Any) -> None:
    policy = endless(folder)
    task = asyncio.create_task(policy.sample([ask.request("a", seed, max_tokens=90_000) for seed in range(64)]))
    await asyncio.sleep(0.3)
    assert policy._generator.busy
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rests(policy)
    (output,) = await policy.sample([ask.request("a", max_tokens=3)])
    assert isinstance(output, Output)


async def test_a_cancelled_call_leaves_the_others_as_they_are(folder: Path, ask: Any) -> None:
    policy, alone = LocalPolicy(folder, deterministic=False), LocalPolicy(folder)
    first, second = ([ask.request("a", seed, max_tokens=40) for seed in seeds] for seeds in (range(4), range(4, 8)))
    for each in (policy, alone):
        each._generator.stop_ids = frozenset()
    entered = threading.Event()
    policy.model.register_forward_hook(lambda *_: entered.set() if len(policy._generator._rows) == 8 else None)
    doomed = asyncio.create_task(policy.sample(first))
    kept = asyncio.create_task(policy.sample(second))
    await asyncio.to_thread(entered.wait)
    doomed.cancel()
    assert [o.output_ids for o in await kept] == [o.output_ids for o in await alone.sample(second)]
    with pytest.raises(asyncio.CancelledError):
        await doomed


def test_ctrl_c_stops_sampling_within_two_seconds(folder: Path, ask: Any) -> None:
    policy = endless(folder)
    pressed = 0.0

    async def sample() -> None:
        def press() -> None:
            nonlocal pressed
            pressed = time.monotonic()
            signal.raise_signal(signal.SIGINT)

        asyncio.get_running_loop().call_later(0.3, press)
        await policy.sample([ask.request("a", seed, max_tokens=90_000) for seed in range(64)])

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(sample())
    assert time.monotonic() - pressed < 2
    assert rests(policy)


async def test_closing_cancels_calls_and_leaves_no_thread(folder: Path, ask: Any) -> None:
    policy = endless(folder)
    before = set(threading.enumerate())
    task = asyncio.create_task(policy.sample([ask.request("a", max_tokens=90_000)]))
    await asyncio.sleep(0.2)
    (mine,) = [each for each in set(threading.enumerate()) - before if each.name == "sample main"]
    await policy.aclose()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not mine.is_alive()
    with pytest.raises(PolicyError, match="closed"):
        await policy.sample([ask.request("a")])


async def test_an_unforeseen_error_reaches_the_caller(folder: Path, ask: Any) -> None:
    policy = LocalPolicy(folder)
    handle = policy.model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await policy.sample([ask.request("a")])
    handle.remove()
    assert isinstance((await policy.sample([ask.request("a", max_tokens=2)]))[0], Output)


async def test_the_event_loop_stays_free(folder: Path, ask: Any) -> None:
    policy = endless(folder)
    task = asyncio.create_task(policy.sample([ask.request("a", max_tokens=90_000)]))
    turns = 0
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        await asyncio.sleep(0.005)
        turns += 1
    await policy.aclose()
    assert turns > 10
    assert task.done()


def test_a_recipe_describes_a_policy(folder: Path, ask: Any) -> None:
    policy = LocalPolicy.from_config("solver", {"model": str(folder), "template_arguments": {"think": True}})
    assert policy.name == "solver"
    (output,) = ask.outputs(policy, [ask.request("a", max_tokens=1)])
    assert policy.tokenizer.decode(output.prompt_ids).endswith("assistant\n<think>")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtyp": "float32"}, r"policies\.main\.sample\.dtyp: no such setting\. Did you mean 'dtype'"),
        ({"dtype": "float8"}, r"policies\.main\.sample\.dtype: 'float8' is not allowed"),
        ({"max_rows": 0}, r"policies\.main\.sample\.max_rows: 0 is not allowed"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecipe, match=message):
        LocalPolicy.from_config("main", {"model": str(folder), **settings})


def test_a_model_with_other_layers_is_refused(tmp_path: Path, tokenizer: Any, ask: Any) -> None:
    from transformers import Qwen3NextConfig

    config = Qwen3NextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=0,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(MissingModel, match="linear_attention"):
        ask.outcomes(LocalPolicy(tmp_path), [ask.request("a")])
