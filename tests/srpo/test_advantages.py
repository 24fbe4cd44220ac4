"""Are the advantages those of the contract? Hand-worked numbers, a plain-loop reference, reports."""

import doctest
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from srpo_env.errors import InvalidInput
from srpo_env.trainers.srpo.estimators import GroupCount, advantages, count_groups
from tests.srpo import reference

NAN = math.nan
METHODS: dict[str, tuple[tuple[str, ...], str]] = {  # what a row's cell is, and what is done in it
    "group": (("group",), "std"),
    "group_no_std": (("group",), "centre"),
    "loo": (("group",), "loo"),
    "decision": (("group", "node", "visit"), "std"),
    "agent": (("group", "agent"), "std"),
    "agent_turn": (("group", "agent", "turn"), "std"),
}
BY_EPISODE = ("group", "group_no_std", "loo")
Columns = dict[str, Any]


def approx(values: Sequence[float], **more: float) -> Any:
    return pytest.approx(values, nan_ok=True, **more)


# ----------------------------------------------------------------------------- worked out by hand

# One task. Episode x (return 1): planner, then solver twice; y (return 0): planner and solver;
# z (return 0): planner. Rows are members; 6 rows, 3 episodes.
ROWS: Columns = {
    "group": ["t"] * 6,
    "episode": ["x", "x", "x", "y", "y", "z"],
    "agent": ["planner", "solver", "solver", "planner", "solver", "planner"],
    "turn": [0, 0, 1, 0, 0, 0],
    "node": ["plan", "solve", "solve", "plan", "solve", "plan"],
    "visit": [0, 0, 1, 0, 0, 0],
}
RETURNS = [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # episodes 1, 0, 0: mean 1/3, std sqrt(2)/3: (2/3) / (sqrt(2)/3) = sqrt 2, -1/3 -> -1/sqrt 2
        ("group", [1.4142136] * 3 + [-0.7071068] * 3),
        ("group_no_std", [2 / 3] * 3 + [-1 / 3] * 3),
        # the others of x have mean 0; those of y and z have mean 1/2
        ("loo", [1.0] * 3 + [-0.5] * 3),
        # plan: 1, 0, 0 as above; solve at visit 0: 1, 0 -> +1, -1; solve at visit 1: alone -> 0
        ("decision", [1.4142136, 1.0, 0.0, -0.7071068, -1.0, -0.7071068]),
        # planner rows 1, 0, 0; solver rows 1, 1, 0: mean 2/3, std sqrt(2)/3 -> 1/sqrt 2, -sqrt 2
        ("agent", [1.4142136, 0.7071068, 0.7071068, -0.7071068, -1.4142136, -0.7071068]),
        # planner turn 0: 1, 0, 0; solver turn 0: 1, 0; solver turn 1: alone
        ("agent_turn", [1.4142136, 1.0, 0.0, -0.7071068, -1.0, -0.7071068]),
    ],
)
def test_each_estimator_gives_the_advantages_worked_out_by_hand(method: Any, expected: list[float]) -> None:
    assert advantages(RETURNS, method=method, **ROWS) == approx(expected, rel=1e-6)


def test_ddof_and_eps_enter_the_denominator() -> None:
    # 0, 0, 0, 1: mean 0.25, squares 0.75: std sqrt(0.75 / 3) = 0.5; 0.75 / (0.5 + 0.1) = 1.25
    found = advantages([0.0, 0.0, 0.0, 1.0], [7] * 4, ddof=1, eps=0.1)
    assert found == approx([-0.25 / 0.6] * 3 + [1.25])


def test_groups_are_apart_and_rows_keep_their_order() -> None:
    found = advantages([1.0, 10.0, 3.0, 30.0], ["a", "b", "a", "b"], "group_no_std")
    assert found == approx([-1.0, -10.0, 1.0, 10.0])


@pytest.mark.parametrize("method", METHODS)
def test_groups_are_apart_under_every_estimator(method: Any) -> None:
    keys: Columns = {"agent": ["s"] * 4, "turn": [0] * 4, "node": ["n"] * 4, "visit": [0] * 4}
    found = advantages([0.0, 2.0, 10.0, 12.0], ["a", "a", "b", "b"], method, **keys)
    size = 2.0 if method == "loo" else 1.0  # of the other one; or of the mean, which the std equals
    assert found == approx([-size, size, -size, size])


