"""How often branches of the example agents come to their branch point with the tokens that were recorded.

    python benchmarks/branch_points.py [--rollouts 16] [examples/text_to_sql …]

Each example's own recipe, agent and starting policy: `--rollouts` rollouts are sampled, and each is branched once after every call.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import lightningrl
from lightningrl.records import RolloutFilter
from lightningrl.types import Outcome, RolloutMode
from lightningrl_server.store import SqlStore

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ("text_to_sql", "rag", "math_tools", "from_scratch")
GROUP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", type=Path, default=[ROOT / "examples" / name for name in EXAMPLES])
    parser.add_argument("--rollouts", type=int, default=16)
    chosen = parser.parse_args()
    table = Table("example", "rollouts", "calls", "branches", "reached, same tokens", "diverged", "ended otherwise", box=None)
    for example in chosen.examples:
        with tempfile.TemporaryDirectory() as scratch:
            run = Path(scratch) / "run"
            settings = {
                "loop.steps": 1,
                "loop.tasks_per_step": max(1, chosen.rollouts // GROUP),
                "loop.group_size": GROUP,
                "validation.every": 0,
                "credit.use": "branches",
                "credit.options": {"samples": 1, "equal": True},
                "credit.compare": "group",
            }
            lightningrl.train(example, run=run, settings=settings)
            table.add_row(example.name, *map(str, asyncio.run(count(run))))
    Console().print(table)


async def count(run: Path) -> tuple[int, int, int, str, int, int]:
    store = await SqlStore.open(f"sqlite:///{run / 'store.sqlite'}", read_only=True)
    try:
        records = [one.spec for mode in (RolloutMode.TRAIN, RolloutMode.BRANCH) for one in await store.list_rollouts(of(mode))]
        found = {one.rollout_id: one for one in await store.trajectories([spec.id for spec in records])}
    finally:
        await store.close()
    branches = [one for one in found.values() if one.branch is not None]
    reached = 0
    for one in branches:
        assert one.branch is not None
        recorded = found[one.branch.rollout_id].transitions[: one.branch.calls]
        repeated = one.transitions[: one.branch.calls]
        reached += len(repeated) == len(recorded) and all(
            np.array_equal(was.prompt_ids, now.prompt_ids) and np.array_equal(was.completion_ids, now.completion_ids)
            for was, now in zip(recorded, repeated, strict=True)
        )
    sources = [one for one in found.values() if one.branch is None]
    diverged = sum(one.outcome is Outcome.DIVERGED for one in branches)
    failed = sum(one.outcome not in (Outcome.DIVERGED, Outcome.SUCCEEDED) for one in branches)
    share = f"{reached} ({reached / max(1, len(branches)):.1%})"
    return len(sources), sum(len(one.transitions) for one in sources), len(branches), share, diverged, failed


def of(mode: RolloutMode) -> RolloutFilter:
    return RolloutFilter(mode=mode, limit=100_000)


if __name__ == "__main__":
    main()
