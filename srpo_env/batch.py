"""The flat view of events that estimators, objectives, trainers and adapters share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from srpo_env.errors import Untrainable

if TYPE_CHECKING:
    from torch import Tensor

    from srpo_env.records import Event, Member

_NAMED = ("group", "task", "episode", "node", "agent", "policy", "finish_reason")
_EVENT = ("group", "task", "episode", "step", "node", "visit", "reward", "terminated", "truncated")
_GRID = ("ids", "mask", "sampler_logprobs", "old_logprobs", "ref_logprobs")


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events as tensors: E events, M members (rows, in the order of their events), T tokens.

    Names (group, task, episode, node, agent, policy, finish_reason) are codes; `names` turns them back into text.
    Position t of a [M, T] tensor belongs to the token `ids[m, t]`: `mask` says whether it was sampled, the log-probs
    are its own given all tokens before it. Rows are padded on the right.

    Attributes:
        group, task, episode, node: [E] int64 codes.
        step, visit: [E] int64, from 0.
        reward: [E] float64; NaN = unscored.
        terminated, truncated: [E] bool.
        event: [M] int64, index of the row's event.
        agent, policy, finish_reason: [M] int64 codes.
        index, turn, policy_version: [M] int64.
        temperature: [M] float32, the one it was sampled at.
        parse_ok: [M] bool.
        has_ids: [M] bool, false where the backend gave no token ids: such a row has length 0.
        processed: [M] bool, whether `sampler_logprobs` are of the tempered distribution.
        full_support: [M] bool, sampled with top_p = 1 and top_k off.
        tool_calls: [M] int64, number of calls.
        length: [M] int64, number of ids, prompt included.
        ids: [M, T] int64.
        mask: [M, T] bool, true for sampled tokens.
        sampler_logprobs: [M, T] float32; NaN where unknown, 0 where the mask is false.
        old_logprobs, ref_logprobs: [M, T], filled by the learner.
        names: The text of each code.
        event_ids: The id of each event, for messages.
    """

    group: Tensor
    task: Tensor
    episode: Tensor
    node: Tensor
    step: Tensor
    visit: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    event: Tensor
    agent: Tensor
    policy: Tensor
    finish_reason: Tensor
    index: Tensor
    turn: Tensor
    policy_version: Tensor
    temperature: Tensor
    parse_ok: Tensor
    has_ids: Tensor
    processed: Tensor
    full_support: Tensor
    tool_calls: Tensor
    length: Tensor
    ids: Tensor
    mask: Tensor
    sampler_logprobs: Tensor
    names: Mapping[str, tuple[str, ...]]
    event_ids: tuple[str, ...]
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

    @property
    def num_events(self) -> int:
        """E."""
        return len(self.event_ids)

    @property
    def num_members(self) -> int:
        """M."""
        return int(self.event.shape[0])

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> EventBatch:
        """Lays events out as tensors; the order of events and of their members is kept.

        Raises:
            Untrainable: An output's ids and log-probs differ in number.
        """
        events = list(events)
        members = [member for event in events for member in event.members]
        owner = [i for i, event in enumerate(events) for _ in event.members]
        codes: dict[str, list[int]] = {}
        names: dict[str, tuple[str, ...]] = {}
        texts: dict[str, list[str]] = {
            "group": [e.group for e in events],
            "task": [e.task for e in events],
            "episode": [e.episode for e in events],
            "node": [e.node for e in events],
            "agent": [m.agent for m in members],
            "policy": [m.policy for m in members],
            "finish_reason": [m.output.finish_reason or "" for m in members],
        }
        for name in _NAMED:
            table = {text: code for code, text in enumerate(dict.fromkeys(texts[name]))}
            codes[name] = [table[text] for text in texts[name]]
            names[name] = tuple(table)

        ids, mask, logprobs, length = _grids(events, members, owner)

        def event_codes(name: str) -> Tensor:
            return torch.tensor(codes[name], dtype=torch.int64)

        def of_members(values: Sequence[int | bool | float], dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype)

        return cls(
            **{name: event_codes(name) for name in _NAMED},
            step=of_members([e.step for e in events]),
            visit=of_members([e.visit for e in events]),
            reward=of_members([torch.nan if e.reward is None else e.reward for e in events], torch.float64),
            terminated=of_members([e.terminated for e in events], torch.bool),
            truncated=of_members([e.truncated for e in events], torch.bool),
            event=of_members(owner),
            index=of_members([m.index for m in members]),
            turn=of_members([m.turn for m in members]),
            policy_version=of_members([m.output.policy_version for m in members]),
            temperature=of_members([m.sampling.temperature if m.sampling else 1.0 for m in members], torch.float32),
            parse_ok=of_members([m.parse.ok for m in members], torch.bool),
            has_ids=of_members([_has_ids(m) for m in members], torch.bool),
            processed=of_members([m.output.logprobs_mode == "processed" for m in members], torch.bool),
            full_support=of_members(
                [m.sampling is None or (m.sampling.top_p == 1 and m.sampling.top_k == 0) for m in members], torch.bool
            ),
            tool_calls=of_members([len(m.tool_calls) for m in members]),
            length=length,
            ids=ids,
            mask=mask,
            sampler_logprobs=logprobs,
            names=names,
            event_ids=tuple(e.id for e in events),
        )

    def rows_of(self, events: Tensor) -> Tensor:
        """Returns the rows of these events (different indices, [n] int64), in the order of the events: [m] int64."""
        position = torch.full((self.num_events,), -1, dtype=torch.int64)
        position[events] = torch.arange(len(events))
        rows = torch.nonzero(position[self.event] >= 0).flatten()
        return rows[torch.argsort(position[self.event[rows]], stable=True)]

    def select(self, events: Tensor) -> EventBatch:
        """Returns the batch of these events (different indices, [n] int64), whole and in this order.

        It is as wide as its longest row.
        """
        rows = self.rows_of(events)
        position = torch.zeros(self.num_events, dtype=torch.int64).index_copy(0, events, torch.arange(len(events)))
        width = int(self.length[rows].max()) if len(rows) else 0
        changed: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _EVENT:
                changed[field.name] = value[events]
            elif field.name in _GRID:
                changed[field.name] = None if value is None else value[rows, :width]
            elif isinstance(value, torch.Tensor):
                changed[field.name] = value[rows]
        changed["event"] = position[self.event[rows]]
        changed["event_ids"] = tuple(self.event_ids[i] for i in events.tolist())
        return replace(self, **changed)  # type: ignore[arg-type]

    def returns(self, gamma: float = 1.0) -> Tensor:
        """Return of each event's episode.

            R = sum_k gamma^k r_k        over the episode's events, k their step

        Returns:
            [E] float64, equal for the events of an episode; NaN where any of its rewards is.
        """
        discounted = self.reward * gamma ** self.step.to(torch.float64)
        total = torch.zeros(len(self.names["episode"]), dtype=torch.float64)
        return total.index_add(0, self.episode, discounted)[self.episode]


