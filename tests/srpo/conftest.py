"""What the learner's tests share: tiny random models, policies around them, and events made by hand or at random."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from srpo_env.adapters import is_adapter, read_adapter, set_adapter_weights
from srpo_env.batch import EventBatch
from srpo_env.records import Event, Member, Message, Output, Parse, Sampling
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.objective import SRPOLoss, srpo_loss

# What shared checks compare is shown where they fail.
pytest.register_assert_rewrite("tests.srpo.learning", "tests.srpo.loss_cases")

VOCABULARY = 30
Gradients = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------- models


def gpt2(seed: int = 0, **changes: Any) -> GPT2LMHeadModel:
    """Has a LayerNorm in its own precision, so that float64 means float64; and dropout, which must be off."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 128,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**(settings | changes))).double()


def copies(build: Callable[..., Any]) -> Callable[..., Any]:
    """Builds a model once and gives copies of it."""
    built: dict[str, Any] = {}

    def build_or_copy(seed: int = 0, **changes: Any) -> Any:
        key = f"{seed} {sorted(changes.items())}"
        if key not in built:
            built[key] = build(seed, **changes)
        return copy.deepcopy(built[key])

    return build_or_copy


def qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """The architecture of the tiny policy that ships, in float32."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes)))


class Trained:
    """A policy in this process, as far as a learner needs one."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
        )
        self.version = 0

    def load_weights(self, source: Path | Mapping[str, Tensor] | None, version: int) -> None:
        if isinstance(source, Path) and is_adapter(source):
            set_adapter_weights(self.model, read_adapter(source))
        elif isinstance(source, Path):
            source = AutoModelForCausalLM.from_pretrained(source, dtype=self.model.dtype).state_dict()
        if isinstance(source, Mapping):
            self.model.load_state_dict(source)
        self.version = version

    def parameters(self) -> Gradients:
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}


@dataclass(frozen=True)
class Make:
    """What makes things."""

    gpt2: Callable[..., GPT2LMHeadModel]
    qwen3: Callable[..., Qwen3ForCausalLM]
    policy: Callable[[PreTrainedModel], Trained] = Trained

    def member(
        self, output: Sequence[int] | None = (1, 2), prompt: Sequence[int] | None = (3, 4), **values: Any
    ) -> Member:
        made: dict[str, Any] = {
            "agent": "solver",
            "index": 0,
            "turn": 0,
            "policy": "main",
            "messages": (Message(role="user", content="?"),),
            "sampling": Sampling(),
            "parse": Parse(ok=True),
        }
        of_output = {key: values.pop(key) for key in tuple(values) if key in Output.model_fields}
        response = Output(
            text="",
            prompt_ids=None if prompt is None else tuple(prompt),
            output_ids=None if output is None else tuple(output),
            **of_output,
        )
        return Member(**(made | values), output=response)

    def event(self, members: Sequence[Member], *, episode: str = "g/0", **values: Any) -> Event:
        made: dict[str, Any] = {
            "run": "r",
            "task": "t",
            "group": episode.rpartition("/")[0],
            "step": 0,
            "node": "solve",
            "visit": 0,
            "next_node": "end",
            "state_before": "",
            "state_after": "",
            "reward": 1.0,
            "terminated": True,
            "truncated": False,
        }
        numbered = [member.model_copy(update={"index": i}) for i, member in enumerate(members)]
        return Event(**(made | values), episode=episode, members=tuple(numbered))

    def events(
        self,
        seed: int = 0,
        *,
        groups: int = 2,
        size: int = 3,
        most_events: int = 2,
        members: int | None = None,
        shared_prompts: bool = True,
        policies: Sequence[str] = ("main",),
        spread: float = 0.4,
        temperature: float = 1.0,
    ) -> list[Event]:
        """Random episodes: ragged rows, sampler's log-probs that are anything, a failed output here and there."""
        draw = random.Random(seed)
        found = []
        for group in range(groups):
            prompts: dict[int, list[int]] = {}
            for at in range(size):
                number = draw.randint(1, most_events)
                for step in range(number):
                    made = []
                    for index in range(members or draw.randint(1, 3)):
                        own = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))]
                        prompt = prompts.setdefault(step, own) if shared_prompts else own
                        length = draw.randint(1, 5) if draw.random() < 0.9 or members else 0
                        made.append(
                            self.member(
                                [draw.randrange(VOCABULARY) for _ in range(length)],
                                prompt,
                                agent=f"agent{index % 2}",
                                policy=policies[index % len(policies)],
                                logprobs=[-2.5 + spread * draw.gauss(0, 1) for _ in range(length)],
                                sampling=Sampling(temperature=temperature),
                                turn=step,
                            )
                        )
                    last = step == number - 1
                    found.append(
                        self.event(
                            made,
                            episode=f"g{group}/{at}",
                            step=step,
                            node=f"node{step}",
                            reward=float(at == 0 or draw.random() < 0.5) * (at != 1) if last else 0.0,
                            terminated=last,
                        )
                    )
        return found

    def batch(self, seed: int = 0, **settings: Any) -> EventBatch:
        return EventBatch.from_events(self.events(seed, **settings))


