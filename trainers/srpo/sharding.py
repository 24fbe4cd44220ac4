"""How does a policy train whose optimiser is too large for a device? Its weights lie in shards over ranks (FSDP2).

The policy keeps a whole copy on the rank that samples, and gets the new weights after each update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from srpo_env.adapters import adapter_weights, has_adapter, transformer
from srpo_env.batch import EventBatch
from srpo_env.token_trie import can_share
from srpo_env.trainers.srpo.pieces import distinct
from srpo_env.trainers.srpo.ranks import Ranks
from srpo_env.trainers.srpo.scoring import Scored, Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class ShardedScorer(Scorer):
    """Scores the rows of one policy with a sharded copy of its model, which is the one that is trained.

    Every rank takes part in every pass of every other: each makes as many as the one with the most micro-batches, the
    last ones with weight zero.

    Args:
        model: The policy's; it is copied.
        micro_batch_tokens: See `Scorer`.
        autocast: See `Scorer`.
        ranks: Those that hold the shards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        micro_batch_tokens: int,
        autocast: Literal["bfloat16"] | None,
        ranks: Ranks,
    ) -> None:
        self._copy = copy.deepcopy(model).eval()  # what is tried below tells nothing with dropout
        super().__init__(transformer(self._copy), micro_batch_tokens, autocast)
        self._ranks = ranks
        # While the weights are whole: later, each rank would try these at a time of its own.
        self._plain_head = self._head_is_plain(torch.zeros(1, 2, dtype=torch.int64))
        self._shares = self._plain_head and can_share(self.model)
        self._root = _Root(self._copy)
        mesh = init_device_mesh(self.model.device.type, (ranks.world,))
        layers = set(self.model._no_split_modules or ())  # noqa: SLF001 (what accelerate goes by, too)
        for module in [each for each in self.model.modules() if type(each).__name__ in layers]:
            fully_shard(module, mesh=mesh)
        fully_shard(self._root, mesh=mesh)
        for each in self._root.modules():
            if isinstance(each, FSDPModule):
                each.set_gradient_divide_factor(1.0)  # counts are global: gradients add up
                each.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def score(self, batch: EventBatch, rows: Tensor, *, entropy: bool = False) -> Iterator[Scored]:
        """Scores this rank's rows; then takes part in what others still score."""
        number = len(self.pieces(batch, distinct(batch, rows)[0]))
        idle = self._ranks.most(number) - number  # asked first: in their passes the ranks wait for each other
        yield from super().score(batch, rows, entropy=entropy)
        for _ in range(idle):
            none = self._root(self._nothing)
            yield Scored(rows[:0], none, none.detach() if entropy else None)

    def weights(self) -> dict[str, Tensor] | None:
        """The whole weights, or the adapter's, for the first rank; all must ask."""
        state: dict[str, Any] = get_model_state_dict(self._copy, options=_WHOLE)
        if not self._ranks.leads:
            return None
        return adapter_weights(self._copy, state) if has_adapter(self._copy) else state

    def take(self, model: PreTrainedModel) -> None:
        """Copies the weights of the policy's model into the shards."""
        set_model_state_dict(self._copy, model.state_dict(), options=StateDictOptions(full_state_dict=True))

    def _score(self, batch: EventBatch, rows: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        scored: tuple[Tensor, Tensor | None] = self._root(
            lambda: super(ShardedScorer, self)._score(batch, rows, entropy)
        )
        return scored

    def _nothing(self) -> Tensor:
        """[0, 1] log-probs that hang on a pass of one token."""
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits[:0, :1]


class _Root(nn.Module):
    """Runs a function while the weights outside the layers are whole: the head is used without the model's forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()
