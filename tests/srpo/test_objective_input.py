"""Is a wrong setting or shape one clear line, and do the examples run?"""

import doctest
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo import divergence, objective, weights
from srpo_env.trainers.srpo.divergence import entropy_estimate, kl_per_token
from srpo_env.trainers.srpo.objective import (
    set_log_ratio,
)
from srpo_env.trainers.srpo.weights import count
from tests.srpo.loss_cases import (
    CLIP,
    HAND,
    NAN,
    Settings,
    loss_of,
)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"ratio_level": "sequence"}, "ratio_level: 'sequence' is not one of set, member"),
        ({"set_norm": "max"}, "set_norm: 'max' is not one of sqrt, sum, mean"),
        ({"ratio_level": "token", "set_norm": "max"}, "set_norm: 'max' is not one of"),
        ({"length_norm": "max"}, "length_norm: 'max' is not one of mean, sum"),
        ({"reduction": "batch"}, "reduction: 'batch' is not one of event, episode"),
        ({"clip_low": -0.1}, r"clip: \[-0.1, 0.2\] is not a range"),
        ({"clip_high": -0.1}, r"clip: \[0.2, -0.1\] is not a range"),
        ({"clip_high": NAN}, r"clip: \[0.2, nan\] is not a range"),
        ({"max_log_ratio": 0.0}, r"max_log_ratio: 0.0 is outside \(0, 80\]"),
        ({"max_log_ratio": 88.0}, r"max_log_ratio: 88.0 is outside \(0, 80\]"),
        ({"reduction": "constant"}, "constant_length: None"),
        ({"reduction": "constant", "constant_length": 0}, "constant_length: 0"),
        ({"reduction": "constant", "constant_length": math.inf}, "constant_length: inf"),
        ({"reduction": "episode", "episode": None}, "episode: None"),
        ({"ratio_level": "trajectory", "episode": None}, "episode: None"),
        ({"episode": torch.zeros(2)}, r"episode: shape \[2\] with 3 events"),
        ({"num_events": 3}, r"advantage: shape \[3\] with num_events=3 and 4 rows"),
        ({"advantage": torch.zeros(3, 1)}, r"advantage: shape \[3, 1\]"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(more: Settings, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        loss_of(HAND, {**CLIP, **more})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"old": HAND.old[:, :2]}, r"old_logprobs: shape \[4, 2\] beside log-probs of \[4, 3\]"),
        ({"mask": HAND.mask[:3]}, r"mask: shape \[3, 3\] beside log-probs of \[4, 3\]"),
        ({"event": HAND.event[:3]}, r"event: shape \[3\] beside a mask of \[4, 3\]"),
    ],
)
def test_a_wrong_shape_is_one_clear_line(more: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        loss_of(replace(HAND, **more), CLIP)


def test_log_probs_must_have_rows_and_columns() -> None:
    flat = torch.zeros(4)
    with pytest.raises(InvalidInput, match=r"mask: shape \[4\] beside log-probs of \[4\]"):
        entropy_estimate(flat, flat)
    with pytest.raises(InvalidInput, match=r"ref_logprobs: shape \[4\] beside log-probs of \[4\]"):
        kl_per_token(flat, flat, flat)
    with pytest.raises(InvalidInput, match=r"event: shape \[4\] beside a mask of \[4\]"):
        count(flat, flat.long(), flat)


def test_a_set_norm_is_checked_where_it_is_used() -> None:
    with pytest.raises(InvalidInput, match="set_norm"):
        set_log_ratio(torch.ones(1), torch.zeros(1).long(), torch.ones(1), "max")  # type: ignore[arg-type]


@pytest.mark.parametrize("module", [objective, weights, divergence])
def test_the_examples_in_the_docstrings_run(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
