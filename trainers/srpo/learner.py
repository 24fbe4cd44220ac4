"""One update from one batch of events, in optimiser steps that never split an event.

    1. all rows of the mini-batch, in micro-batches, without gradient -> leaf tensor new_logprobs [M, T]
    2. g = d loss(leaf) / d leaf
    3. rows again, in micro-batches of any cut, with gradient: logprobs(rows).backward(g[rows])

which is the gradient of the one-graph loss at the memory of one micro-batch, for any objective that is a function of
log-probs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from srpo_env.adapters import transformer
from srpo_env.batch import EventBatch
from srpo_env.config import PolicyTraining
from srpo_env.errors import InvalidInput, TrainingDiverged
from srpo_env.protocols import Trainable
from srpo_env.trainers.srpo import checkpoint
from srpo_env.trainers.srpo.admission import admit
from srpo_env.trainers.srpo.batch_advantage import Estimate, estimate, signal
from srpo_env.trainers.srpo.batches import mini_batches
from srpo_env.trainers.srpo.config import PRESET_KEYS, SRPOConfig
from srpo_env.trainers.srpo.gradients import back_propagate, norms_by_set_size, trained
from srpo_env.trainers.srpo.metrics import Step, batch_metrics, step_metrics
from srpo_env.trainers.srpo.mini_batch_loss import mini_batch_loss
from srpo_env.trainers.srpo.own import load_own
from srpo_env.trainers.srpo.ranks import ranks_of_this_job
from srpo_env.trainers.srpo.reference import checksums, reference_scorers
from srpo_env.trainers.srpo.schedule import learning_rate
from srpo_env.trainers.srpo.scoring import Scorer, as_grid
from srpo_env.trainers.srpo.watch import Watch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        self.ranks = ranks_of_this_job()
        self.policies = dict(policies) if isinstance(policies, Mapping) else {"main": policies}
        given = training or PolicyTraining()
        self.training = dict(given) if isinstance(given, Mapping) else dict.fromkeys(self.policies, given)
        self._check_policies()
        self.total_updates = total_updates
        self.updates = 0
        self._versions = dict.fromkeys(self.policies, 0)
        self._generator = torch.Generator().manual_seed(seed)
        self._watch = Watch(config.length_norm)
        self._estimator = self._objective = None
        if config.own_estimator:
            self._estimator = load_own("estimator", config.estimator, config.estimator_settings, "batch")
        if config.objective is not None:
            arguments = ("new_logprobs", "batch", "advantage")
            self._objective = load_own("objective", config.objective, config.objective_settings, *arguments)
        self._scorers: dict[str, Scorer] = {}
        self._optimisers: dict[str, torch.optim.Optimizer] = {}
        for label, policy in self.policies.items():
            how = self.training[label]
            self._scorers[label] = self._scorer(label, policy.model)
            self._optimisers[label] = torch.optim.AdamW(
                trained(self._scorers[label].model),
                lr=how.lr,
                betas=how.betas,
                eps=how.eps,
                weight_decay=how.weight_decay,
                fused=True,  # the plain one copies each weight twice in a step
            )
        self._reference = reference_scorers(self.policies, self._scorer) if config.kl_coefficient else None
        self._checksums = checksums(self.policies) if config.kl_coefficient else {}

    @classmethod
    def settings(cls, values: Mapping[str, Any]) -> SRPOConfig:
        """Checks the `learner` section of a recipe; see `SRPOConfig`."""
        return SRPOConfig.checked(values)

    @classmethod
    def memory(cls, settings: SRPOConfig, model: PreTrainedModel, training: PolicyTraining) -> dict[str, int]:
        """Says how much memory a policy's learning takes; see `srpo_env.trainers.srpo.memory`."""
        from srpo_env.trainers.srpo.memory import learner_memory

        return learner_memory(model, settings, training)

    def update(self, batch: EventBatch) -> dict[str, float]:
        """Learns from a batch: `mini_batches` x `epochs` optimiser steps.

        Args:
            batch: Whole groups: the advantage of an episode is relative to the others of its task.

        Returns:
            The metrics of SRPO.md section 6, NaN where one does not apply.

        Raises:
            Untrainable: A row of a trained policy has no token ids, or was sampled in a way that log-probs can't match.
            InvalidInput: The estimator's advantages don't fit the level's units, or an own one's are none.
            TrainingDiverged: A loss or a gradient is not finite; names the events. The step that would have followed
                from it is not taken.
        """
        self.ranks.tell("update", batch)
        started = time.perf_counter()
        config, sampled = self.config, batch
        recompute = config.old_logprobs == "recompute"
        batch = admit(
            batch,
            self.policies,
            needs_logprobs=not recompute or config.tis_cap is not None,
            needs_whole_episodes=config.ratio_level == "trajectory",
        )
        estimated = estimate(batch, config, self._estimator)
        for scorer in self._scorers.values():
            scorer.model.eval()  # dropout off: the ratio of unchanged weights is 1
        fresh, entropy = self._fresh(batch, entropy=True) if recompute else (batch.sampler_logprobs, None)
        batch = replace(batch, old_logprobs=fresh)
        if self._reference is not None:
            batch = replace(batch, ref_logprobs=self._fresh(batch, scorers=self._reference)[0])
        seconds_logprobs = time.perf_counter() - started
        steps: list[Step] = []
        for _ in range(config.epochs):
            whole_episodes = config.ratio_level == "trajectory"
            for events in mini_batches(batch, config.mini_batches, self._generator, whole_episodes=whole_episodes):
                changed = any(step.grad_norm for step in steps)
                steps.append(self._step(batch, events, estimated, on_policy=recompute and not changed))
        lr = {label: self._lr(label) for label in self.policies}
        self.updates += 1
        for label in {label: None for step in steps for label in step.grad_norm}:
            self._versions[label] += 1
            weights = self._scorers[label].weights()
            if self.ranks.leads:  # the one that samples
                self.policies[label].load_weights(weights, self._versions[label])
        metrics = {
            **step_metrics(steps, batch, config),
            **batch_metrics(batch, sampled, estimated.by_row(batch), entropy, signal(batch, config), config),
            **{"lr" if len(lr) == 1 else f"lr/policy={label}": rate for label, rate in lr.items()},
        }
        self._watch.see(self.updates, metrics)
        seconds_logprobs += sum(step.seconds_logprobs for step in steps)
        return metrics | {
            "seconds_logprobs": seconds_logprobs,
            "seconds_update": time.perf_counter() - started - seconds_logprobs,
        }

    def save(self, folder: Path) -> None:
        """Writes each policy's model, or its adapter, and beside them optimisers, randomness and counters."""
        if self.ranks.sharded:
            self.ranks.tell("save", folder)
        state = {
            "updates": self.updates,
            "versions": self._versions,
            "optimisers": {label: checkpoint.whole_state(optimiser) for label, optimiser in self._optimisers.items()},
            "generator": self._generator.get_state(),
            "watch": self._watch.state(),
            "references": self._checksums,
        }
        if self.ranks.leads:
            checkpoint.save(folder, self.policies, state)

    def load(self, folder: Path) -> None:
        """Takes up what `save` wrote: weights, optimisers, randomness and counters.

        Raises:
            InvalidInput: The folder is not a checkpoint of these policies, or of others that KL is to; nothing changed.
        """
        self.ranks.tell("load", folder)
        state = checkpoint.read_state(folder, self.policies, self._checksums)
        self.updates, self._versions = state["updates"], dict(state["versions"])
        for label, policy in self.policies.items():
            policy.load_weights(folder / label, self._versions[label])
            self._scorers[label].take(policy.model)
            checkpoint.load_state(self._optimisers[label], state["optimisers"][label])
        self._generator.set_state(state["generator"])
        self._watch.restore(state.get("watch", {}))  # 0.1.0 wrote none

    def _step(self, batch: EventBatch, events: Tensor, estimated: Estimate, *, on_policy: bool) -> Step:
        part, rows = batch.select(events), batch.rows_of(events)
        mine = Estimate(estimated.advantage[rows if estimated.per_member else events], estimated.per_member)
        assert part.old_logprobs is not None
        started = time.perf_counter()
        skip = on_policy and self.config.tis_cap is None
        new = part.old_logprobs if skip else self._fresh(part)[0]
        seconds_logprobs = time.perf_counter() - started
        leaf = new.clone().requires_grad_()
        loss, found = mini_batch_loss(leaf, part, mine, self.config, self._objective)
        gradient = self._gradient(loss, leaf, part)
        norms, norms_by_size = {}, self._norms_by_size(part, gradient)
        for label in self.policies:
            norm = self._backward(label, part, gradient, mine)
            if norm is not None:
                norms[label] = norm
        for label in norms:  # once all gradients are known to be finite
            for group in self._optimisers[label].param_groups:
                group["lr"] = self._lr(label)
            self._optimisers[label].step()
            self._optimisers[label].zero_grad(set_to_none=True)
        return Step(
            batch=part,
            rows=rows,
            on_policy=on_policy,
            loss=float(loss.detach()),
            found=found,
            new_logprobs=new,
            grad_norm=norms,
            grad_norm_by_size=norms_by_size,
            seconds_logprobs=seconds_logprobs,
        )

    def _gradient(self, loss: Tensor, leaf: Tensor, part: EventBatch) -> Tensor:
        """The derivative of the loss by the leaf, [M, T]; refuses what is not finite."""
        gradient = torch.zeros_like(leaf)
        if loss.requires_grad:
            (found,) = torch.autograd.grad(loss, leaf, allow_unused=True)
            gradient = gradient if found is None else found
        unsound = ~(torch.isfinite(gradient) & (torch.isfinite(leaf.detach()) | ~part.mask)).all(1)
        if not torch.isfinite(loss) or unsound.any():
            rows = unsound if unsound.any() else part.mask.any(1)
            raise TrainingDiverged(
                f"update {self.updates + 1}: the loss is {float(loss.detach())}, and it or its gradient is not finite "
                f"for {_named(part, part.event[rows])}. Look at these events in the log; a smaller learning rate or a "
                "narrower clip is the usual remedy."
            )
        return gradient

    def _backward(self, label: str, part: EventBatch, gradient: Tensor, estimated: Estimate) -> float | None:
        """Back-propagates g through one policy's rows and clips the sum; its norm, or None where nothing moves it."""
        mine = self._rows(part, label)
        rows = mine[(gradient[mine] != 0).any(1)]
        if not len(rows):
            why = _why(estimated.by_row(part)[mine], own=self._objective is not None)
            events = part.event if not len(mine) else part.event[mine]
            logger.warning(
                "update %d: policy %r is not stepped: %s (%s)", self.updates + 1, label, why, _named(part, events)
            )
            return None
        clip = self.training[label].grad_clip or math.inf
        norm = back_propagate(self._scorers[label], self.ranks, part, rows, gradient, clip)
        if not math.isfinite(norm):
            raise TrainingDiverged(
                f"update {self.updates + 1}: the gradient of policy {label!r} has the norm {norm}; it must be finite. "
                f"It came from {_named(part, part.event[rows])}; nothing was changed by it."
            )
        return norm

    def _norms_by_size(self, part: EventBatch, gradient: Tensor) -> dict[int, float]:
        every = self.config.grad_norm_by_k_every
        if every is None or (self.updates + 1) % every:
            return {}
        rows = {label: self._rows(part, label) for label in self.policies}
        return norms_by_set_size(self._scorers, self.ranks, rows, part, gradient)

    @torch.no_grad()
    def _fresh(
        self, batch: EventBatch, *, entropy: bool = False, scorers: Mapping[str, Scorer] | None = None
    ) -> tuple[Tensor, Tensor]:
        """[M, T] log-probs and entropies under the present weights, or other scorers'; 0 in rows of frozen policies."""
        exact = any(scorer.model.dtype == torch.float64 for scorer in self._scorers.values())
        parts = (
            part
            for label, scorer in (scorers or self._scorers).items()
            for part in scorer.score(batch, self.ranks.share(batch, self._rows(batch, label)), entropy=entropy)
        )
        grids = as_grid(parts, batch.mask.shape, torch.float64 if exact else torch.float32)
        return self.ranks.total(grids[0]), self.ranks.total(grids[1]) if entropy else grids[1]

    def _rows(self, batch: EventBatch, label: str) -> Tensor:
        """Rows of a policy that have a sampled token."""
        if label not in batch.names["policy"]:
            return torch.zeros(0, dtype=torch.int64)
        mine = batch.policy == batch.names["policy"].index(label)
        return torch.nonzero(mine & batch.mask.any(1)).flatten()

    def _lr(self, label: str) -> float:
        return learning_rate(self.training[label], self.updates, self.total_updates)

    def _scorer(self, label: str, model: PreTrainedModel) -> Scorer:
        tokens, autocast = self.config.micro_batch_tokens, self.training[label].autocast
        if not self.ranks.sharded:
            return Scorer(transformer(model), tokens, autocast)
        from srpo_env.trainers.srpo.sharding import ShardedScorer  # takes seconds

        return ShardedScorer(model, tokens, autocast, self.ranks)

    def _check_policies(self) -> None:
        if not self.policies:
            raise InvalidInput(
                "policies is empty; the learner needs at least one to train: give a recipe's policy a `train` block."
            )
        for label in self.policies:
            if label not in self.training:
                raise InvalidInput(f"training: policy {label!r} has no settings; give a PolicyTraining for it.")
        changed = {label: trained(policy.model) for label, policy in self.policies.items()}
        for label, parameters in changed.items():
            if not parameters:
                raise InvalidInput(
                    f"policies.{label}: none of its parameters can be trained; give its `train` block a `lora`, or a "
                    "model whose parameters require a gradient."
                )
        if len({id(each) for parameters in changed.values() for each in parameters}) < sum(map(len, changed.values())):
            raise InvalidInput(
                f"policies: some of {', '.join(self.policies)} are one model, which would be stepped twice; give it "
                "one label, and let its agents share that, or give each a `lora` of its own."
            )


def _named(batch: EventBatch, events: Tensor) -> str:
    """The first ids of some events, for messages."""
    ids = [batch.event_ids[each] for each in events.unique().tolist()]
    return f"event{'s' * (len(ids) != 1)} {', '.join(ids[:8]) or 'none'}{', ...' * (len(ids) > 8)}"


def _why(advantage: Tensor, *, own: bool) -> str:
    """Why the gradient of a policy's rows is 0, from their advantages."""
    if not len(advantage):
        return "no event counts, since it sampled none of their tokens"
    if bool(advantage.isnan().all()):
        return "no event counts, since none is scored"
    if own:
        return "the objective's gradient is 0"
    if not bool((advantage.nan_to_num() != 0).any()):
        return "every advantage is 0, since the returns of each group are equal"
    return "all units with an advantage are clipped"
