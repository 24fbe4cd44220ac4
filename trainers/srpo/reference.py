"""Which weights is a policy held close to? Those that training began from."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping

from srpo_env.trainers.srpo.scoring import Scorer


class Reference:
    """The weights that training began from: a frozen copy of each model, or the model without its LoRA.

    A learner that resumes must be made from the weights that training began from, and take up its checkpoint then.

    Args:
        scorers: Those of the policies, by label, before the first update.
    """

    def __init__(self, scorers: Mapping[str, Scorer]) -> None:
        self._scorers = {label: _frozen(scorer) for label, scorer in scorers.items()}

    @contextlib.contextmanager
    def scorers(self) -> Iterator[Mapping[str, Scorer]]:
        """Gives scorers of the reference; inside, a LoRA is off."""
        with contextlib.ExitStack() as stack:
            for scorer in self._scorers.values():
                if _has_lora(scorer):
                    stack.enter_context(scorer.model.disable_adapter())  # type: ignore[operator]
            yield self._scorers


def _frozen(scorer: Scorer) -> Scorer:
    if _has_lora(scorer):
        return scorer
    frozen = copy.copy(scorer)
    frozen.model = copy.deepcopy(scorer.model).requires_grad_(False).eval()
    return frozen


def _has_lora(scorer: Scorer) -> bool:
    """Whether the model is peft's, whose base holds the weights that training began from."""
    return hasattr(scorer.model, "disable_adapter")
