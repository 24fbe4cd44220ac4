"""Are the figures of an evaluation those that a hand gets?"""

import math
from collections.abc import Callable
from typing import Any

import pytest

from srpo_env.evaluation import EvalResult, SetResult, interval_of, macro, result_of, scores_by_task
from srpo_env.records import Event, ToolCall

Make = Callable[..., Any]


@pytest.fixture
def episode(event: Make) -> Callable[..., list[Event]]:
    def episode(task: str, reward: float | None, **values: Any) -> list[Event]:
        return [event(task=task, terminated=False, reward=0.0), event(task=task, step=1, reward=reward, **values)]

    return episode


def test_accuracy_is_the_mean_over_tasks_of_their_mean(episode: Make) -> None:
    found = result_of([episode("a", 1.0), episode("a", 0.0), episode("a", 0.0), episode("b", 1.0)])
    assert found.avg_at_k == pytest.approx((1 / 3 + 1) / 2)
    assert (found.tasks, found.samples) == (2, 3)


def test_an_unscored_episode_is_in_no_mean_and_is_counted(episode: Make) -> None:
    found = result_of([episode("a", 1.0), episode("a", None), episode("b", None)])
    assert (found.avg_at_k, found.unscored, found.tasks) == (1.0, 2, 2)


def test_without_a_scored_episode_there_is_no_accuracy(episode: Make) -> None:
    found = result_of([episode("a", None)])
    assert (found.avg_at_k, found.avg_at_k_interval, str(found)) == (None, None, "not scored")


def test_nothing_evaluated_is_nothing() -> None:
    assert result_of([[], []]) == SetResult(tasks=0, samples=0, avg_at_k=None, avg_at_k_interval=None)


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
    return SetResult(**({"tasks": 4, "samples": 1} | values), avg_at_k=accuracy, avg_at_k_interval=interval)


def macro_of(*results: SetResult) -> SetResult:
    return macro({f"set {number}": each for number, each in enumerate(results)})


def test_the_macro_mean_counts_each_set_once() -> None:
    found = macro_of(result(0.2, half=0.03, tasks=1000), result(0.8, half=0.04, tasks=10))
    assert found.avg_at_k == pytest.approx(0.5)
    assert found.avg_at_k_interval == pytest.approx((0.475, 0.525))  # sqrt(0.03^2 + 0.04^2) / 2 = 0.025
    assert found.tasks == 1010


def test_the_macro_interval_keeps_each_side_of_lopsided_ones() -> None:
    sets = [SetResult(tasks=9, samples=1, avg_at_k=0.0, avg_at_k_interval=(0.0, high)) for high in (0.3, 0.4)]
    assert macro_of(*sets).avg_at_k_interval == pytest.approx((0.0, 0.25))  # sqrt(0.3^2 + 0.4^2) / 2


def test_the_macro_of_one_set_has_its_figures() -> None:
    one = SetResult(
        tasks=1, samples=1, avg_at_k=0.1, avg_at_k_interval=(0.0, 0.5), measures={"f1": 0.2}, output_tokens=7
    )
    assert macro({"a": one}) == one


def test_a_set_that_was_not_scored_is_in_no_macro_mean() -> None:
    assert macro_of(result(0.25), result(None, unscored=4)).avg_at_k == 0.25


def test_the_macro_adds_costs_up() -> None:
    found = macro_of(result(0.1, output_tokens=3, model_seconds=0.5), result(0.1, output_tokens=4, unscored=2))
    assert (found.output_tokens, found.model_seconds, found.unscored) == (7, 0.5, 2)


def test_the_macro_takes_the_mean_of_members() -> None:
    assert macro_of(result(0.1, members=2.0, tasks=100), result(None, members=5.0)).members == 3.5


def test_a_result_reads_as_accuracy_and_interval() -> None:
    assert str(result(0.5)) == "0.500 [0.400, 0.600]"


# Measures and the best of several samples.


def test_a_measure_is_the_mean_over_tasks_of_its_mean(episode: Make) -> None:
    found = result_of(
        [
            episode("a", 1.0, measures={"f1": 1.0}),
            episode("a", 0.0, measures={"f1": 0.5}),
            episode("b", 0.0, measures={"f1": 0.25}),
        ]
    )
    assert found.measures == {"f1": 0.5}  # (0.75 + 0.25) / 2


def test_an_episode_without_a_measure_or_a_score_is_not_in_its_mean(episode: Make) -> None:
    episodes = [episode("a", 1.0, measures={"f1": 0.5}), episode("a", 1.0), episode("b", None, measures={"f1": 0.0})]
    assert result_of(episodes).measures == {"f1": 0.5}


def test_the_macro_mean_of_a_measure_is_over_the_sets_that_have_it() -> None:
    found = macro_of(result(0.1, measures={"f1": 0.2}), result(0.1, measures={"f1": 0.4}), result(0.1))
    assert found.measures == {"f1": pytest.approx(0.3)}


def test_the_best_of_several_samples_is_a_mean_over_tasks_with_wilsons_interval(episode: Make) -> None:
    episodes = [episode("a", 1.0), episode("a", 0.0), episode("b", 0.0), episode("b", 0.0)]
    found = result_of(episodes)
    assert (found.avg_at_k, found.pass_at_k) == (0.25, 0.5)
    assert found.pass_at_k_interval == interval_of([[1.0], [0.0]])


def test_one_sample_has_no_best(episode: Make) -> None:
    assert result_of([episode("a", 1.0)]).pass_at_k is None


# The table.


def table(*sets: tuple[str, SetResult]) -> list[dict[str, str]]:
    head, *rows = EvalResult(sets=dict(sets), macro=macro(dict(sets))).rows()
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_the_table_has_a_row_for_each_set_and_one_for_their_mean() -> None:
    rows = table(("nq", result(0.2, measures={"f1": 0.3})), ("popqa", result(0.4)))
    assert [(row["set"], row["avg@k"], row["95% interval"], row["f1"]) for row in rows] == [
        ("nq", "0.200", "[0.100, 0.300]", "0.300"),
        ("popqa", "0.400", "[0.300, 0.500]", "-"),
        ("macro", "0.300", "[0.229, 0.371]", "0.300"),  # half width sqrt(2 * 0.1^2) / 2
    ]


def test_the_table_of_one_set_has_one_row_and_no_empty_column() -> None:
    (row,) = table(("nq", result(0.2)))
    always = ["set", "tasks", "samples", "avg@k", "95% interval", "outputs an episode", "output tokens", "unscored"]
    assert list(row) == always


def test_the_baselines_rows_follow_the_teams() -> None:
    one, two = result(0.2), result(0.4)
    found = EvalResult(sets={"a": one}, macro=one, baseline=two, baseline_sets={"a": two})
    assert [row[0] for row in found.rows()] == ["set", "a", "baseline: a"]
