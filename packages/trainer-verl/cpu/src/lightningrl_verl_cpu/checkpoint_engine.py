"""Checkpoint engine `lightningrl_gloo`: weights from the first trainer rank to every replica, over gloo.

verl imports this module where `rollout.checkpoint_engine.custom_backend_module` names it. A new process group for each
update:

    actor ranks    0 ──broadcast──► 1 … n   replica workers
                  -1 (drain only: gathering a sharded weight is a collective of all actor ranks)
"""

from __future__ import annotations

import asyncio
import datetime
import pickle
import socket
from collections.abc import AsyncIterator, Iterable
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from lightningrl_verl_cpu.settings import CHECKPOINT_ENGINE

__all__ = ["GlooCheckpointEngine"]

_TIMEOUT = datetime.timedelta(seconds=120)


@CheckpointEngineRegistry.register(CHECKPOINT_ENGINE)
class GlooCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One end of the transfer. `is_master` marks the first actor rank."""

    def __init__(self, bucket_size: int = 0, is_master: bool = False, **_: Any) -> None:
        self._is_master = is_master
        self._rank = -1
        self._group: ProcessGroupGloo | None = None

    def prepare(self) -> dict[str, Any]:
        """The master's address; nothing from the others."""
        if not self._is_master:
            return {}
        with socket.socket() as probe:
            probe.bind(("", 0))
            return {"host": ray.util.get_node_ip_address().strip("[]"), "port": probe.getsockname()[1]}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group`, one for each actor rank and one for each replica worker."""
        size, master = rollout_world_size + 1, metadata[0]
        actors = [0, *[-1] * (actor_wg_world_size - 1)]
        return (
            {"rank": actors, "world_size": [size] * actor_wg_world_size, "master": [master] * actor_wg_world_size},
            {
                "rank": list(range(1, size)),
                "world_size": [size] * rollout_world_size,
                "master": [master] * rollout_world_size,
            },
        )

    def init_process_group(self, rank: int, world_size: int, master: dict[str, Any]) -> None:
        self._rank = rank
        if rank < 0:
            return
        store = TCPStore(master["host"], master["port"], world_size, is_master=rank == 0, timeout=_TIMEOUT)
        self._group = ProcessGroupGloo(store, rank, world_size, _TIMEOUT)

    def finalize(self) -> None:
        self._group = None

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Broadcast each weight; ranks without a group only drain the iterator."""
        for name, weight in weights:
            if self._group is not None:
                values = weight.detach().cpu().contiguous()
                await asyncio.to_thread(self._send, (name, values.shape, values.dtype))
                await asyncio.to_thread(self._broadcast, values)
        if self._group is not None:
            await asyncio.to_thread(self._send, None)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield name and weight, as sent."""
        while (header := await asyncio.to_thread(self._receive)) is not None:
            name, shape, dtype = header
            yield name, await asyncio.to_thread(self._broadcast, torch.empty(shape, dtype=dtype))

    def _broadcast(self, tensor: Tensor) -> Tensor:
        assert self._group is not None, "init_process_group comes first"
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()  # type: ignore[attr-defined]
        return tensor

    def _send(self, header: tuple[str, torch.Size, torch.dtype] | None) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
        self._broadcast(torch.tensor([data.numel()]))
        self._broadcast(data)

    def _receive(self) -> tuple[str, torch.Size, torch.dtype] | None:
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        data = self._broadcast(torch.zeros(int(size), dtype=torch.uint8))
        packed = data.numpy().tobytes()
        header: tuple[str, torch.Size, torch.dtype] | None = pickle.loads(packed)  # noqa: S301 - from our own trainer
        return header