def _grids(events: Sequence[Event], members: Sequence[Member], owner: Sequence[int]) -> tuple[Tensor, ...]:
    """[M, T] ids, mask and sampler's log-probs, and [M] lengths."""
    known = [_has_ids(member) for member in members]
    prompts = [(m.output.prompt_ids or ()) if has else () for m, has in zip(members, known, strict=True)]
    outputs = [(m.output.output_ids or ()) if has else () for m, has in zip(members, known, strict=True)]
    logprobs = []
    for row, (member, output) in enumerate(zip(members, outputs, strict=True)):
        found = member.output.logprobs
        if found is None or not known[row]:
            found = (np.nan,) * len(output)
        if len(found) != len(output):
            raise _different_numbers(events[owner[row]], member)
        logprobs.append(found)
    start = np.fromiter(map(len, prompts), np.int64, len(prompts))
    length = start + np.fromiter(map(len, outputs), np.int64, len(outputs))
    column = np.arange(length.max(initial=0))
    present = column < length[:, None]
    mask = present & (column >= start[:, None])
    ids = np.zeros(mask.shape, np.int64)
    ids[present] = np.fromiter(chain.from_iterable(chain.from_iterable(zip(prompts, outputs, strict=True))), np.int64)
    grid = np.zeros(mask.shape, np.float32)
    grid[mask] = np.fromiter(chain.from_iterable(logprobs), np.float32)
    return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(grid), torch.from_numpy(length)


def _different_numbers(event: Event, member: Member) -> Exception:
    return Untrainable(
        f"event {event.id}, member {member.agent}[{member.index}]: {len(member.output.output_ids or ())} token ids and "
        f"{len(member.output.logprobs or ())} log-probs; each sampled token needs its own. Mend the backend that "
        "recorded it."
    )


def _has_ids(member: Member) -> bool:
    return member.output.prompt_ids is not None and member.output.output_ids is not None
