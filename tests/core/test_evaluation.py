"""Are the figures of an evaluation those that a hand gets?"""

import math
from collections.abc import Callable
from typing import Any

import pytest

from srpo_env.evaluation import SetResult, interval_of, macro, result_of, scores_by_task
from srpo_env.records import Event, ToolCall

Make = Callable[..., Any]


@pytest.fixture
def episode(event: Make) -> Callable[..., list[Event]]:
    def episode(task: str, reward: float | None, **values: Any) -> list[Event]:
        return [event(task=task, terminated=False, reward=0.0), event(task=task, step=1, reward=reward, **values)]

    return episode


def test_accuracy_is_the_mean_over_tasks_of_their_mean(episode: Make) -> None:
    found = result_of([episode("a", 1.0), episode("a", 0.0), episode("a", 0.0), episode("b", 1.0)])
    assert found.accuracy == pytest.approx((1 / 3 + 1) / 2)
    assert (found.tasks, found.samples) == (2, 3)


def test_an_unscored_episode_is_in_no_mean_and_is_counted(episode: Make) -> None:
    found = result_of([episode("a", 1.0), episode("a", None), episode("b", None)])
    assert (found.accuracy, found.unscored, found.tasks) == (1.0, 2, 2)


def test_without_a_scored_episode_there_is_no_accuracy(episode: Make) -> None:
    found = result_of([episode("a", None)])
    assert (found.accuracy, found.interval, str(found)) == (None, None, "not scored")


def test_nothing_evaluated_is_nothing() -> None:
    assert result_of([[], []]) == SetResult(tasks=0, samples=0, accuracy=None, interval=None)


def test_costs_are_added_up_over_all_events(event: Make, member: Make) -> None:
    call = ToolCall(tool="x", arguments={}, result="", seconds=0.25)
    costly = member(output_ids=(1, 2, 3), seconds=2.0, tool_calls=(call, call))
    cheap = member(output_ids=None, seconds=1.0)
    found = result_of([[event([costly, cheap], terminated=False), event([costly], step=1, truncated=True)]])
    assert (found.output_tokens, found.tool_calls, found.truncated) == (6, 4, 1)
    assert (found.model_seconds, found.tool_seconds) == (5.0, 1.0)


def test_members_are_the_mean_over_episodes_of_all_their_sets(event: Make, member: Make) -> None:
    """Sets of 1 and 5 in one episode, of 1 and 1 in the other: (6 + 2) / 2."""
    episodes = [
        [event(terminated=False, episode=name), event([member()] * size, episode=name, step=1)]
        for name, size in (("a", 5), ("b", 1))
    ]
    assert result_of(episodes).members == 4.0


def test_scores_of_a_task_are_averaged_and_unscored_ones_left_out(episode: Make) -> None:
    episodes = [episode("a", 1.0), episode("a", 0.0), episode("b", None), episode("c", 0.25), episode("c", None)]
    assert scores_by_task(episodes) == {"a": 0.5, "c": 0.25}


def test_one_right_or_wrong_episode_per_task_gives_wilsons_interval() -> None:
    """8 of 10: centre (8 + z^2/2) / (10 + z^2), half width z sqrt(10 p q + z^2/4) / (10 + z^2) with z = 1.96."""
    z = 1.959964
    centre, half = (8 + z * z / 2) / (10 + z * z), z * math.sqrt(10 * 0.8 * 0.2 + z * z / 4) / (10 + z * z)
    assert interval_of([[1.0]] * 8 + [[0.0]] * 2) == pytest.approx((centre - half, centre + half), abs=1e-6)


def test_no_right_answer_still_leaves_room_above() -> None:
    low, high = interval_of([[0.0]] * 20)
    assert low == 0.0
    assert 0.1 < high < 0.2


def test_several_episodes_per_task_give_an_interval_around_the_mean_of_tasks() -> None:
    low, high = interval_of([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]] * 10)
    assert low < 0.5 < high
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(0.125 / 40), rel=0.15)


def test_tasks_that_all_score_the_same_give_a_point() -> None:
    assert interval_of([[0.5, 0.5]] * 4) == (0.5, 0.5)


def test_a_bootstrap_gives_the_same_interval_each_time() -> None:
    scores = [[i / 7, 0.3] for i in range(7)]
    assert interval_of(scores) == interval_of(scores)


def result(accuracy: float | None, half: float = 0.1, **values: Any) -> SetResult:
    interval = None if accuracy is None else (accuracy - half, accuracy + half)
    return SetResult(**({"tasks": 4, "samples": 1} | values), accuracy=accuracy, interval=interval)


def test_the_macro_mean_counts_each_set_once() -> None:
    found = macro([result(0.2, half=0.03, tasks=1000), result(0.8, half=0.04, tasks=10)])
    assert found.accuracy == pytest.approx(0.5)
    assert found.interval == pytest.approx((0.475, 0.525))  # sqrt(0.03^2 + 0.04^2) / 2 = 0.025
    assert found.tasks == 1010


def test_the_macro_of_one_set_has_its_interval() -> None:
    assert macro([SetResult(tasks=1, samples=1, accuracy=0.1, interval=(0.0, 0.5))]).interval == (0.0, 0.5)


def test_a_set_that_was_not_scored_is_in_no_macro_mean() -> None:
    assert macro([result(0.25), result(None, unscored=4)]).accuracy == 0.25


def test_the_macro_adds_costs_up() -> None:
    found = macro([result(0.1, output_tokens=3, model_seconds=0.5), result(0.1, output_tokens=4, unscored=2)])
    assert (found.output_tokens, found.model_seconds, found.unscored) == (7, 0.5, 2)


def test_the_macro_takes_the_mean_of_members() -> None:
    assert macro([result(0.1, members=2.0, tasks=100), result(None, members=5.0)]).members == 3.5


def test_a_result_reads_as_accuracy_and_interval() -> None:
    assert str(result(0.5)) == "0.500 [0.400, 0.600]"
