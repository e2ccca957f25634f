"""One end of a weight transfer: `process_gloo.py RANK PORT`. Rank 0 sends; the others print, as JSON, the sums of what
they get."""

import asyncio
import json
import sys

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

import lightningrl_verl_cpu.checkpoint_engine  # noqa: F401 - registers
from lightningrl_verl_cpu.settings import CHECKPOINT_ENGINE

rank, port = int(sys.argv[1]), int(sys.argv[2])
cls = CheckpointEngineRegistry.get(CHECKPOINT_ENGINE)
actors, replicas = cls.build_topology(1, 1, [{"host": "127.0.0.1", "port": port}])
arguments = {name: values[0] for name, values in (replicas if rank else actors).items()}


async def main() -> None:
    engine = CheckpointEngineRegistry.new(CHECKPOINT_ENGINE, bucket_size=1, is_master=rank == 0)
    engine.init_process_group(**arguments)
    if rank == 0:
        await engine.send_weights(
            (("a", torch.arange(6.0).view(2, 3).t()), ("b", torch.ones(0)), ("c", torch.tensor(7, dtype=torch.int32)))
        )
    else:
        print(
            json.dumps([[name, str(weight.dtype), weight.tolist()] async for name, weight in engine.receive_weights()])
        )
    engine.finalize()


asyncio.run(main())
