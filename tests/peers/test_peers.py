"""Do the presets give the loss, gradient and advantages of the peers' own functions on the same tensors?

`make peers` installs the peers, each in an environment of its own, and runs this.
"""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srpo_env.models import resolve_model
from srpo_env.trainers.srpo import SRPOConfig, advantages, srpo_loss
from srpo_env.trainers.srpo.divergence import kl_penalty
from srpo_env.trainers.srpo.weights import token_weights

pytestmark = pytest.mark.peers

ROOT = Path(__file__).resolve().parents[2]
MEMBERS, LENGTH, GROUP_SIZE = 12, 7, 4
LOSSES = ["grpo", "dr_grpo", "dapo", "gspo"]


@functools.cache
def given() -> dict[str, Any]:
    """Twelve outputs of one to seven tokens, in three groups; ratios on both sides of every clip."""
    draw = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64)

    old = -normal(MEMBERS, LENGTH).abs() - 0.5
    new = old + 0.3 * normal(MEMBERS, LENGTH)
    new[:4] = old[:4] + 1e-4 * normal(4, LENGTH)  # gspo's range is that narrow
    length = torch.randint(1, LENGTH + 1, (MEMBERS, 1), generator=draw)
    rewards = torch.tensor([1, 0, 0, 1, 0.5, 0.25, 1, 0, 0, 0, 0, 1], dtype=torch.float64)
    return {
        "old": old,
        "new": new,
        "ref": old + 0.2 * normal(MEMBERS, LENGTH),
        "mask": torch.arange(LENGTH) < length,
        "advantage": normal(MEMBERS),
        "rewards": rewards,
        "group": torch.arange(MEMBERS) // GROUP_SIZE,
        "group_size": GROUP_SIZE,
        "constant_length": 9,
    }


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a peer's script once and returns what it found."""

    @functools.cache
    def run(name: str) -> dict[str, Any]:
        python, folder = ROOT / "build" / "peers" / name / "bin" / "python", tmp_path_factory.mktemp(name)
        if not python.exists():
            pytest.skip(f"{name} is not installed in build/peers: `make peers`")
        torch.save(given(), folder / "given.pt")
        models = [str(resolve_model("tiny_arithmetic"))] if name == "trl" else []
        command = [str(python), str(Path(__file__).with_name(f"{name}_peer.py")), "given.pt", *models, "found.pt"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = torch.load(folder / "found.pt")
        return found

    return run


def ours(preset: str, beta: float = 0.0) -> tuple[Tensor, Tensor]:
    """Loss and gradient by the log-probs, with the settings of a preset."""
    values, config = given(), SRPOConfig.checked({"preset": preset, "constant_length": given()["constant_length"]})
    new, event = values["new"].clone().requires_grad_(), torch.arange(MEMBERS)
    reduction: dict[str, Any] = {"reduction": config.reduction, "constant_length": config.constant_length}
    loss = srpo_loss(
        new,
        values["old"],
        values["mask"],
        event,
        values["advantage"],
        clip_low=config.clip[0],
        clip_high=config.clip[1],
        ratio_level=config.ratio_level,
        length_norm=config.length_norm,
        set_norm=config.set_norm,
        **reduction,
    ).loss
    if beta:
        weight = token_weights(values["mask"], event, values["advantage"], **reduction)
        loss = loss + beta * kl_penalty(new, values["ref"], weight)
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.detach(), gradient


CASES = [("trl", name) for name in LOSSES] + [("trl", f"{name} kl") for name in LOSSES] + [("verl", n) for n in LOSSES]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[" ".join(case) for case in CASES])
def test_loss_and_gradient_are_the_peers_own(peer: Any, name: str, case: str) -> None:
    preset, _, kl = case.partition(" ")
    found, (loss, gradient) = peer(name)[case], ours(preset, 0.1 if kl else 0.0)
    print(
        f"{name} {case}: loss off by {float((found['loss'] - loss).abs()):.1e}, "
        f"gradient by {float((found['gradient'] - gradient).abs().max()):.1e}"
    )
    assert float(gradient.abs().max()) > 1e-3
    assert float((found["loss"] - loss).abs()) < 1e-6
    assert float((found["gradient"] - gradient).abs().max()) < 1e-6


ADVANTAGES = [("trl", "grpo"), ("trl", "dr_grpo"), ("verl", "grpo"), ("verl", "dr_grpo"), ("verl", "rloo")]


@pytest.mark.parametrize(("name", "preset"), ADVANTAGES, ids=[" ".join(case) for case in ADVANTAGES])
def test_advantages_are_the_peers_own(peer: Any, name: str, preset: str) -> None:
    config, values = SRPOConfig.checked({"preset": preset, "constant_length": 9}), given()
    expected = peer(name)[f"advantage {config.estimator}"]
    method: Any = config.estimator
    found = advantages(values["rewards"], values["group"], method, ddof=config.ddof, eps=config.eps)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