@pytest.fixture(scope="session")
def make() -> Make:
    """Makes models, policies, members, events and batches."""
    return Make(copies(gpt2), copies(qwen3))


# -------------------------------------------------------------------------------- the slow, plain way


class Plain:
    """The algorithm in one graph, a row at a time, without any of the learner's code but the loss."""

    def logprobs(self, model: PreTrainedModel, batch: EventBatch, rows: Sequence[int]) -> Tensor:
        """[M, T] by a full log-softmax over each of these rows, 0 elsewhere."""
        grid = torch.zeros(batch.mask.shape, dtype=torch.promote_types(model.dtype, torch.float32))
        for row in rows:
            places = torch.nonzero(batch.mask[row]).flatten()
            if not len(places):
                continue
            ids = batch.ids[row : row + 1, : int(batch.length[row])]
            logits = model(input_ids=ids, use_cache=False).logits[0]
            log_p = torch.log_softmax(logits.to(grid.dtype) / batch.temperature[row], dim=-1)
            values = log_p[places - 1].gather(1, ids[0, places].unsqueeze(1)).squeeze(1)
            grid = grid.index_put((torch.tensor(row), places), values)
        return grid

    def rows(self, batch: EventBatch, policy: str) -> list[int]:
        if policy not in batch.names["policy"]:
            return []
        return torch.nonzero(batch.policy == batch.names["policy"].index(policy)).flatten().tolist()

    def graph(self, policies: Mapping[str, Trained], batch: EventBatch) -> tuple[Tensor, Tensor]:
        """[M, T] log-probs of all trained rows with their graph, and the mask of trained tokens."""
        new = torch.zeros(batch.mask.shape)
        mask = torch.zeros_like(batch.mask)
        for label, policy in policies.items():
            policy.model.eval()
            rows = self.rows(batch, label)
            new = new + self.logprobs(policy.model, batch, rows)
            mask[rows] = batch.mask[rows]
        return new, mask

    def loss(
        self, new: Tensor, old: Tensor, mask: Tensor, batch: EventBatch, advantage: Tensor, config: SRPOConfig
    ) -> SRPOLoss:
        return srpo_loss(
            new,
            old,
            mask,
            batch.event,
            advantage,
            clip_low=config.clip[0],
            clip_high=config.clip[1],
            set_norm=config.set_norm,
            length_norm=config.length_norm,
            ratio_level=config.ratio_level,
            reduction=config.reduction,
            constant_length=config.constant_length,
            episode=batch.episode,
            num_events=batch.num_events if len(advantage) != batch.num_events else None,
        )

    def advantage(self, batch: EventBatch) -> Tensor:
        """[E] by a loop: (R - mean) / std over the scored episodes of a group."""
        returns: dict[int, float] = {}
        group_of: dict[int, int] = {}
        for e in range(batch.num_events):
            returns[int(batch.episode[e])] = returns.get(int(batch.episode[e]), 0.0) + float(batch.reward[e])
            group_of[int(batch.episode[e])] = int(batch.group[e])
        found = []
        for episode in batch.episode.tolist():
            peers = [R for e, R in returns.items() if group_of[e] == group_of[episode] and R == R]
            R = returns[episode]
            if R == R and (len(peers) < 2 or max(peers) == min(peers)):
                found.append(0.0)
                continue
            values = torch.tensor(peers, dtype=torch.float64)
            found.append(float((R - values.mean()) / values.std(correction=0)) if len(values) else float("nan"))
        return torch.tensor(found, dtype=torch.float64)


@pytest.fixture(scope="session")
def plain() -> Plain:
    """The algorithm in one graph."""
    return Plain()


# ---------------------------------------------------------------------------------- own functions


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """Writes a module and returns the reference of its `mine`."""
    numbers = itertools.count()

    def own(body: str) -> str:
        file = tmp_path / f"own_{next(numbers)}.py"
        file.write_text(f"import torch\ndef mine(*args):\n    {body}\n")
        return f"{file}:mine"

    return own
