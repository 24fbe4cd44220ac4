"""Is a collapse told of when it happens, once, and not before?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from srpo_env.config import PolicyTraining
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.watch import Watch
from tests.srpo.learning import learner_of


def warnings_at(caplog: pytest.LogCaptureFixture, metric: str, values: Sequence[float]) -> list[int]:
    """Updates at which something was told."""
    watch, told = Watch("sum"), []
    with caplog.at_level(logging.WARNING, logger="srpo_env"):
        for update, value in enumerate(values, start=1):
            caplog.clear()
            watch.see(update, {metric: value})
            told += [update] * len(caplog.records)
    return told


@pytest.mark.parametrize(
    ("metric", "values", "updates"),
    [
        ("clip_fraction_off_policy", [0.0] * 25, [10, 20]),
        ("clip_fraction_off_policy", [0.0] * 9 + [0.01] + [0.0] * 9, []),
        ("clip_fraction_off_policy", [0.5] + [0.6] * 12, [2, 12]),
        ("grad_norm_max", [1.0] * 9 + [11.0], []),
        ("grad_norm_max", [1.0] * 10 + [10.0, 10.1, 10.1], [12]),
        ("grad_norm_max", [1.0] * 10 + [10.1] * 11, [11]),
        ("grad_norm_max", [0.1] * 40 + [1.0] * 32 + [5.0], []),
        ("parse_failure_rate/agent=solver", [0.1] * 10 + [0.2] * 10, []),
        ("parse_failure_rate/agent=solver", [0.1] * 10 + [0.2] * 9 + [0.3], [20]),
        ("parse_failure_rate/agent=solver", [0.9] * 10 + [0.1] * 20, []),
        ("parse_failure_rate/agent=solver", [0.0] * 15 + [1.0] * 25, [20, 30]),
        ("groups_without_signal", [1.0] * 25, [10, 20]),
        ("groups_without_signal", [1.0] * 9 + [0.99] + [1.0] * 9, []),
    ],
)
def test_it_is_told_of_at_these_updates(
    caplog: pytest.LogCaptureFixture, metric: str, values: list[float], updates: list[int]
) -> None:
    assert warnings_at(caplog, metric, values) == updates


@pytest.mark.parametrize(
    "metric",
    ["clip_fraction_off_policy", "grad_norm_max", "parse_failure_rate/agent=solver", "groups_without_signal"],
)
def test_a_figure_that_does_not_apply_says_nothing(caplog: pytest.LogCaptureFixture, metric: str) -> None:
    assert warnings_at(caplog, metric, [float("nan")] * 40) == []


def test_each_agent_is_compared_with_itself(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch("sum")
    for update in range(1, 21):
        watch.see(
            update, {"parse_failure_rate/agent=a": 0.0, "parse_failure_rate/agent=b": 0.9 if update > 10 else 0.5}
        )
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == ["b"]


def test_what_was_seen_goes_on_after_a_restart(caplog: pytest.LogCaptureFixture) -> None:
    seen = {
        "clip_fraction_off_policy": 0.0,
        "grad_norm_max": 1.0,
        "parse_failure_rate/agent=a": 0.0,
        "groups_without_signal": 1.0,
    }
    first, second = Watch("sum"), Watch("sum")
    for update in range(1, 10):
        first.see(update, seen)
    second.restore(first.state())
    assert not caplog.records
    second.see(10, seen)
    assert len(caplog.records) == 2  # ten updates without a clip and without a signal
    second.see(11, {"grad_norm_max": 100.0})
    assert len(caplog.records) == 3


# -------------------------------------------------------------------------------- what the clip does


def test_a_clip_that_never_binds_is_told_of_after_ten_updates(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=9.0), training=PolicyTraining(lr=1e-9))
    batch = make.batch(3, groups=1)
    for _ in range(9):
        learner.update(batch)
    assert "clip" not in caplog.text
    learner.update(batch)
    assert "update 10: the clip has not bound for 10 updates" in caplog.text


def test_a_clip_that_binds_for_most_is_told_of_once_in_ten_updates(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=0.0, epochs=8), training=PolicyTraining(lr=1e-2))
    for _ in range(3):
        learner.update(make.batch(3))
    assert caplog.text.count("update 1: the clip binds for") == 1
    assert caplog.text.count("the clip binds for") == 1


def test_steps_with_unchanged_weights_say_nothing_of_the_clip(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    learner = learner_of(make.policy(make.gpt2()), SRPOConfig(clip=9.0, mini_batches=1))
    for _ in range(11):
        learner.update(make.batch(3, groups=1, size=2))
    assert "clip" not in caplog.text
