"""A small random model with a byte-level tokenizer whose template and post-processor both know a BOS."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from srpo_env.agents import http_client
from srpo_env.agents.local import LocalPolicy
from srpo_env.protocols import RequestKey, Sampled, SampleRequest
from srpo_env.records import Message, Output, Sampling

BOS, START, END, THINK = "<|bos|>", "<|im_start|>", "<|im_end|>", "<think>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if think is defined %}<think>{% endif %}"
)
CONTEXT = 160


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        ["user assistant system what is the sum of two numbers", "the answer is the number"] * 3,
        trainers.BpeTrainer(
            vocab_size=310,
            show_progress=False,
            special_tokens=[BOS, START, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    backend.add_tokens([AddedToken(THINK, special=False, normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
        model_max_length=CONTEXT,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes)))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model(tokenizer).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The same architecture with other weights."""
    path = tmp_path_factory.mktemp("other")
    build_model(tokenizer, seed=1).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def shared_policy(folder: Path) -> LocalPolicy:
    """For tests that leave its weights alone."""
    return LocalPolicy(folder)


class Ask:
    """Builds requests and runs them."""

    def request(self, content: str, seed: int = 0, *, index: int = 0, **sampling: Any) -> SampleRequest:
        message = Message(role="user", content=content)
        return SampleRequest((message,), Sampling(**sampling), seed, RequestKey(0, 0, 0, index))

    def outcomes(self, policy: Any, requests: Sequence[SampleRequest]) -> list[Sampled]:
        return list(asyncio.run(policy.sample(requests)))

    def outputs(self, policy: Any, requests: Sequence[SampleRequest]) -> list[Output]:
        outcomes = self.outcomes(policy, requests)
        assert all(isinstance(outcome, Output) for outcome in outcomes), outcomes
        return [outcome for outcome in outcomes if isinstance(outcome, Output)]


@pytest.fixture(scope="session")
def ask() -> Ask:
    return Ask()


@pytest.fixture(scope="session")
def forced() -> Callable[..., list[float]]:
    """Log-probs of an output by one full forward pass, without cache, padding or neighbours."""

    @torch.no_grad()
    def logprobs(model: Any, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0) -> list[float]:
        logits = model(input_ids=torch.tensor([[*prompt, *output]]), use_cache=False).logits[0]
        rows = torch.log_softmax(logits[len(prompt) - 1 : -1].float() / temperature, dim=-1)
        return rows.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()

    return logprobs


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module of the server that speaks vLLM's protocol."""
    name = "agents_tests_fake_server"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("fake_server.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serve(fake: ModuleType, tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., Any]]:
    """Starts servers that draw letters and now and then the end."""
    letters = tokenizer.encode("abcd", add_special_tokens=False)
    draw = fake.fixed({**dict.fromkeys(letters, 1.0), tokenizer.eos_token_id: 0.0}, tokenizer.eos_token_id)
    with ExitStack() as servers:

        def serve(**settings: Any) -> Any:
            given = {"draw": draw, "decode": lambda ids: tokenizer.decode(ids, skip_special_tokens=True)} | settings
            return servers.enter_context(fake.FakeServer(**given))

        yield serve


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries after milliseconds."""
    for name in ("_FIRST_WAIT_S", "_LONGEST_WAIT_S", "_JITTER_S"):
        monkeypatch.setattr(http_client, name, 0.001)
