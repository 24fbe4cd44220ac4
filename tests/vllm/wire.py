"""Stands in for NCCL and CUDA under vLLM's weight transfer, in the server and here: gloo, and no streams.

All else is vLLM's own: its engines for trainers and workers, the meeting of the two, the packing, the loading.
`python -m` is no way into a server, so this module is a plugin of vLLM: see `plugin`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch


class Stream:
    """Has always done its work."""

    def synchronize(self) -> None:
        pass


class Gloo:
    """Sends from one member of a group to all others."""

    def __init__(self, host: str, port: int, rank: int, ranks: int) -> None:
        from vllm.distributed.utils import StatelessProcessGroup

        self.meeting = StatelessProcessGroup.create(host, port, rank, ranks)
        self.group = torch.distributed.ProcessGroupGloo(self.meeting.store, rank, ranks, timedelta(seconds=60))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        self.group.broadcast(tensor, src).wait()


def of_worker(info: Any, parallel: Any) -> Gloo:
    return Gloo(info.master_address, info.master_port, parallel.rank + info.rank_offset, info.world_size)


def of_trainer(info: Any) -> Gloo:
    return Gloo(info.master_address, info.master_port, 0, info.world_size)


def no_stream(stream: Any) -> AbstractContextManager[None]:
    return nullcontext()


CHANGES: dict[str, Any] = {
    "vllm.distributed.weight_transfer.nccl_engine.worker_init_process_group": of_worker,
    "vllm.distributed.weight_transfer.nccl_engine.open_trainer_endpoint": of_trainer,
    "vllm.distributed.weight_transfer.packed_tensor._get_streams": lambda device, count: (Stream(),) * count,
    "torch.cuda.stream": no_stream,
    "torch.accelerator.current_device_index": lambda: 0,
    "torch.accelerator.synchronize": lambda: None,
}


def install() -> None:
    """Changes vLLM in a process of its server."""
    import importlib

    for name, value in CHANGES.items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)


def plugin(folder: Path) -> str:
    """Returns a folder which, on PYTHONPATH, makes vLLM's processes install this."""
    about = folder / "wire-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: wire\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nwire = wire_of_tests:install\n")
    (folder / "wire_of_tests.py").write_text(Path(__file__).read_text())
    return str(folder)