def test_an_episode_key_is_only_unique_inside_its_group() -> None:
    found = advantages([1.0, 0.0, 4.0, 0.0], ["a", "a", "b", "b"], "loo", episode=[0, 1, 0, 1])
    assert found == approx([1.0, -1.0, 4.0, -4.0])


def test_without_episodes_each_row_is_its_own() -> None:
    assert advantages([1.0, 1.0, 0.0], [0] * 3, "loo") == approx([0.5, 0.5, -1.0])


def test_decisions_and_agents_count_rows_and_not_episodes() -> None:
    keys: Columns = {"episode": ["x"] * 3 + ["y"], "agent": ["s"] * 4, "turn": [0] * 4}
    methods: list[Any] = ["agent", "agent_turn"]
    for method in methods:
        found = advantages([1.0, 1.0, 1.0, 0.0], ["t"] * 4, method, **keys)
        assert found == approx([0.5773503] * 3 + [-1.7320508], rel=1e-6)  # as in 1, 1, 1, 0


def test_a_penalty_on_one_member_stays_its_own_under_agent() -> None:
    found = advantages([1.0, 0.9, 0.0], ["t"] * 3, "agent", agent=["s"] * 3, episode=["x", "x", "y"])
    assert len(set(found)) == 3


def test_a_cell_of_one_row_keeps_its_return_when_asked() -> None:
    returns, keys = [0.7, 1.0, 0.0, 0.5, 0.5, NAN], [0, 1, 1, 2, 2, 3]
    assert advantages(returns, keys, lone="raw") == approx([0.7, 1, -1, 0, 0, NAN])
    assert advantages(returns, keys) == approx([0, 1, -1, 0, 0, NAN])


def test_a_lone_episode_keeps_its_return_on_all_its_rows_when_asked() -> None:
    found = advantages([0.7, 0.7], ["t", "t"], "loo", episode=["x", "x"], lone="raw")
    assert found == approx([0.7, 0.7])


# ------------------------------------------------------------------------------------- properties


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[float], Columns]:
    """Returns (equal in an episode, some NaN) and keys of all kinds."""
    rows = draw(st.integers(0, 24))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    episode = rng.integers(0, 5, rows)
    group = rng.integers(0, draw(st.integers(1, 4)), rows)
    scores = rng.choice(draw(st.sampled_from(_scores)), (5, 5))
    returns = [float(scores[g, e]) for g, e in zip(group, episode, strict=True)]
    return returns, {
        "group": [("task", int(g)) for g in group],
        "episode": [f"episode {e}" for e in episode],
        "agent": rng.choice(["planner", "solver"], rows),
        "turn": torch.tensor(rng.integers(0, 2, rows)),
        "node": rng.choice(["plan", "solve"], rows).tolist(),
        "visit": rng.integers(0, 2, rows),
    }


_scores = ([0.0, 1.0], [0.0, 1.0, NAN], [0.1, -2.5, 1e3, 0.1 + 1e-9, NAN], [1.0], [-7.0, -7.5])


def rows_of(columns: Columns, order: Any) -> Columns:
    return {
        name: column[order] if not isinstance(column, list) else [column[i] for i in order]
        for name, column in columns.items()
    }


@given(tables(), st.sampled_from(list(METHODS)), st.sampled_from([0, 1]), st.sampled_from([0, 1e-4]))
def test_every_estimator_equals_the_reference(
    table: tuple[list[float], Columns], method: Any, ddof: int, eps: float
) -> None:
    returns, columns = table
    names, kind = METHODS[method]
    columns_of_cell = [np.asarray(columns[name]).tolist() for name in names]
    cells = [repr(cell) for cell in zip(*columns_of_cell, strict=True)]
    episodes = [repr(e) for e in columns["episode"]] if method in BY_EPISODE else None
    expected = reference.advantages(returns, cells, episodes, kind, ddof, eps)
    found = advantages(returns, method=method, ddof=ddof, eps=eps, **columns)
    assert found == approx(expected, rel=1e-9, abs=1e-12)


