"""Which of several processes does what? All have the batch, and each has a share of its rows.

The first rank samples and writes the run's folder; it tells the others what to do, and they do it with it. All see the
log-probs of all rows, so the loss, its derivative and every count are those of one process, and gradients add up.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from srpo_env.batch import EventBatch

_PATIENCE = timedelta(days=7)
"""How long a rank waits while the first one samples."""


class Ranks:
    """The ranks of torch.distributed as this one sees them; a process that is alone is the first and only rank."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.world = dist.get_world_size() if together else 1
        # What `accelerate launch` says by its configuration.
        self.sharded = self.world > 1 and os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
        # What is told and what log-probs there are lie on the CPU.
        self._talk = dist.new_group(backend="gloo", timeout=_PATIENCE) if self.world > 1 else None

    @property
    def leads(self) -> bool:
        """Whether this is the first rank."""
        return self.rank == 0

    def tell(self, order: str | None, subject: object = None) -> None:
        """Has the other ranks do something, or, by None, end; does nothing on them, or where there are none."""
        if self.leads and self.world > 1:
            dist.broadcast_object_list([order, subject], src=0, group=self._talk)

    def orders(self) -> Iterator[tuple[str, Any]]:
        """What the first rank tells, until it ends."""
        while True:
            heard: list[Any] = [None, None]
            dist.broadcast_object_list(heard, src=0, group=self._talk)
            if heard[0] is None:
                return
            yield heard[0], heard[1]

    def share(self, batch: EventBatch, rows: Tensor) -> Tensor:
        """This rank's part of some rows, [m'] of [m]: whole events, of about as many tokens as each other rank's."""
        if self.world == 1 or not len(rows):
            return rows
        tokens = torch.zeros(batch.num_events, dtype=torch.int64)
        tokens = tokens.index_add(0, batch.event[rows], batch.length[rows])
        loads = [0] * self.world
        rank = torch.full_like(tokens, -1)
        for event in torch.argsort(tokens, descending=True, stable=True).tolist():  # each to the emptiest rank
            rank[event] = at = min(range(self.world), key=loads.__getitem__)
            loads[at] += int(tokens[event])
        return rows[rank[batch.event[rows]] == self.rank]

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor on the CPU over ranks."""
        if self.world > 1:
            dist.all_reduce(tensor, group=self._talk)
        return tensor

    def most(self, number: int) -> int:
        """The largest of a number over ranks."""
        found = torch.tensor(number)
        if self.world > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._talk)
        return int(found)

    def add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sums the gradients of parameters over ranks; one that has none on any rank is left without.

        In shards they are sums already.
        """
        if self.world == 1 or self.sharded:
            return
        held = self.total(torch.tensor([each.grad is not None for each in parameters], dtype=torch.int64))
        under_way = []
        for each, ranks in zip(parameters, held.tolist(), strict=True):
            if ranks:
                each.grad = torch.zeros_like(each) if each.grad is None else each.grad
                under_way.append(dist.all_reduce(each.grad, async_op=True))
        for work in under_way:
            assert work is not None
            work.wait()


@cache
def ranks_of_this_job() -> Ranks:
    """The ranks of the processes that run when this is first asked; all of them must ask."""
    return Ranks()
