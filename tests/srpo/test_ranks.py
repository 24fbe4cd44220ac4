"""Do two ranks do what one process does? They run as processes on the CPU, over gloo."""

from __future__ import annotations

import copy
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srpo_env import EventLog
from srpo_env.batch import EventBatch
from srpo_env.config import PolicyTraining
from srpo_env.runs import checkpoints, read_metrics
from srpo_env.trainers.srpo.config import SRPOConfig
from srpo_env.trainers.srpo.learner import SRPOLearner
from srpo_env.trainers.srpo.ranks import Ranks

# One rank: makes the same policies as the test, learns what it is told, and leaves the gradients of its steps.
RANK = """
import importlib.util, sys, torch, torch.distributed as dist
from srpo_env.trainers.srpo.checkpoint import load_state, whole_state
folder, rank, world, port, tests = sys.argv[1:]
spec = importlib.util.spec_from_file_location("ranks_of_a_test", tests)
test = importlib.util.module_from_spec(spec)
spec.loader.exec_module(test)
torch.set_num_threads(1)
given = torch.load(f"{folder}/given.pt", weights_only=False)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(world))
done = []
for case in given:
    learner = test.learner_of(case["models"], case["settings"])
    seen = test.watch(learner)
    if rank == "0":
        learner.update(case["batch"])
        learner.ranks.tell(None)
    else:
        for order, subject in learner.ranks.orders():
            getattr(learner, order)(subject)
    optimisers = {}
    for label, optimiser in learner._optimisers.items():
        optimisers[label] = whole_state(optimiser)
        load_state(optimiser, optimisers[label])
        again = whole_state(optimiser)["state"]
        for key, values in optimisers[label]["state"].items():
            assert all(torch.equal(again[key][name], each) for name, each in values.items())
    models = {label: policy.model.state_dict() for label, policy in learner.policies.items()}
    trie = {label: scorer._shares for label, scorer in learner._scorers.items()}
    done.append({"trie": trie, "seen": seen, "shares": list(test.SHARES), "models": models, "optimisers": optimisers})
    test.SHARES.clear()
torch.save(done, f"{folder}/rank{rank}.pt")
dist.destroy_process_group()
"""
SHARES: list[int] = []
CONFIGS = Path(__file__).resolve().parents[2] / "trainers" / "srpo" / "accelerate"


