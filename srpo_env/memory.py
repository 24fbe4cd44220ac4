"""How much memory will a training run take in its process? An estimate from what its recipe names; nothing is loaded.

    process + weights + reference + optimiser + gradients + max(cache, activations)

The cache, keys and values of a sampler in this process, is given back before the learner begins, and what a micro-batch
keeps when it ends. Gradients are too, but they are many small pieces, which the allocator holds on to. The learner's
parts are its own to tell: see `Estimating`.
"""

from __future__ import annotations

from collections import Counter
from typing import cast

from pydantic import BaseModel, ConfigDict

from srpo_env.adapters import add_adapter
from srpo_env.episode import Episode
from srpo_env.jobs import Job
from srpo_env.models import Dtype, outline
from srpo_env.protocols import Caching, Estimating

PROCESS_BYTES = 560 << 20
"""Measured on Linux with the CPU build of torch 2.13 (benchmarks/memory.py)."""


_ALWAYS = ("process", "weights", "reference", "optimiser", "gradients")


class Memory(BaseModel):
    """Bytes of each part, those of all policies added up.

    Attributes:
        process: Python, torch and what else is imported, and a batch's events.
        weights: Of each model, once where adapters share it.
        reference, optimiser, gradients, activations: The learner's.
        cache: Keys and values of the sampler, where it lies in this process.
    """

    model_config = ConfigDict(frozen=True)

    process: int = PROCESS_BYTES
    weights: int = 0
    reference: int = 0
    optimiser: int = 0
    cache: int = 0
    gradients: int = 0
    activations: int = 0

    @property
    def peak(self) -> int:
        """Most bytes at any time."""
        always: int = sum(getattr(self, name) for name in _ALWAYS)
        return always + max(self.cache, self.activations)

    def __str__(self) -> str:
        always = " + ".join(f"{name} {_gib(getattr(self, name))}" for name in _ALWAYS if getattr(self, name))
        cache = f"cache {_gib(self.cache)} while sampling or " if self.cache else ""
        return f"{_gib(self.peak)} GiB: {always} + {cache}activations {_gib(self.activations)} while learning"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def estimate(job: Job) -> Memory | str:
    """Returns what a job will take, or why that can't be told.

    Raises:
        MissingModel: The config.json of a model is not on this machine.
    """
    if not isinstance(job.learner, Estimating):
        return f"trainer {job.recipe.trainer!r} tells nothing of itself"
    if job.graph.callers and any(isinstance(job.backend(label)[0], Caching) for label in job.policies):
        return "prompts grow by what tools answer, and with them the keys and values of the sampler in this process"
    parts, counted = Counter[str](), set[str]()
    for label, use in job.recipe.policies.items():
        if use.model is None:
            continue
        model = outline(use.model, cast("Dtype", use.dtype))
        lora = None if use.train is None else use.train.lora
        if use.model not in counted:
            parts["weights"] += sum(each.nbytes for each in model.parameters())
        if use.train is None or lora is not None:
            counted.add(use.model)
        if use.train is not None:
            model = model if lora is None else add_adapter(model, lora, job.recipe.seed)
            parts.update(job.learner.memory(job.settings, model, use.train))
        parts["cache"] += _cache(job, label)
    return Memory(**parts)


def _cache(job: Job, label: str) -> int:
    """Bytes of the keys and values of as many outputs as can be sampled at once, each with a first prompt."""
    backend, settings = job.backend(label)
    if not isinstance(backend, Caching):
        return 0
    recipe, held_out = job.recipe, len(job.held_out) * job.recipe.eval.samples
    batch = recipe.rollout.tasks_per_batch * recipe.rollout.group_size
    episodes = min(recipe.rollout.max_in_flight, max(batch, held_out))
    first = Episode(job.graph, job.tasks.tasks[0], job.tasks, tools=job.tools).active_set[0]
    most = max(recipe.sampling_of(name).max_tokens for name in job.graph.workflow.agents)
    return backend.cache_bytes(label, settings, first.messages, most, episodes * job.graph.k_max)
