"""A tiny model, events for it, and what a step costs: parts of the benchmarks named learner_*."""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from srpo_env import EventBatch
from srpo_env.records import Event, Member, Message, Output, Parse, Sampling

VOCABULARY = 32_000
Ids = tuple[int, ...]
Row = tuple[Ids, Ids]


def tiny_qwen3(vocabulary: int = VOCABULARY) -> Qwen3ForCausalLM:
    """Hidden size 256, 4 layers, random weights, float32."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
        )
    )


class Policy:
    """A model, as far as a learner needs one."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def load_weights(self, source: object, version: int) -> None:
        """The learner and this policy share the weights."""


def drawn(draw: random.Random, length: int, vocabulary: int = VOCABULARY) -> Ids:
    """Random token ids."""
    return tuple(draw.randrange(10, vocabulary) for _ in range(length))


def event(rows: Sequence[Row], episode: str, reward: float) -> Event:
    """One event, the only one of its episode, with these (prompt, output) as members."""
    members = tuple(
        Member(
            agent="agent",
            index=index,
            turn=0,
            policy="main",
            messages=(Message(role="user", content=""),),
            output=Output(text="", prompt_ids=prompt, output_ids=output, logprobs=(-1.0,) * len(output)),
            parse=Parse(ok=True),
            sampling=Sampling(),
        )
        for index, (prompt, output) in enumerate(rows)
    )
    return Event(
        run="benchmark",
        task="task",
        group=episode.partition("/")[0],
        episode=episode,
        step=0,
        node="node",
        visit=0,
        next_node="end",
        state_before="",
        state_after="",
        members=members,
        reward=reward,
        terminated=True,
        truncated=False,
    )


def batch_of(groups: Iterable[Sequence[Sequence[Row]]]) -> EventBatch:
    """Events as a learner gets them; in each group, the episodes' rewards are 0, 1, 0, 1, ..."""
    return EventBatch.from_events(
        event(rows, f"{number}/{place}", float(place % 2))
        for number, group in enumerate(groups)
        for place, rows in enumerate(group)
    )


def cpu_seconds(step: Callable[[], object], repeats: int = 3) -> float:
    """CPU time of a step, the least of its repeats."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        step()
        taken.append(time.process_time() - began)
    return min(taken)


def memory_rise(step: Callable[[], object]) -> float:
    """MiB by which the resident set rises at most during a step (Linux)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _resident("VmRSS")
    step()
    return (_resident("VmHWM") - before) / 1024


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