@given(tables(), st.sampled_from(list(METHODS)), st.integers(0, 99))
def test_the_order_of_rows_changes_nothing(table: tuple[list[float], Columns], method: Any, seed: int) -> None:
    returns, columns = table
    order = np.random.default_rng(seed).permutation(len(returns)).tolist()
    found = advantages(returns, method=method, **columns)
    other = advantages([returns[i] for i in order], method=method, **rows_of(columns, order))
    assert other == approx([found[i] for i in order], rel=1e-9, abs=1e-12)
    counts = count_groups(returns, method=method, **columns)
    permuted = [returns[i] for i in order]
    assert counts == count_groups(permuted, method=method, **rows_of(columns, order))


@given(tables(), st.sampled_from(list(METHODS)))
def test_an_unscored_row_counts_as_left_out(table: tuple[list[float], Columns], method: Any) -> None:
    returns, columns = table
    scored = [i for i, R in enumerate(returns) if not math.isnan(R)]
    found = advantages(returns, method=method, **columns)
    less = advantages([returns[i] for i in scored], method=method, **rows_of(columns, scored))
    assert [a for a in found if not math.isnan(a)] == less
    assert [math.isnan(a) for a in found] == [math.isnan(R) for R in returns]


@given(tables(), st.sampled_from(["group", "decision", "agent", "agent_turn"]))
def test_standardised_advantages_do_not_see_the_scale_or_the_origin_of_the_reward(
    table: tuple[list[float], Columns], method: Any
) -> None:
    returns, columns = table
    columns = {name: columns[name] for name in columns}
    moved = [4 * R + 3 for R in returns]
    if {0.1, 0.1 + 1e-9} <= set(returns):
        return  # a spread of 1e-9 is none, whatever the scale
    found = advantages(returns, method=method, **columns)
    assert advantages(moved, method=method, **columns) == approx(found, rel=1e-6, abs=1e-9)


@given(tables(), st.sampled_from(["group_no_std", "loo"]))
def test_repeating_the_rows_of_an_episode_changes_nothing(table: tuple[list[float], Columns], method: Any) -> None:
    returns, columns = table
    order = [i for i in range(len(returns)) for _ in range(1 + i % 3)]
    found = advantages(returns, method=method, **columns)
    longer = advantages([returns[i] for i in order], method=method, **rows_of(columns, order))
    assert longer == approx([found[i] for i in order], rel=1e-9, abs=1e-12)


# ------------------------------------------------------------------------------------------ kinds


@pytest.mark.parametrize(
    ("returns", "dtype"),
    [
        (torch.tensor([0.0, 1.0]), torch.float32),
        (torch.tensor([0.0, 1.0], dtype=torch.float64), torch.float64),
        (torch.tensor([0.0, 1.0], dtype=torch.bfloat16), torch.float32),
        (torch.tensor([0, 1]), torch.float32),
        (np.array([0.0, 1.0]), np.float64),
        (np.array([0.0, 1.0], dtype=np.float32), np.float32),
        (np.array([0, 1]), np.float64),
    ],
)
def test_the_same_kind_comes_back(returns: Any, dtype: Any) -> None:
    found = advantages(returns, torch.tensor([3, 3]))
    assert type(found) is type(returns)
    assert found.dtype == dtype
    assert found.tolist() == [-1.0, 1.0]


def test_a_sequence_gives_a_list() -> None:
    returns: Any = (0, 1, None)
    assert advantages(returns, (1, 1, 1)) == approx([-1.0, 1.0, NAN])
    assert isinstance(advantages((0.0, 1.0), (1, 1)), list)
    assert advantages([], []) == []
    assert count_groups([], []) == GroupCount(0, 0)


def test_a_tensor_that_carries_a_gradient_is_taken_as_a_constant() -> None:
    R = torch.tensor([0.0, 1.0], requires_grad=True)
    assert not advantages(R, [0, 0]).requires_grad


def test_the_returns_are_left_as_they_were() -> None:
    R = np.array([0.0, 1.0, 1.0])
    advantages(R, [0, 0, 1])
    assert R.tolist() == [0.0, 1.0, 1.0]


