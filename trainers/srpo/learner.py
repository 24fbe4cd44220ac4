"""One update from one batch of events, in optimiser steps that never split an event.

    1. all rows of the mini-batch, in micro-batches, without gradient -> leaf tensor new_logprobs [M, T]
    2. g = d loss(leaf) / d leaf
    3. rows again, in micro-batches of any cut, with gradient: logprobs(rows).backward(g[rows])

which is the gradient of the one-graph loss at the memory of one micro-batch, for any objective that is a function of
log-probs.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from srpo_env.batch import EventBatch
from srpo_env.config import PolicyTraining
from srpo_env.errors import InvalidInput, TrainingDiverged, Untrainable
from srpo_env.protocols import Trainable
from srpo_env.registry import load_reference
from srpo_env.trainers.srpo.advantages import advantages, count_groups
from srpo_env.trainers.srpo.batches import mini_batches
from srpo_env.trainers.srpo.config import PRESET_KEYS, SRPOConfig
from srpo_env.trainers.srpo.metrics import Step, batch_metrics, step_metrics
from srpo_env.trainers.srpo.objective import srpo_loss
from srpo_env.trainers.srpo.scoring import Scorer, as_grid

logger = logging.getLogger("srpo_env")


class SRPOLearner:
    """Learns from events by SRPO, or by a peer's rule on the same events.

    Args:
        config: Settings; `SRPOConfig(preset="srpo", clip=0.2, length_norm="sum")` is a start for short outputs.
        policies: The policies to train, by label, or the only one. Rows of other policies are frozen: they are no rows.
        training: How each is trained (learning rate, ...), by label, or the same for all.
        total_updates: Length of the run, for learning-rate schedules that fall.
        seed: Decides how events fall into mini-batches.

    Example:
        >>> import torch, srpo_env
        >>> from srpo_env.agents import LocalPolicy
        >>> policy = LocalPolicy("tiny_arithmetic")
        >>> log = srpo_env.rollout("tiny/parallel_proposers", policies=policy, episodes=16, group_size=8)
        >>> learner = SRPOLearner(SRPOConfig(clip=0.2, length_norm="sum"), policies=policy)
        >>> learner.update(log.batch())["event_completeness"]
        1.0
    """

    preset_keys = PRESET_KEYS

    def __init__(
        self,
        config: SRPOConfig,
        policies: Trainable | Mapping[str, Trainable],
        *,
        training: PolicyTraining | Mapping[str, PolicyTraining] | None = None,
        total_updates: int | None = None,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.policies = dict(policies) if isinstance(policies, Mapping) else {"main": policies}
        if not self.policies:
            raise InvalidInput(
                "policies is empty; the learner needs at least one to train: give a recipe's policy a `train` block."
            )
        given = training or PolicyTraining()
        self.training = dict(given) if isinstance(given, Mapping) else dict.fromkeys(self.policies, given)
        self.total_updates = total_updates
        self.updates = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._scorers: dict[str, Scorer] = {}
        self._optimisers: dict[str, torch.optim.Optimizer] = {}
        for label, policy in self.policies.items():
            how = self.training[label]
            policy.model.eval()  # dropout off: the ratio of unchanged weights is 1
            self._scorers[label] = Scorer(policy.model, config.micro_batch_tokens, how.autocast)
            self._optimisers[label] = torch.optim.AdamW(
                [each for each in policy.model.parameters() if each.requires_grad],
                lr=how.lr,
                betas=how.betas,
                eps=how.eps,
                weight_decay=how.weight_decay,
            )
        self._estimator = _own(config.estimator)
        self._objective = None if config.objective is None else load_reference(config.objective)

    @classmethod
    def settings(cls, values: Mapping[str, Any]) -> SRPOConfig:
        """Checks the `learner` section of a recipe; see `SRPOConfig`."""
        return SRPOConfig.checked(values)

    def update(self, batch: EventBatch) -> dict[str, float]:
        """Learns from a batch: `mini_batches` x `epochs` optimiser steps.

        Args:
            batch: Whole groups: the advantage of an episode is relative to the others of its task.

        Returns:
            The metrics of SRPO.md section 6, NaN where one does not apply.

        Raises:
            Untrainable: A row of a trained policy has no token ids, or was sampled in a way that log-probs can't match.
            TrainingDiverged: A loss or a gradient is not finite; names the events.
        """
        batch = self._trainable(batch)
        started = time.perf_counter()
        advantage = self._advantage(batch)
        recompute = self.config.old_logprobs == "recompute"
        fresh, entropy = self._fresh(batch, entropy=True) if recompute else (batch.sampler_logprobs, None)
        batch = replace(batch, old_logprobs=fresh)
        seconds_logprobs = time.perf_counter() - started
        steps: list[Step] = []
        for _ in range(self.config.epochs):
            for events in mini_batches(
                batch,
                self.config.mini_batches,
                self._generator,
                whole_episodes=self.config.ratio_level == "trajectory",
            ):
                steps.append(self._step(batch, events, advantage, on_policy=recompute and not steps))
        self.updates += 1
        for label, policy in self.policies.items():
            if any(label in step.grad_norm for step in steps):
                policy.load_weights(None, self.updates)
        count = count_groups(batch.returns(self.config.gamma), batch.group, episode=batch.episode)
        return {
            **step_metrics(steps, batch),
            **batch_metrics(batch, advantage, entropy),
            "groups_without_signal": count.groups_without_signal / max(count.groups, 1),
            "lr": self._lr(next(iter(self.policies)), self.updates - 1),
            "seconds_logprobs": seconds_logprobs + sum(step.seconds_logprobs for step in steps),
            "seconds_update": time.perf_counter() - started - seconds_logprobs - sum(s.seconds_logprobs for s in steps),
        }

    def _step(self, batch: EventBatch, events: Tensor, advantage: Tensor, *, on_policy: bool) -> Step:
        part = batch.select(events)
        rows = _rows_of(batch, events)
        advantage = (
            advantage[rows]
            if len(advantage) == batch.num_members and _per_member(batch, advantage)
            else advantage[events]
        )
        started = time.perf_counter()
        assert part.old_logprobs is not None
        new = part.old_logprobs if on_policy else self._fresh(part)[0]
        seconds_logprobs = time.perf_counter() - started
        leaf = new.clone().requires_grad_()
        loss, found = self._loss(leaf, part, advantage)
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        gradient = torch.zeros_like(leaf) if gradient is None else gradient
        if not (torch.isfinite(loss) and torch.isfinite(gradient).all()):
            bad = part.event[~torch.isfinite(gradient).all(1)].unique().tolist()
            names = ", ".join(part.event_ids[each] for each in bad[:8]) or "unknown"
            raise TrainingDiverged(
                f"update {self.updates + 1}: the loss is {float(loss.detach())} and its gradient is not finite for "
                f"events {names}; "
                "both must be. Look at these events in the log; a smaller learning rate or a narrower clip is the "
                "usual remedy."
            )
        norms = {
            label: norm for label in self.policies if (norm := self._descend(label, part, gradient, found)) is not None
        }
        return Step(
            batch=part,
            rows=rows,
            on_policy=on_policy,
            loss=float(loss.detach()),
            found=found,
            new_logprobs=new,
            grad_norm=norms,
            seconds_logprobs=seconds_logprobs,
        )

    def _loss(self, leaf: Tensor, part: EventBatch, advantage: Tensor) -> tuple[Tensor, Any]:
        """The loss as a function of log-probs, and what it found per unit (None for an own objective)."""
        if self._objective is not None:
            return self._objective(leaf, part, advantage), None
        config = self.config
        assert part.old_logprobs is not None
        needs_episode = config.ratio_level == "trajectory" or config.reduction == "episode"
        found = srpo_loss(
            leaf,
            part.old_logprobs,
            part.mask,
            part.event,
            advantage,
            clip_low=config.clip[0],
            clip_high=config.clip[1],
            set_norm=config.set_norm,
            length_norm=config.length_norm,
            ratio_level=config.ratio_level,
            reduction=config.reduction,
            constant_length=config.constant_length,
            episode=part.episode if needs_episode else None,
            num_events=part.num_events if len(advantage) == part.num_members else None,
            num_episodes=len(part.names["episode"]) if needs_episode else None,
        )
        return found.loss, found

    def _descend(self, label: str, part: EventBatch, gradient: Tensor, found: Any) -> float | None:
        """Back-propagates g through the rows of one policy and steps it; None where nothing would move it."""
        rows = self._rows(part, label)
        rows = rows[(gradient[rows] != 0).any(1)]
        if not len(rows):
            logger.warning("update %d: policy %r is not stepped: %s", self.updates + 1, label, _why(found))
            return None
        policy, how, optimiser = self.policies[label], self.training[label], self._optimisers[label]
        optimiser.zero_grad(set_to_none=True)
        for scored in self._scorers[label].score(part, rows):
            weights = gradient[scored.rows, : scored.logprobs.shape[1]]
            scored.logprobs.backward(weights.to(scored.logprobs))  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), how.grad_clip or math.inf)
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                f"update {self.updates + 1}: the gradient of policy {label!r} is {float(norm)}; it must be finite. "
                f"Its mini-batch held events {', '.join(part.event_ids[:8])}, ...; nothing was changed by it."
            )
        for group in optimiser.param_groups:
            group["lr"] = self._lr(label, self.updates)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return float(norm)

    @torch.no_grad()
    def _fresh(self, batch: EventBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor]:
        """[M, T] log-probs and entropies under the present weights; 0 for rows of frozen policies."""
        dtype = torch.float32
        parts = []
        for label, scorer in self._scorers.items():
            if scorer.model.dtype == torch.float64:
                dtype = torch.float64
            parts += list(scorer.score(batch, self._rows(batch, label), entropy=entropy))
        return as_grid(parts, batch.mask.shape, dtype)

    def _rows(self, batch: EventBatch, label: str) -> Tensor:
        if label not in batch.names["policy"]:
            return torch.zeros(0, dtype=torch.int64)
        mine = batch.policy == batch.names["policy"].index(label)
        return torch.nonzero(mine & batch.mask.any(1)).flatten()

    def _advantage(self, batch: EventBatch) -> Tensor:
        """[E], or [M] for estimators that compare members."""
        if self._estimator is not None:
            own: Tensor = self._estimator(batch)
            return own
        config, returns = self.config, batch.returns(self.config.gamma)
        method: Any = config.estimator
        if method in ("agent", "agent_turn"):
            of_row = batch.event
            return advantages(
                returns[of_row],
                batch.group[of_row],
                method,
                episode=batch.episode[of_row],
                agent=batch.agent,
                turn=batch.turn,
                ddof=config.ddof,
                eps=config.eps,
            )
        return advantages(
            returns,
            batch.group,
            method,
            episode=batch.episode,
            node=batch.node,
            visit=batch.visit,
            ddof=config.ddof,
            eps=config.eps,
        )

    def _trainable(self, batch: EventBatch) -> EventBatch:
        """The batch with the rows of frozen policies masked, once all others are known to be usable."""
        trained = torch.tensor([name in self.policies for name in batch.names["policy"]], dtype=torch.bool)
        mine = trained[batch.policy] if len(trained) else torch.zeros(0, dtype=torch.bool)
        needs_logprobs = self.config.old_logprobs == "sampler"
        rules = (
            (
                mine & ~batch.has_ids,
                "has no token ids; they come from the sampler and are never re-tokenised. Use a backend that gives "
                "them",
            ),
            (
                mine & ~batch.full_support,
                "was sampled with top_p or top_k; log-probs of the learner could not match. Sample with top_p 1 and "
                "top_k 0",
            ),
            (
                mine & (batch.temperature == 0),
                "was sampled at temperature 0, which has no ratio. Sample at a positive temperature",
            ),
            (
                mine & batch.sampler_logprobs.isnan().any(1) & needs_logprobs,
                "has no log-probs, which old_logprobs: sampler needs. Use old_logprobs: recompute",
            ),
            (
                mine & ~batch.processed & (batch.temperature != 1) & needs_logprobs,
                "has log-probs from before the temperature. Use old_logprobs: recompute, or a server that gives "
                "processed ones",
            ),
        )
        for broken, rule in rules:
            if broken.any():
                row = int(torch.nonzero(broken)[0])
                event = batch.event_ids[int(batch.event[row])]
                agent = batch.names["agent"][int(batch.agent[row])]
                raise Untrainable(f"event {event}: the output of {agent}[{int(batch.index[row])}] {rule}.")
        return replace(batch, mask=batch.mask & mine.unsqueeze(1))

    def _lr(self, label: str, update: int) -> float:
        how = self.training[label]
        rise = min(1.0, (update + 1) / how.warmup_updates) if how.warmup_updates else 1.0
        done = min(1.0, update / max(1, (self.total_updates or 1) - 1))
        fall = {
            "constant": 1.0,
            "linear": 1 - (1 - how.final_lr) * done,
            "cosine": how.final_lr + (1 - how.final_lr) * (1 + math.cos(math.pi * done)) / 2,
        }[how.schedule if self.total_updates else "constant"]
        return how.lr * rise * fall

    def save(self, folder: Path) -> None:
        """Writes each policy as a transformers folder, and beside them optimisers, randomness and counter."""
        for label, policy in self.policies.items():
            policy.model.save_pretrained(folder / label)
            policy.tokenizer.save_pretrained(folder / label)
        state = {
            "optimisers": {label: optimiser.state_dict() for label, optimiser in self._optimisers.items()},
            "generator": self._generator.get_state(),
        }
        torch.save(state, folder / "trainer.pt")
        (folder / "trainer.json").write_text(json.dumps({"updates": self.updates}), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Takes up what `save` wrote; weights, optimisers, randomness and counter."""
        state = torch.load(folder / "trainer.pt", weights_only=True)
        self.updates = int(json.loads((folder / "trainer.json").read_text(encoding="utf-8"))["updates"])
        for label, policy in self.policies.items():
            policy.load_weights(folder / label, self.updates)
            self._optimisers[label].load_state_dict(state["optimisers"][label])
        self._generator.set_state(state["generator"])


def _own(estimator: str) -> Callable[[EventBatch], Tensor] | None:
    return load_reference(estimator) if ":" in estimator else None


def _per_member(batch: EventBatch, advantage: Tensor) -> bool:
    return batch.num_members != batch.num_events and len(advantage) == batch.num_members


def _rows_of(batch: EventBatch, events: Tensor) -> Tensor:
    """[m] the rows of these events, in the order in which `EventBatch.select` lays them out."""
    position = torch.full((batch.num_events,), -1, dtype=torch.int64)
    position[events] = torch.arange(len(events))
    rows = torch.nonzero(position[batch.event] >= 0).flatten()
    return rows[torch.argsort(position[batch.event[rows]], stable=True)]


def _why(found: Any) -> str:
    if found is None:
        return "the objective's gradient is 0 everywhere"
    if not bool(found.counted.any()):
        return "no event counts (none is scored and has a sampled token)"
    if not bool((found.advantage[found.counted] != 0).any()):
        return "every advantage is 0 (all episodes of each group have the same return)"
    return "all its units are clipped"
