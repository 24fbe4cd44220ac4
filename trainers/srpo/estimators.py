"""How much better than its peers was each row? The advantage estimators, on one set of events.

An estimator says which values a row is compared with (its cell) and how. Statistics are float64, in
NumPy: the arrays hold one number per event or member. Cells and episodes are looked up by key.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from srpo_env.errors import InvalidInput

Estimator = Literal["group", "group_no_std", "loo", "decision", "agent", "agent_turn"]
Keys: TypeAlias = Sequence[Hashable] | NDArray[Any] | Tensor
Returns = TypeVar("Returns", Tensor, NDArray[Any], Sequence[float])
_Floats: TypeAlias = NDArray[np.float64]
_Indices: TypeAlias = NDArray[np.intp]

_CELL: dict[str, tuple[str, ...]] = {
    "group": ("group",),
    "group_no_std": ("group",),
    "loo": ("group",),
    "decision": ("group", "node", "visit"),
    "agent": ("group", "agent"),
    "agent_turn": ("group", "agent", "turn"),
}
_BY_EPISODE = ("group", "group_no_std", "loo")
_NO_SPREAD = 1e-6  # relative: 0.1 three times has a std of 1e-17, which is no signal


class GroupCount(NamedTuple):
    """How many cells an estimator compares within, and how many of them say nothing."""

    groups_without_signal: int  # fewer than two scored values, or all of them equal
    groups: int


class _Cells(NamedTuple):
    """R values in C cells: one value per episode or per row, as the estimator wants it."""

    of_row: _Indices  # [rows]: the cell of each row
    number: NDArray[np.int64]  # [C]: n, the scored values
    mean: _Floats  # [C]
    std: _Floats  # [C]
    flat: NDArray[np.bool_]  # [C]: no signal


def advantages(
    returns: Returns,
    group: Keys,
    method: Estimator = "group",
    *,
    episode: Keys | None = None,
    agent: Keys | None = None,
    turn: Keys | None = None,
    node: Keys | None = None,
    visit: Keys | None = None,
    ddof: int = 0,
    eps: float = 0.0,
    lone: Literal["zero", "raw"] = "zero",
) -> Returns:
    """Advantage of each row relative to its cell.

        A = (R - mean) / (std + eps)        "group", "decision", "agent", "agent_turn"
        A = R - mean                        "group_no_std"
        A = R - mean of the others          "loo"

    The cell, and what counts once in it: "group", "group_no_std" (Liu et al., 2025, Dr. GRPO) and
    "loo" (Ahmadian et al., 2024, RLOO): the group, each EPISODE once, however many rows it has;
    "decision": (group, node, visit), each row; "agent": (group, agent), each row (Dr. MAS);
    "agent_turn": (group, agent, turn), each row (AT-GRPO). A cell with fewer than two scored values,
    or whose max - min is at most 1e-6 max(1, |max|), gives 0 to its scored rows.

    Args:
        returns: [rows] R of each row's episode; NaN (a None in a list is read as one) = unscored,
            which stays NaN and enters no statistic.
        group: [rows] key of the row's task in this batch. Keys are tensors, arrays or sequences of
            anything hashable; those that the estimator does not use are ignored.
        episode: [rows] key, unique inside a group; None: each row is an episode of its own.
        turn: [rows] how often the row's agent had acted before, in its episode.
        visit: [rows] how often the row's node had been visited before, in its episode.
        ddof: 0 divides the variance by n, 1 by n - 1.
        eps: added to the std.
        lone: "raw" leaves R to the row of a cell with one scored value (Dr. MAS's code does).

    Returns:
        [rows] of the same kind: a tensor (same device; its dtype, float32 at least), an array
        (float64 unless it was float32) or a list of floats.

    Raises:
        InvalidInput: an unknown name, a setting out of range, a missing key, lengths that differ,
            an infinite return, or an episode with two different returns.

    Example: the second episode has two events, and counts once; the third has no score.

        >>> advantages([1.0, 0.0, 0.0, math.nan], ["t"] * 4, episode=["a", "b", "b", "c"])
        [1.0, -1.0, -1.0, nan]
    """
    if lone not in ("zero", "raw"):
        raise InvalidInput(f"lone: {lone!r} is not one of zero, raw. Choose one.")
    if ddof not in (0, 1) or not 0 <= eps < math.inf:
        raise InvalidInput(
            f"ddof, eps: {ddof} and {eps}; ddof is 0 (divide by n) or 1 (by n - 1), eps a number "
            "from 0. Use 0 and 0 unless you reproduce a peer."
        )
    given = {"episode": episode, "agent": agent, "turn": turn, "node": node, "visit": visit}
    R = _values(returns)
    cells = _cells(R, method, {"group": group, **given}, ddof)
    row = cells.of_row
    centred = R - cells.mean[row]
    if method == "loo":  # R - (S - R) / (n - 1), written so that nothing cancels
        number = cells.number[row]
        A = centred * number / np.maximum(number - 1, 1)
    elif method == "group_no_std":
        A = centred
    else:
        A = centred / np.where(cells.flat, 1.0, cells.std + eps)[row]
    A[cells.flat[row] & ~np.isnan(R)] = 0.0
    if lone == "raw":
        A = np.where(cells.number[row] == 1, R, A)
    result: Returns = _like(A, returns)
    return result


def count_groups(
    returns: Tensor | NDArray[Any] | Sequence[float],
    group: Keys,
    method: Estimator = "group",
    *,
    episode: Keys | None = None,
    agent: Keys | None = None,
    turn: Keys | None = None,
    node: Keys | None = None,
    visit: Keys | None = None,
) -> GroupCount:
    """Cells of an estimator, and those without signal; the arguments of `advantages`.

    Example:
        >>> count_groups([1.0, 0.0, 1.0, 1.0, 0.5], ["a", "a", "b", "b", "c"])
        GroupCount(groups_without_signal=2, groups=3)
    """
    given = {"episode": episode, "agent": agent, "turn": turn, "node": node, "visit": visit}
    flat = _cells(_values(returns), method, {"group": group, **given}, 0).flat
    return GroupCount(int(flat.sum()), len(flat))


def _cells(R: _Floats, method: str, keys: dict[str, Keys | None], ddof: int) -> _Cells:
    if method not in _CELL:
        names = ", ".join(get_args(Estimator))
        raise InvalidInput(f"method: {method!r} is not one of {names}. Choose one.")
    cell_of_row = _numbered(len(R), method, {name: keys[name] for name in _CELL[method]})
    if method in _BY_EPISODE and keys["episode"] is not None:
        by_episode = {"group": keys["group"], "episode": keys["episode"]}
        unit_of_row = _numbered(len(R), method, by_episode)
    else:
        unit_of_row = np.arange(len(R))
    units = int(unit_of_row.max(initial=-1)) + 1
    cells = int(cell_of_row.max(initial=-1)) + 1
    cell = np.zeros(units, dtype=np.intp)
    cell[unit_of_row] = cell_of_row

    scored = ~np.isnan(R)
    low, high = _range(R[scored], unit_of_row[scored], units)
    if (uneven := _differ(low, high)).any():
        unit = uneven.argmax()
        raise InvalidInput(
            f"returns: an episode has {low[unit]:g} and {high[unit]:g}; {method!r} needs one return "
            "per episode, the same in all its rows. Sum its rewards first."
        )
    kept = np.isfinite(high)  # one value per unit from here on
    value, cell = high[kept], cell[kept]
    number = np.bincount(cell, minlength=cells)
    mean = np.bincount(cell, value, cells) / np.maximum(number, 1)
    squares = np.bincount(cell, (value - mean[cell]) ** 2, cells)
    std = np.sqrt(squares / np.maximum(number - ddof, 1))
    flat = ~_differ(*_range(value, cell, cells))  # one value, or none, differs from nothing
    return _Cells(cell_of_row, number, mean, std, flat)


def _range(values: _Floats, index: _Indices, size: int) -> tuple[_Floats, _Floats]:
    """[size] lowest and highest value of each index; inf and -inf where it has none."""
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, index, values)
    np.maximum.at(high, index, values)
    return low, high


def _differ(low: _Floats, high: _Floats) -> NDArray[np.bool_]:
    """[size] whether the values from low to high carry a signal."""
    some = np.isfinite(high)
    low, high = np.where(some, low, 0.0), np.where(some, high, 0.0)
    different: NDArray[np.bool_] = high - low > _NO_SPREAD * np.maximum(1.0, np.abs(high))
    return different


def _numbered(rows: int, method: str, keys: dict[str, Keys | None]) -> _Indices:
    """[rows] the number of each row's key, in order of first appearance."""
    columns = []
    for name, key in keys.items():
        if key is None:
            raise InvalidInput(
                f"{name}: None, but the estimator {method!r} compares rows by "
                f"{', '.join(keys)}. Pass one {name} per row, or choose 'group'."
            )
        column = key.tolist() if isinstance(key, Tensor | np.ndarray) else list(key)
        if len(column) != rows:
            raise InvalidInput(
                f"{name}: {len(column)} entries for {rows} returns; it has one per row. "
                "Repeat an event's value for each of its members."
            )
        columns.append(column)
    numbers: dict[tuple[Hashable, ...], int] = {}
    return np.fromiter((numbers.setdefault(key, len(numbers)) for key in zip(*columns, strict=True)), np.intp, rows)


def _values(returns: Tensor | NDArray[Any] | Sequence[float]) -> _Floats:
    if isinstance(returns, Tensor):
        returns = returns.detach().to("cpu", torch.float64).numpy()
    R = np.array(returns, dtype=np.float64)
    if R.ndim != 1 or np.isinf(R).any():
        raise InvalidInput(
            f"returns: shape {list(R.shape)}, {int(np.isinf(R).sum())} of them infinite; they are "
            "finite numbers, one per row. Use NaN for a row without a score."
        )
    return R


def _like(A: _Floats, returns: Any) -> Any:
    if isinstance(returns, Tensor):
        dtype = returns.dtype if returns.dtype.is_floating_point else torch.get_default_dtype()
        dtype = torch.promote_types(dtype, torch.float32)
        return torch.as_tensor(A, dtype=dtype, device=returns.device)
    if isinstance(returns, np.ndarray):
        return A.astype(np.float32) if returns.dtype == np.float32 else A
    return A.tolist()