def test_statistics_are_float64() -> None:
    R = torch.tensor([16777216.0, 16777218.0, 16777220.0, 16777280.0], dtype=torch.float32)
    exact = R.double() - R.double().mean()
    assert torch.equal(advantages(R, [0] * 4, "group_no_std"), exact.float())


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: advantages([1.0], [0], "grpo"),  # type: ignore[arg-type]
            "method: 'grpo' is not one of group, group_no_std, loo, decision, agent, agent_turn",
        ),
        (lambda: advantages([1.0], [0], lone="keep"), "lone: 'keep' is not one of zero, raw"),  # type: ignore[arg-type]
        (lambda: advantages([1.0], [0], ddof=2), "ddof, eps: 2 and 0.0; ddof is 0"),
        (lambda: advantages([1.0], [0], eps=-1.0), "ddof, eps: 0 and -1.0"),
        (lambda: advantages([1.0], [0], eps=math.inf), "ddof, eps: 0 and inf"),
        (lambda: advantages([1.0, 2.0], [0]), "group: 1 entries for 2 returns"),
        (lambda: advantages([1.0], [0], episode=[0, 1]), "episode: 2 entries for 1 returns"),
        (lambda: advantages([1.0], [0], "decision", visit=[0]), "node: None, but the estimator"),
        (lambda: advantages([1.0], [0], "decision", node=[0]), "visit: None, but the estimator"),
        (lambda: advantages([1.0], [0], "agent"), "agent: None, but the estimator 'agent'"),
        (lambda: advantages([1.0], [0], "agent_turn", agent=[0]), "turn: None, but the estimator"),
        (lambda: advantages([math.inf], [0]), r"returns: shape \[1\], 1 of them infinite"),
        (lambda: advantages(torch.ones(1, 1), [0]), r"returns: shape \[1, 1\]"),
        (
            lambda: advantages([1.0, 0.5], [0, 0], episode=["x", "x"]),
            "returns: an episode has 0.5 and 1; 'group' needs one return per episode",
        ),
    ],
)
def test_a_wrong_argument_is_one_clear_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_keys_that_an_estimator_does_not_use_are_ignored() -> None:
    assert advantages([0.0, 1.0], [0, 0], node=["a", "b"], visit=[0, 1]) == approx([-1.0, 1.0])


def test_rounding_inside_an_episode_is_no_difference() -> None:
    found = advantages([0.1 + 0.2, 0.3, 1.0], [0] * 3, "loo", episode=["x", "x", "y"])
    assert found == approx([-0.7, -0.7, 0.7])


def test_the_examples_in_the_docstrings_run() -> None:
    result = doctest.testmod(sys.modules[advantages.__module__])
    assert result.attempted > 0
    assert result.failed == 0


# ------------------------------------------------------------------- what went wrong in other places


def test_a_group_of_one_has_advantage_zero_and_is_counted() -> None:
    """modelscope/ms-swift#3980: not NaN (the sample std of one value) and not the reward."""
    for ddof in (0, 1):
        assert advantages([1.0], ["t1"], ddof=ddof) == [0.0]
    assert count_groups([1.0], ["t1"]) == GroupCount(groups_without_signal=1, groups=1)


