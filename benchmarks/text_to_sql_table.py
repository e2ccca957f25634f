"""The learning table of the README: text-to-SQL over seeds, with its control and by trained role.

    python benchmarks/text_to_sql_table.py            all rows (about an hour on two cores)
    python benchmarks/text_to_sql_table.py both-0     one row, by name
    python benchmarks/text_to_sql_table.py --report   only read what earlier calls left in runs/table

Every row is a plain `lightningrl train examples/text_to_sql` with the settings shown; numbers are read from the run's own store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightningrl.types import Trajectory

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "text_to_sql"
RUNS = ROOT / "runs" / "table"
DOCS = ROOT / "docs"
sys.path.insert(0, str(EXAMPLE))

BOTH = '["write", "rewrite"]'


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run of the table."""

    name: str
    label: str
    seed: int
    settings: tuple[str, ...] = ()


ROWS = (
    *(Row(name=f"both-{seed}", label="`write` and `rewrite`", seed=seed) for seed in (0, 1, 2)),
    Row(name="control-0", label="control: learning rate 0", seed=0, settings=("learner.learning_rate=0.0",)),
    Row(name="write-0", label="only `write`", seed=0, settings=('policy.trained_agents=["write"]',)),
    Row(name="rewrite-0", label="only `rewrite`", seed=0, settings=('policy.trained_agents=["rewrite"]',)),
    Row(name="long-0", label="`write` and `rewrite`, 150 steps", seed=0, settings=("loop.steps=150",)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """Greedy agent on held-out databases."""

    tasks: int
    failed: int
    accuracy: float
    first_try: float
    rescued: float
    """Of the rollouts whose first query was wrong and was rewritten, the share that ended right."""
    rewritten: int
    calls: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"rows to run: {', '.join(row.name for row in ROWS)}; none = all")
    parser.add_argument("--report", action="store_true", help="run nothing; print the table of the runs that are there")
    arguments = parser.parse_args()
    unknown = set(arguments.rows) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"no row {min(unknown)!r}; rows are: {', '.join(row.name for row in ROWS)}")
    if not arguments.report:
        for row in ROWS:
            if not arguments.rows or row.name in arguments.rows:
                run(row)
    done = [row for row in ROWS if (RUNS / row.name / "curve.png").is_file()]
    print(table(done))
    if done:
        draw(done, DOCS / "learning_curve.png")


def run(row: Row) -> None:
    folder = RUNS / row.name
    command = [sys.executable, "-m", "lightningrl.cli", "train", str(EXAMPLE), "--run", str(folder), "--seed", str(row.seed)]
    for setting in row.settings:
        command += ["--set", setting]
    if (folder / "curve.png").is_file():
        print(f"{row.name}: done before; delete {folder.relative_to(ROOT)} to run it again", flush=True)
        return
    if (folder / "run.json").is_file():
        command = [sys.executable, "-m", "lightningrl.cli", "train", "--resume", "--run", str(folder)]
    print(f"{row.name}: {' '.join(command[1:])}", flush=True)
    subprocess.run(command, check=True, cwd=ROOT)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| trained | seed | minutes | accuracy | first try | rescued | calls per rollout |",
        "|---|---|---|---|---|---|---|",
    ]
    finals: list[tuple[Measures, Measures]] = []
    for row in rows:
        folder = RUNS / row.name
        first, last = asyncio.run(measure(folder))
        if row.name.startswith("both"):
            finals.append((first, last))
        minutes = read_metrics(folder)[-1]["minutes"]
        lines.append(
            f"| {row.label} | {row.seed} | {minutes:.1f} | {first.accuracy:.3f} → {last.accuracy:.3f} "
            f"| {first.first_try:.3f} → {last.first_try:.3f} "
            f"| {first.rescued:.3f} → {last.rescued:.3f} (of {first.rewritten} → {last.rewritten}) | {first.calls:.2f} → {last.calls:.2f} |"
        )
    if finals:
        before, after = (sum(pair[side].accuracy for pair in finals) / len(finals) for side in (0, 1))
        tries = [sum(pair[side].first_try for pair in finals) / len(finals) for side in (0, 1)]
        lines.append(f"| **mean of {len(finals)} seeds** | | | **{before:.3f} → {after:.3f}** | {tries[0]:.3f} → {tries[1]:.3f} | | |")
    return "\n".join(lines)


async def measure(folder: Path) -> tuple[Measures, Measures]:
    """The first and the last validation of a run."""
    from lightningrl.store import SqlStore
    from lightningrl.store.protocol import RolloutFilter
    from lightningrl.types import RolloutMode

    store = await SqlStore.open(f"sqlite:///{(folder / 'store.sqlite').resolve()}", read_only=True)
    try:
        steps = sorted({int(row["step"]) for row in read_metrics(folder) if "validation/reward" in row})
        both = []
        for step in (steps[0], steps[-1]):
            records = await store.list_rollouts(RolloutFilter(mode=RolloutMode.VALIDATION, step=step, limit=100_000))
            both.append(judge(await store.trajectories([record.spec.id for record in records])))
        return both[0], both[1]
    finally:
        await store.close()


def judge(trajectories: Sequence[Trajectory]) -> Measures:
    from reward import execution_match, first_try_correct, was_rescued

    ended = [one for one in trajectories if one.output is not None]
    rescues = [verdict for one in ended if (verdict := was_rescued(one.task, one.output)) is not None]
    return Measures(
        tasks=len(trajectories),
        failed=len(trajectories) - len(ended),
        accuracy=sum(execution_match(one.task, one.output, one) for one in ended) / len(trajectories),
        first_try=sum(first_try_correct(one.task, one.output) for one in ended) / len(trajectories),
        rescued=sum(rescues) / max(1, len(rescues)),
        rewritten=len(rescues),
        calls=sum(len(one.transitions) for one in ended) / max(1, len(ended)),
    )


def read_metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def draw(rows: Sequence[Row], path: Path) -> None:
    """All runs' validation curves over steps, in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"both": "#1b7837", "control": "#888888", "write": "#2166ac", "rewrite": "#b2182b", "long": "#7fbf7b"}
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=130)
    labelled: set[str] = set()
    for row in rows:
        kind = row.name.rsplit("-", 1)[0]
        points = [(line["step"], line["validation/reward"]) for line in read_metrics(RUNS / row.name) if "validation/reward" in line]
        label = None if kind in labelled else row.label.replace("`", "") + (" (3 seeds)" if kind == "both" else "")
        labelled.add(kind)
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colours[kind], alpha=0.85, label=label)
    axes.set(
        xlabel="training step of 128 rollouts (50 steps: 3 to 3.5 minutes on 2 CPU cores)",
        ylabel="execution accuracy, unseen databases",
        ylim=(0, 1),
        title="Text-to-SQL, greedy, held-out databases",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path)
    print(f"curve: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
