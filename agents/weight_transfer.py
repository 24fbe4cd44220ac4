"""How do weights get from the learner's GPU to those of the servers, without a file? By vLLM's own transfer over NCCL.

This process is rank 0 of a group; the workers of all servers are the other ranks. vLLM's engine for trainers makes the
group, packs the weights and sends them, and what it asks of "the server" is asked of every replica. No GPU has run
this: the tests send the packed weights by another wire.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from srpo_env.agents.http_client import FailedAttempt, HttpClient, Refused, Replica, as_json
from srpo_env.agents.weight_sync import PAUSE, go_on, named_weights, on_all, post, root
from srpo_env.errors import InvalidRecipe, PolicyError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

T = TypeVar("T")

_REMEDY = (
    "The weights were not handed over, and the servers may hold a part of them. Each must be vLLM 0.32 or newer, "
    """started with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}', on GPUs that the """
    "learner does not use: start all of them anew, then go on with --resume."
)


class Transfer:
    """Sends a model's weights to every replica.

    Once it has failed it stays so: somewhere a worker waits for what does not come, and only a restart ends that.

    Args:
        http: Calls the replicas.
        model: Its weights are sent, from the GPU where they lie.
        policy: The policy's label, for messages.

    Raises:
        InvalidRecipe: The model lies on no GPU.
    """

    def __init__(self, http: HttpClient, model: PreTrainedModel, policy: str) -> None:
        require_gpu(model, policy)
        self._http = http
        self._model = model
        self._policy = policy
        self._servers: _Servers | None = None
        self._engine: Any = None
        self._failure: PolicyError | None = None

    async def send(self, version: str) -> None:
        """Sends the weights as they are now, while no server samples.

        Raises:
            PolicyError: A server did not take them, or vLLM failed here; the servers stay paused.
        """
        if self._failure is not None:
            raise self._failure
        await on_all(self._http, PAUSE)
        try:
            if self._servers is None:
                self._servers = _Servers(self._http, self._policy, await self._workers())
                self._engine = await self._servers.beside(self._open)
            await self._servers.beside(self._send)
        except PolicyError as error:
            self._failure = error
            raise
        await on_all(self._http, go_on(version))

    async def _workers(self) -> list[int]:
        """How many workers each replica has."""

        async def attempt(replica: Replica) -> int:
            said = as_json(await self._http.send(replica, "GET", f"{root(replica)}/get_world_size"))
            workers = said.get("world_size") if isinstance(said, Mapping) else None
            if not isinstance(workers, int):
                raise FailedAttempt(f"{root(replica)}/get_world_size: the reply has no `world_size`.")
            return workers

        return [(await self._http.call(attempt, only=each, in_turn=False))[0] for each in self._http.replicas]

    def _open(self) -> Any:
        assert self._servers is not None
        urls = [replica.url for replica in self._http.replicas]
        return open_engine(self._model, self._servers, own_address(urls), 1 + self._servers.workers)

    def _send(self) -> None:
        if self._model.device.type == "cuda":
            import torch

            torch.cuda.set_device(self._model.device)  # for this thread
            torch.cuda.synchronize()  # vLLM's streams do not wait for the optimiser's
        self._engine.send_weights()


class _Servers:
    """All replicas as the one server that vLLM's engine for trainers talks to, from threads of its own.

    The four methods without an underscore are those of vLLM's `VLLMWeightSyncClient`.
    """

    def __init__(self, http: HttpClient, policy: str, workers: Sequence[int]) -> None:
        self.workers = sum(workers)
        self._http = http
        self._policy = policy
        self._offsets = list(itertools.accumulate(workers, initial=0))[:-1]
        self._loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._call: Future[None] | None = None

    async def beside(self, work: Callable[[], T]) -> T:
        """Does vLLM's part in a thread; where a replica fails meanwhile, that part would wait for it for ever.

        Raises:
            PolicyError: The work failed, or a replica did.
        """
        done: Future[T] = Future()
        done.set_running_or_notify_cancel()
        # A daemon, unlike the threads of asyncio: one that waits for ever does not keep the process from ending.
        threading.Thread(target=_settle, args=(done, work), daemon=True).start()
        waiting = asyncio.wrap_future(done)
        await asyncio.wait((waiting, self._failed), return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            waiting.cancel()
            self._failed.result()
        try:
            return waiting.result()
        except Exception as error:
            if self._call is not None:
                self._call.cancel()
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise PolicyError(f"policy {self._policy!r}: vLLM's weight transfer failed: {what}. {_REMEDY}") from error

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        first = init_info["rank_offset"]
        ranks = [{**init_info, "rank_offset": first + offset} for offset in self._offsets]
        self._post("/init_weight_transfer_engine", [{"init_info": each} for each in ranks])

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", [{"update_info": update_info}] * len(self._offsets))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version  # it is told later, with the cache emptied
        self._post("/finish_weight_update")

    def _post(self, path: str, bodies: Sequence[Any] | None = None) -> None:
        call = self._on_each(path, bodies or [None] * len(self._offsets))
        self._call = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._call.result()

    async def _on_each(self, path: str, bodies: Sequence[Any]) -> None:
        """Makes one call on every replica, once: a second could only find the first one's half."""
        try:
            async with asyncio.TaskGroup() as group:
                for replica, body in zip(self._http.replicas, bodies, strict=True):
                    group.create_task(post(self._http, replica, path, body))
        except* (FailedAttempt, Refused) as errors:
            failure = PolicyError(f"policy {self._policy!r}: {errors.exceptions[0]} {_REMEDY}")
            if not self._failed.done():
                self._failed.set_exception(failure)
            raise failure from None


def open_engine(model: PreTrainedModel, servers: _Servers, address: str, ranks: int) -> Any:
    """Makes the group with the servers' workers and returns vLLM's engine, whose `send_weights` sends the weights."""
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_open_port

    class Source(WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return named_weights(model)

    info = NCCLTrainerInitInfo(address, get_open_port(), ranks, rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=servers, source=Source())


def require_gpu(model: PreTrainedModel, policy: str) -> None:
    """Sees that weights can be sent.

    Raises:
        InvalidRecipe: They lie on no GPU.
    """
    if model.device.type != "cuda":
        raise InvalidRecipe(
            f"policies.{policy}.sample.sync: 'nccl' sends weights from GPU to GPU, and those that are trained lie on "
            f"{str(model.device)!r}; set it to checkpoint, or the policy's `device` to a GPU."
        )


def own_address(urls: Sequence[str]) -> str:
    """Returns this machine's address as the servers see it; that towards another machine, if one is on another."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((str(parts.hostname), parts.port or 80))  # asks for the route; nothing is sent
            found.append(str(route.getsockname()[0]))
    return next((each for each in found if not ipaddress.ip_address(each).is_loopback), found[0])


def _settle(done: Future[T], work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001
        done.set_exception(error)