def test_every_row_of_an_episode_is_compared_with_the_episodes_of_its_task() -> None:
    """rllm-org/rllm#924: neither the episode nor the agent belongs in the key of the group."""
    episode = ["r1", "r1", "r2", "r3", "r3", "r3", "r4"]
    agent = ["planner", "solver", "planner", "planner", "solver", "solver", "planner"]
    returns = [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    found = advantages(returns, ["t1"] * 7, episode=episode, agent=agent)
    assert found == approx([-1.0, -1.0, 1.0, 1.0, 1.0, 1.0, -1.0])
    found = advantages(returns, ["t1"] * 7, episode=episode, agent=agent, ddof=1)
    assert found[:3] == approx([-0.8660254, -0.8660254, 0.8660254])


@pytest.mark.parametrize(("ddof", "expected"), [(0, [-0.57735, 1.73205]), (1, [-0.5, 1.5])])
def test_arrays_tensors_and_lists_share_one_definition_of_the_std(ddof: int, expected: list[float]) -> None:
    """NVIDIA/TorchFort#38: np.std divides by n, torch.std by n - 1; here `ddof` alone decides."""
    rewards = [0.0, 0.0, 0.0, 1.0]
    for returns in (rewards, np.array(rewards), torch.tensor(rewards)):
        found: Any = advantages(returns, ["t"] * 4, ddof=ddof)  # type: ignore[type-var]
        assert list(map(float, found)) == approx([expected[0]] * 3 + [expected[1]], rel=1e-5)


def test_an_unscorable_episode_moves_nothing_and_is_not_a_zero() -> None:
    """huggingface/trl#5902: over the scored three: mean 0.6667, std 0.4714."""
    unscored: Any = None
    found = advantages([1.0, 0.0, unscored, 1.0], ["t"] * 4)
    assert found == approx([0.7071068, -1.4142136, NAN, 0.7071068], rel=1e-6)


@pytest.mark.parametrize("returns", [[1.0, NAN, NAN], [NAN, NAN, NAN]])
def test_a_group_with_fewer_than_two_scores_has_no_signal(returns: list[float]) -> None:
    """huggingface/trl#5902: it is skipped and counted."""
    assert advantages(returns, ["t"] * 3) == approx([NAN if math.isnan(R) else 0.0 for R in returns])
    assert count_groups(returns, ["t"] * 3) == GroupCount(1, 1)


def test_an_episode_with_more_turns_counts_once_in_the_baseline() -> None:
    """microsoft/agent-lightning#445: one event of 1 and three of 0 have the baseline 0.5."""
    keys: Columns = {"group": ["t"] * 4, "episode": ["r1", "r2", "r2", "r2"]}
    found = advantages([1.0, 0.0, 0.0, 0.0], method="group_no_std", **keys)
    assert found == approx([0.5, -0.5, -0.5, -0.5])


def test_rewards_of_agents_on_different_scales_are_not_pooled() -> None:
    """facebookresearch/BenchMARL#255: inside (task, agent): -1 and 1 for both agents."""
    agent = ["a", "a", "b", "b"]
    assert advantages([0.0, 1.0, 0.0, 100.0], ["t"] * 4, "agent", agent=agent) == [-1, 1, -1, 1]
    pooled = advantages([0.0, 1.0, 0.0, 100.0], ["t"] * 4)
    assert pooled == approx([-0.585, -0.562, -0.585, 1.732], abs=1e-3)


@pytest.mark.parametrize("method", ["group", "group_no_std", "loo"])
def test_equal_returns_have_no_signal_although_their_std_is_not_zero(method: Any) -> None:
    returns = [0.1, 0.1, 0.1]
    assert np.std(returns) > 0  # 1.4e-17: divided by it, rounding becomes an advantage of 1
    assert advantages(returns, ["t"] * 3, method) == [0.0, 0.0, 0.0]
    assert count_groups(returns, ["t"] * 3, method) == GroupCount(1, 1)


@pytest.mark.parametrize(
    ("returns", "signal"),
    [
        ([0.0, 1e-6], False),  # at most 1e-6 below 1 ...
        ([0.5, 0.5 + 0.9e-6], False),
        ([0.5, 0.5 + 1.1e-6], True),
        ([1000.0, 1000.0 + 0.9e-3], False),  # ... and 1e-6 of the highest above it
        ([1000.0, 1000.0 + 1.1e-3], True),
        ([-1000.0 - 0.9e-3, -1000.0], False),
        ([-1000.0 - 1.1e-3, -1000.0], True),
    ],
)
def test_a_spread_is_measured_against_the_highest_return(returns: list[float], signal: bool) -> None:
    assert any(advantages(returns, [0, 0])) is signal
    assert count_groups(returns, [0, 0]).groups_without_signal == (not signal)


def test_cells_are_counted_as_the_estimator_sees_them() -> None:
    assert count_groups(RETURNS, **ROWS) == GroupCount(0, 1)
    assert count_groups(RETURNS, method="decision", **ROWS) == GroupCount(1, 3)
    assert count_groups(RETURNS, method="agent", **ROWS) == GroupCount(0, 2)
    assert count_groups(RETURNS, method="agent_turn", **ROWS) == GroupCount(1, 3)
