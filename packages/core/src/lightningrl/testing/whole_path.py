"""The whole path around an agent: server process, store, engine link, workers; only the engine is scripted.

async with whole_path(folder, "agent.py:answer", base_dir=here) as path:
    path.engine.enqueue("42")
    (trajectory,) = await path.run({"r1": "What is 6*7?"})
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightningrl.gateway.engine_link import EngineLink
from lightningrl.runtime.pool import WorkerPool
from lightningrl.server.client import ServerClient
from lightningrl.server.launcher import ServerProcess
from lightningrl.server.settings import PolicySettings, ServerSettings
from lightningrl.testing.scripted_engine import ScriptedEngine
from lightningrl.testing.tokenizers import tiny_tokenizer
from lightningrl.types import RolloutSpec, Task, Trajectory

__all__ = ["WholePath", "whole_path"]

RUN_KEY: Final = "the-run-key"


@dataclass(frozen=True, kw_only=True, slots=True)
class WholePath:
    """A running server with its workers."""

    engine: ScriptedEngine
    client: ServerClient
    url: str

    async def run(self, inputs: Mapping[str, Any], *, wait_s: float = 60.0, timeout_s: float = 120.0) -> list[Trajectory]:
        """One rollout per task input, by id, all at once; their trajectories in that order. `timeout_s` is each rollout's."""
        specs = [RolloutSpec(id=rid, task=Task(id=rid, input=one), group_id="g", timeout_s=timeout_s) for rid, one in inputs.items()]
        await self.client.create_rollouts(specs)
        await self.client.wait(list(inputs), wait_s)
        return list(await self.client.trajectories(list(inputs)))


@asynccontextmanager
async def whole_path(
    folder: Path,
    agent: str,
    *,
    base_dir: Path,
    engine: ScriptedEngine | None = None,
    adapters: Sequence[str] = (),
    workers: int = 1,
    concurrency: int = 1,
) -> AsyncIterator[WholePath]:
    """`folder` takes the store and the logs; `base_dir` has the agent's file."""
    engine = engine or ScriptedEngine(tiny_tokenizer())
    engine.tokenizer.save_pretrained(folder / "policy")
    settings = ServerSettings(
        store_url=f"sqlite:///{folder}/store.db", run_key=RUN_KEY, policies={engine.policy: PolicySettings(model=folder / "policy")}
    )
    async with (
        ServerProcess(settings, log_path=folder / "server.log") as server,
        ServerClient(server.url, RUN_KEY) as client,
        EngineLink(engine, server.url, RUN_KEY),
        WorkerPool(
            server.url,
            RUN_KEY,
            agent,
            workers=workers,
            concurrency=concurrency,
            adapters=adapters,
            base_dir=base_dir,
            log_folder=folder,
        ),
    ):
        yield WholePath(engine=engine, client=client, url=server.url)
