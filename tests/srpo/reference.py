"""The SRPO loss and its gradient a second time, in NumPy loops over single tokens, from SRPO.md.

Written from the contract and not from the code under test; slow, float64, nothing vectorised.
"""

import math
from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def loss_and_gradient(
    new: Array,
    old: Array,
    mask: Array,
    event: Array,
    advantage_of_row: Array,
    episode: Array,
    *,
    clip_low: float,
    clip_high: float,
    set_norm: str,
    length_norm: str,
    ratio_level: str,
    reduction: str,
    constant_length: float,
) -> tuple[float, Array, dict[Any, tuple[float, float, bool]]]:
    """Returns the loss, its gradient [M, T] and, by unit, log-ratio, ratio and whether it is clipped.

    The key of a unit is its event, its row, its (row, column) or its episode.
    """
    rows, width = mask.shape
    sampled = {
        i: [t for t in range(width) if mask[i, t] != 0] for i in range(rows) if not math.isnan(advantage_of_row[i])
    }
    sampled = {i: tokens for i, tokens in sampled.items() if tokens}

    members: dict[int, list[int]] = defaultdict(list)
    for i in sampled:
        members[int(event[i])].append(i)
    events_of: dict[int, list[int]] = defaultdict(list)
    for e in members:
        events_of[int(episode[e])].append(e)
    E, N, M = len(members), len(events_of), len(sampled)
    T = sum(len(tokens) for tokens in sampled.values())

    def weight(i: int) -> float:
        e, n = int(event[i]), len(sampled[i])
        return {
            "event": lambda: 1 / E / len(members[e]) / n,
            "episode": lambda: 1 / N / len(events_of[int(episode[e])]) / len(members[e]) / n,
            "member": lambda: 1 / M / n,
            "token": lambda: 1 / T,
            "constant": lambda: 1 / M / constant_length,
        }[reduction]()

    units: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for i, tokens in sampled.items():
        for t in tokens:
            key: Any = {
                "set": int(event[i]),
                "member": i,
                "token": (i, t),
                "trajectory": int(episode[event[i]]),
            }[ratio_level]
            units[key].append((i, t))

    loss, gradient, described = 0.0, np.zeros(mask.shape), {}
    for key, tokens_of_unit in units.items():
        K = len({i for i, _ in tokens_of_unit})
        f = {"sqrt": 1 / math.sqrt(K), "sum": 1.0, "mean": 1 / K}[set_norm]
        slope = {}  # d L / d log pi(t)
        for i, t in tokens_of_unit:
            whole_row = ratio_level != "token" and length_norm == "mean"
            slope[i, t] = f / (len(sampled[i]) if whole_row else 1)
        L = sum(slope[i, t] * (new[i, t] - old[i, t]) for i, t in tokens_of_unit)
        A = float(advantage_of_row[tokens_of_unit[0][0]])
        rho = math.exp(min(L, 20.0))
        s = min(rho * A, min(max(rho, 1 - clip_low), 1 + clip_high) * A)
        clipped = (A > 0 and rho > 1 + clip_high) or (A < 0 and rho < 1 - clip_low)
        W = sum(weight(i) for i, _ in tokens_of_unit)
        loss -= W * s
        for i, t in tokens_of_unit:
            if not clipped and L <= 20.0:
                gradient[i, t] -= W * A * rho * slope[i, t]
        described[key] = (L, rho, clipped)
    return loss, gradient, described


def advantages(
    returns: list[float],
    cells: list[Any],
    episodes: list[Any] | None,
    kind: str,
    ddof: int,
    eps: float,
) -> list[float]:
    """Advantages by loops; `cells` is the finished key of each row, `kind` std, centre or loo."""
    answer = []
    for R, cell in zip(returns, cells, strict=True):
        if math.isnan(R):
            answer.append(math.nan)
            continue
        peers: dict[Any, float] = {}
        for j, other in enumerate(returns):
            if cells[j] == cell and not math.isnan(other):
                peers[j if episodes is None else episodes[j]] = other
        values = list(peers.values())
        n, mean = len(values), sum(values) / len(values)
        if n < 2 or max(values) - min(values) <= 1e-6 * max(1, abs(max(values))):
            answer.append(0.0)
        elif kind == "loo":
            answer.append(R - (sum(values) - R) / (n - 1))
        elif kind == "centre":
            answer.append(R - mean)
        else:
            std = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - ddof))
            answer.append((R - mean) / (std + eps))
    return answer