class Held:
    """A policy around a model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.version = 0

    def load_weights(self, source: Any, version: int) -> None:
        if source is not None:
            self.model.load_state_dict(source)
        self.version = version


def learner_of(models: dict[str, Any], settings: dict[str, Any]) -> SRPOLearner:
    policies: dict[str, Any] = {label: Held(model) for label, model in models.items()}
    return SRPOLearner(SRPOConfig.checked(settings), policies, training=PolicyTraining(lr=1e-3, grad_clip=None))


def watch(learner: SRPOLearner) -> dict[str, Tensor]:
    """Fills with the gradient of every parameter at every step, and notes how many rows each pass scores."""
    seen: dict[str, Tensor] = {}
    for label, optimiser in learner._optimisers.items():

        def keep(*_: Any, label: str = label) -> None:
            step = sum(key.startswith(f"{label}/") for key in seen)
            for name, each in learner._scorers[label].model.named_parameters():
                if each.grad is not None:
                    gradient = getattr(each.grad, "full_tensor", lambda each=each: each.grad)()
                    seen[f"{label}/{step}/{name}"] = gradient.clone()

        optimiser.register_step_pre_hook(keep)
        scorer = learner._scorers[label]
        score = scorer.score

        def noted(batch: EventBatch, rows: Tensor, *, score: Any = score, **more: Any) -> Any:
            SHARES.append(len(rows))
            return score(batch, rows, **more)

        scorer.score = noted  # type: ignore[method-assign]
    return seen


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def on_ranks(folder: Path, cases: list[dict[str, Any]], **environment: str) -> list[list[dict[str, Any]]]:
    """What each of two ranks saw of each case."""
    torch.save(cases, folder / "given.pt")
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(rank), "2", port, __file__],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(told)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def relative(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    largest = max(float(each.abs().max()) for each in expected.values())
    assert largest > 0
    return max(float((found[name] - each).abs().max()) for name, each in expected.items()) / largest


CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "float64": ("gpt2", 1e-10, {}),
    "sets across ranks": (
        "gpt2",
        1e-10,
        {"ratio_level": "trajectory", "reduction": "episode", "old_logprobs": "sampler"},
    ),
    "float32": ("qwen3", 1e-5, {"ratio_level": "token", "reduction": "token"}),
    "lone": ("gpt2", 1e-10, {"mini_batches": 3}),
}


@pytest.fixture(scope="module")
def cases(make: Any) -> dict[str, dict[str, Any]]:
    """Two policies each; "lone" has an event a step, so that one rank has nothing to score."""
    found = {}
    for name, (kind, _, settings) in CASES.items():
        build = getattr(make, kind)
        batch = make.batch(31, policies=("a", "b"), groups=3)
        if name == "lone":
            batch = make.batch(0, policies=("a", "b"), groups=1, size=3, most_events=1, members=2)
        found[name] = {
            "models": {label: build(seed) for seed, label in enumerate("ab")},
            "batch": batch,
            "settings": {"clip": 0.3, "mini_batches": 2, "micro_batch_tokens": 40} | settings,
        }
    return found


@pytest.fixture(scope="module")
def seen(cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    ranks = on_ranks(tmp_path_factory.mktemp("ranks"), list(cases.values()))
    return {name: [rank[at] for rank in ranks] for at, name in enumerate(cases)}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_gradients_of_one(name: str, cases: dict[str, Any], seen: dict[str, Any]) -> None:
    case = copy.deepcopy(cases[name])
    alone = learner_of(case["models"], case["settings"])
    expected = watch(alone)
    alone.update(case["batch"])
    first, second = seen[name]
    assert relative(first["seen"], expected) < CASES[name][1]
    assert first["seen"].keys() == second["seen"].keys()
    assert all(torch.equal(each, second["seen"][name]) for name, each in first["seen"].items())


@pytest.fixture(scope="module")
def sharded(
    cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """The same with the weights in shards."""
    folder = tmp_path_factory.mktemp("shards")
    ranks = on_ranks(folder, list(cases.values()), ACCELERATE_USE_FSDP="true")
    return {name: [rank[at] for rank in ranks] for at, name in enumerate(cases)}


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_hold_shards_have_the_gradients_of_one_process(
    name: str, cases: dict[str, Any], sharded: dict[str, Any]
) -> None:
    case = copy.deepcopy(cases[name])
    alone = learner_of(case["models"], case["settings"])
    expected = watch(alone)
    alone.update(case["batch"])
    for rank in sharded[name]:
        assert relative(rank["seen"], expected) < CASES[name][1]
        assert all(rank["trie"].values())
        for label, optimiser in alone._optimisers.items():
            for key, values in optimiser.state_dict()["state"].items():
                theirs = rank["optimisers"][label]["state"][key]["exp_avg"]
                assert torch.allclose(theirs, values["exp_avg"], rtol=1e-4, atol=1e-6)
    for label, policy in alone.policies.items():  # the first rank's policy has the new weights, to sample
        found = sharded[name][0]["models"][label]
        tolerance = 1e-9 if CASES[name][0] == "gpt2" else 1e-4
        assert (
            max(float((found[key] - each).abs().max()) for key, each in policy.model.state_dict().items()) < tolerance
        )


def test_both_ranks_score_and_one_without_rows_waits_for_the_other(seen: dict[str, Any]) -> None:
    assert all(sum(rank["shares"]) > 0 for ranks in seen.values() for rank in ranks)
    assert 0 in seen["lone"][1]["shares"]


def of(rank: int, world: int) -> Ranks:
    made = Ranks()
    made.rank, made.world = rank, world
    return made


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_row_has_one_rank_and_every_event_too(make: Any, world: int) -> None:
    batch = make.batch(5, groups=4, size=4)
    rows = torch.nonzero(batch.mask.any(1)).flatten()
    shares = [of(rank, world).share(batch, rows) for rank in range(world)]
    assert torch.equal(torch.cat(shares).sort().values, rows)
    events = [set(batch.event[share].tolist()) for share in shares]
    assert sum(map(len, events)) == len(set().union(*events))


def test_tokens_are_balanced_over_ranks(make: Any) -> None:
    """Events of 9, 7, 6, 5 and 3 tokens: 9 + 5 beside 7 + 6 leaves the emptier rank for the 3."""
    events = [
        make.event([make.member([1] * (tokens - 2), [2, 3])], episode=f"g/{at}")
        for at, tokens in enumerate([3, 9, 6, 5, 7])
    ]
    batch = EventBatch.from_events(events)
    assert of(0, 2).share(batch, torch.arange(5)).tolist() == [1, 3]
    assert of(1, 2).share(batch, torch.arange(5)).tolist() == [0, 2, 4]


# ---------------------------------------------------------------------------------- as users launch it

LAUNCHED = ["tasks.eval.size=4", "rollout.tasks_per_batch=4", "updates=2", "log.checkpoint_every_updates=1"]


def launch(config: str, folder: Path, *arguments: str) -> None:
    """Two processes on the CPU, by a configuration that ships; each says that it was there."""
    seen = folder / "seen"
    seen.mkdir(exist_ok=True)
    (seen / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        f"if 'RANK' in os.environ: pathlib.Path({str(seen)!r}, 'rank' + os.environ['RANK']).touch()\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
    command += ["--config_file", str(CONFIGS / f"{config}.yaml"), "--main_process_port", str(free_port())]
    done = subprocess.run(
        [*command, "-m", "srpo_env.trainers.srpo", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(seen)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in seen.glob("rank*")} == {"rank0", "rank1"}
    shutil.rmtree(seen)


def test_accelerate_launches_a_run_of_two_ranks(tmp_path: Path) -> None:
    launch("ddp", tmp_path, "arithmetic_tiny", *LAUNCHED, f"run={tmp_path / 'run'}")
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "update"]
    assert [line["update"] for line in lines] == [1, 2]
    assert [line["metrics"]["event_completeness"] for line in lines] == [1.0, 1.0]
    assert len({(e.batch, e.episode, e.step) for e in EventLog(tmp_path / "run")}) == len(
        list(EventLog(tmp_path / "run"))
    )
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["000001", "000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.slow
def test_an_adapter_in_shards_trains_and_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    run, last = tmp_path / "run", tmp_path / "run" / "checkpoints" / "000002"
    launch("fsdp2", tmp_path, "arithmetic_tiny", *LAUNCHED, "policies.main.train.lora.rank=2", f"run={run}")
    weights = [(each / "main" / "adapter_model.safetensors").read_bytes() for each in checkpoints(run)]
    assert weights[0] != weights[1]
    shutil.rmtree(last)
    launch("fsdp2", tmp_path, str(run), "--resume")
    assert (last / "main" / "adapter_model.safetensors").read_bytes() == weights[1]
