"""The whole path around an agent: server process, store, engine link, workers; only the engine is scripted.

async with whole_path(folder, "agent.py:answer", base_dir=here) as path:
    path.engine.enqueue("42")
    (trajectory,) = await path.run({"r1": "What is 6*7?"})

async with running_services(folder) as path:          # several agents, one after the other, on one server
    async with path.workers("agent.py:answer", base_dir=here): ...
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightningrl.dialects import DIALECTS, Dialect
from lightningrl.types import BranchPoint, RolloutMode, RolloutSpec, SamplingSettings, Task, Trajectory, Transition
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_server.engines.link import EngineLink
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import PolicySettings, ServerSettings
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

__all__ = ["WholePath", "repeated_calls", "running_services", "whole_path"]

RUN_KEY: Final = "the-run-key"


@dataclass(frozen=True, kw_only=True, slots=True)
class WholePath:
    """A running server, and its workers as long as there are any."""

    engine: ScriptedEngine
    client: ServerClient
    url: str
    folder: Path
    dialects: tuple[Dialect, ...] = DIALECTS

    async def run(
        self, inputs: Mapping[str, Any], *, wait_s: float = 900.0, timeout_s: float = 900.0
    ) -> list[Trajectory]:
        """Run one rollout per task input, by id, all at once; return their trajectories in that order. `timeout_s` is
        each rollout's."""
        tasks = {rollout_id: Task(id=rollout_id, input=task_input) for rollout_id, task_input in inputs.items()}
        return await self.run_tasks(tasks, wait_s=wait_s, timeout_s=timeout_s)

    async def run_tasks(
        self,
        tasks: Mapping[str, Task],
        *,
        wait_s: float = 900.0,
        timeout_s: float = 900.0,
        sampling: SamplingSettings | None = None,
    ) -> list[Trajectory]:
        """Run one rollout per task, by the rollout's id, as `run` does."""
        specs = [
            RolloutSpec(id=name, task=task, group_id="g", timeout_s=timeout_s, sampling=sampling)
            for name, task in tasks.items()
        ]
        return await self._run(specs, wait_s)

    async def branch(self, recorded: Trajectory, calls: int, *, wait_s: float = 900.0) -> Trajectory:
        """Run the agent again, its first so many calls answered as they were."""
        point = BranchPoint(rollout_id=recorded.rollout_id, attempt=recorded.attempt, calls=calls)
        name = f"{recorded.rollout_id}.after-{calls}"
        spec = RolloutSpec(
            id=name, task=recorded.task, group_id=name, mode=RolloutMode.BRANCH, timeout_s=wait_s, branch=point
        )
        return (await self._run([spec], wait_s))[0]

    async def _run(self, specs: Sequence[RolloutSpec], wait_s: float) -> list[Trajectory]:
        await self.client.create_rollouts(specs)
        ids = [spec.id for spec in specs]
        ends = time.monotonic() + wait_s
        while len(await self.client.wait(ids, wait_s)) < len(ids) and time.monotonic() < ends:
            pass  # the server answers a wait after a minute at the latest
        return list(await self.client.trajectories(ids))

    async def run_one(self, rollout_id: str, task_input: Any) -> Trajectory:
        """Run a single rollout; return its trajectory."""
        (trajectory,) = await self.run({rollout_id: task_input})
        return trajectory

    def workers(
        self,
        agent: str | Mapping[str, Any],
        *,
        base_dir: Path,
        adapters: Sequence[str] = (),
        workers: int = 1,
        concurrency: int = 1,
    ) -> WorkerPool:
        """Return workers for an agent, as a context manager. `base_dir` has the agent's file."""
        settings: Any = {"workers": workers, "concurrency": concurrency, "adapters": adapters, "base_dir": base_dir}
        return WorkerPool(self.url, RUN_KEY, agent, log_folder=self.folder, dialects=self.dialects, **settings)


def repeated_calls(branch: Trajectory, recorded: Sequence[Transition]) -> int:
    """Count the calls of a branch that repeat recorded ones, token for token."""
    by_id = {call.id: call for call in recorded}
    repeated = [(call, by_id[call.replayed_from]) for call in branch.transitions if call.replayed_from is not None]
    return sum(
        np.array_equal(call.prompt_ids, was.prompt_ids)
        and np.array_equal(call.completion_ids, was.completion_ids)
        and np.array_equal(call.logprobs, was.logprobs)
        and not call.trainable
        for call, was in repeated
    )


@asynccontextmanager
async def running_services(
    folder: Path, *, engine: ScriptedEngine | None = None, dialects: Sequence[Dialect] = DIALECTS
) -> AsyncIterator[WholePath]:
    """Run all but workers. `folder` takes the store and the logs."""
    engine = engine or ScriptedEngine(tiny_tokenizer())
    engine.tokenizer.save_pretrained(folder / "policy")
    settings = ServerSettings(
        store_url=f"sqlite:///{folder}/store.db",
        run_key=RUN_KEY,
        policies={engine.policy: PolicySettings(model=folder / "policy")},
        dialects=tuple(dialects),
    )
    async with (
        ServerProcess(settings, log_path=folder / "server.log") as server,
        ServerClient(server.url, RUN_KEY) as client,
        EngineLink(engine, server.url, RUN_KEY),
    ):
        yield WholePath(engine=engine, client=client, url=server.url, folder=folder, dialects=tuple(dialects))


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
    """Run it. `folder` takes the store and the logs; `base_dir` has the agent's file."""
    async with (
        running_services(folder, engine=engine) as path,
        path.workers(agent, base_dir=base_dir, adapters=adapters, workers=workers, concurrency=concurrency),
    ):
        yield path
