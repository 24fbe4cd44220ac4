"""What the tests on a real vLLM share: models, requests, and the learner's own log-probs to compare with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from srpo_env.batch import EventBatch
from srpo_env.errors import MissingModel
from srpo_env.models import resolve_model
from srpo_env.protocols import RequestKey, SampleRequest
from srpo_env.records import Event, Message, Output, Sampling
from srpo_env.trainers.srpo.scoring import Scorer, as_grid

STARTS_WITHIN_S = 400
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
SUMS = ("12+30=", "7+5=", "48+21=", "99+1=")


@pytest.fixture(scope="module", params=["tiny_arithmetic", "smollm2"])
def model_name(request: pytest.FixtureRequest) -> str:
    try:
        resolve_model(request.param)
    except MissingModel as error:
        pytest.skip(str(error))
    return str(request.param)


class Kit:
    """What is asked, and what the learner says to the answers; log-probs may differ by `largest`."""

    largest = 1e-4

    def load(self, name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(resolve_model(name), dtype=torch.float32)

    def requests(self, count: int = 12, before: str = "", **sampling: Any) -> list[SampleRequest]:
        """Sums at several temperatures, one of them 0, with room for one token to sixteen."""
        return [
            SampleRequest(
                (Message(role="user", content=before + SUMS[at % len(SUMS)]),),
                Sampling(**{"temperature": (1.0, 0.5, 1.7, 0.0)[at % 4], "max_tokens": (16, 1, 2)[at % 3], **sampling}),
                at,
                RequestKey(0, 0, 0, at),
            )
            for at in range(count)
        ]

    def worst(self, model: Any, requests: Sequence[SampleRequest], outcomes: Sequence[Any]) -> float:
        """Largest difference between the log-probs that came back and those of a full forward pass."""
        assert all(isinstance(each, Output) for each in outcomes), outcomes
        return max(
            abs(ours - theirs)
            for request, output in zip(requests, outcomes, strict=True)
            for ours, theirs in zip(output.logprobs, self.forced(model, request, output), strict=True)
        )

    @torch.no_grad()
    def forced(self, model: Any, request: SampleRequest, output: Output) -> list[float]:
        assert output.prompt_ids is not None
        assert output.output_ids is not None
        ids = torch.tensor([[*output.prompt_ids, *output.output_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(output.prompt_ids) - 1 : -1].float()
        if request.sampling.temperature == 0:
            return [0.0] * len(output.output_ids)
        rows = torch.log_softmax(logits / request.sampling.temperature, dim=-1)
        return [float(each) for each in rows.gather(1, torch.tensor(output.output_ids)[:, None])[:, 0]]

    @torch.no_grad()
    def worst_of_learner(self, model: Any, events: Sequence[Event]) -> float:
        """Largest difference between log-probs in the log and those that the learner finds for the same batch."""
        batch = EventBatch.from_events(list(events))
        rows = torch.nonzero(batch.mask.any(1)).flatten()
        fresh, _ = as_grid(Scorer(model).score(batch, rows), batch.mask.shape, torch.float32)
        return float((fresh - batch.sampler_logprobs)[batch.mask].abs().max())


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[str]]]:
    """Starts servers of a model, which end with the module, and returns their addresses."""
    place = os.environ.get("SRPO_ENV_VLLM")
    if not place:
        pytest.skip("SRPO_ENV_VLLM is not set: it names a virtual environment with vLLM (`make vllm`)")
    servers: list[subprocess.Popen[bytes]] = []

    def start(
        model: str, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, count: int = 1
    ) -> list[str]:
        ports = [free_port() for _ in range(count)]
        logs = [tmp_path_factory.mktemp("server") / "log" for _ in ports]
        for port, log in zip(ports, logs, strict=True):
            # Not `vllm serve`: vllm-cpu lacks the metadata that it looks for.
            command = [Path(place).resolve() / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server"]
            command += ["--model", resolve_model(model), "--host", "127.0.0.1", "--port", str(port)]
            command += [*arguments, "--max-num-seqs", "64", "--enforce-eager"]
            with log.open("w") as out:
                servers.append(
                    subprocess.Popen(
                        list(map(str, command)),
                        env={**os.environ, **ENVIRONMENT, **(environment or {})},
                        cwd=log.parent,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        for server, port, log in zip(servers[-count:], ports, logs, strict=True):
            wait(server, f"http://127.0.0.1:{port}/health", log)
        return [f"http://127.0.0.1:{port}/v1" for port in ports]

    yield start
    for server in servers:
        os.killpg(server.pid, signal.SIGTERM)
    for server in servers:
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait(server: subprocess.Popen[bytes], health: str, log: Path) -> None:
    last = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < last and server.poll() is None:
        try:
            if httpx.get(health, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    pytest.fail("the server did not start; the end of its log:\n" + "\n".join(log.read_text().splitlines()[-30:]))
