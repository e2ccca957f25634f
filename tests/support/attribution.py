"""A crowd of rollouts for the attribution tests of all adapters: the same scene, another framework's agents.

tasks ──► ScriptedServer (holds every answer until all of them are open) ◄── WorkerPool ── the framework's unmodified
agents
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sizes import PATIENCE_S

from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_testing.scripted_server import ScriptedServer

__all__ = ["Crowd", "run_crowd"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """How many rollouts are at once, and in how many workers."""

    rollouts: int
    shared_workers: int
    """Workers that run many rollouts each."""
    exclusive_workers: int
    """Workers that run one rollout at a time."""

    def names(self, kinds: Sequence[str]) -> dict[str, str]:
        """Rollout ids and their kinds, which come in turn."""
        return {f"{kinds[number % len(kinds)]}-{number}": kinds[number % len(kinds)] for number in range(self.rollouts)}


async def run_crowd(
    server: ScriptedServer,
    folder: Path,
    agent: str,
    tasks: Mapping[str, Any],
    *,
    adapter: str,
    base_dir: Path,
    workers: int,
    concurrency: int,
) -> None:
    """Run `agent` on tasks by rollout id, to their ends."""
    for rollout_id, task in tasks.items():
        server.add_rollout(rollout_id, task, timeout_s=PATIENCE_S)
    pool = WorkerPool(
        server.url,
        server.run_key,
        agent,
        workers=workers,
        concurrency=concurrency,
        adapters=[adapter],
        base_dir=base_dir,
        log_folder=folder,
    )
    async with pool:
        await server.wait_finished(timeout_s=PATIENCE_S)
