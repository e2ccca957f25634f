"""The learning tables of docs/reference/results.md: an example over seeds, with its control and its variants.

    python benchmarks/learning_table.py rag                    all rows of one example
    python benchmarks/learning_table.py rag --rows seed-0      some rows, by name
    python benchmarks/learning_table.py rag --report           only read what earlier calls left in runs/table/rag
    python benchmarks/learning_table.py rag --steps 25         the same in fewer steps, in runs/table/rag-25
    python benchmarks/learning_table.py                        every example (some hours on two cores)

Every row is a plain `lightningrl train examples/NAME` with the settings shown; numbers are read from the run's own
store, by the example's own `measures.py`, at the first and the last validation. The picture goes to
docs/NAME_curve.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measuring import ROOT, lightningrl, metrics_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lightningrl.types import Trajectory

RUNS = ROOT / "runs" / "table"
DOCS = ROOT / "docs"
SEEDS = (0, 1, 2)
OF_SEEDS = (("#00441b", "o"), ("#1b9e5a", "s"), ("#a6d96a", "^"))
"""A colour and a marker for each seed, so that lines that meet are told apart, also without colours."""
CONTROL = ("#888888", "x")
OF_VARIANTS = (("#2166ac", "D"), ("#b2182b", "v"), ("#8073ac", "P"), ("#e08214", "*"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One run of a table."""

    name: str
    label: str
    seed: int = 0
    settings: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return self.name.rsplit("-", 1)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """One example's runs."""

    example: str
    title: str
    rows: tuple[Row, ...]
    recipe: str = ""
    """File of the example's folder; empty = its `recipe.toml`."""
    steps: int | None = None
    """None = as many as the recipe has."""

    @property
    def name(self) -> str:
        return Path(self.recipe).stem or self.example

    @property
    def folder(self) -> Path:
        return ROOT / "examples" / self.example

    @property
    def runs(self) -> Path:
        return RUNS / (self.name if self.steps is None else f"{self.name}-{self.steps}")

    def measure(self) -> Callable[[Sequence[Trajectory]], dict[str, float]]:
        """The example's own `measure(trajectories)`: what it counts beside its reward."""
        module = runpy.run_path(str(self.folder / "measures.py"))
        function: Callable[[Sequence[Trajectory]], dict[str, float]] = module["measure"]
        return function


def seeds_and_control(label: str) -> tuple[Row, ...]:
    control = Row(name="control-0", label="control: learning rate 0", settings=("learner.learning_rate=0.0",))
    return (*(Row(name=f"seed-{seed}", label=label, seed=seed) for seed in SEEDS), control)


ALL_CALLS = seeds_and_control("all calls")
TABLES = (
    Table(
        example="text_to_sql",
        title="Text-to-SQL (LangGraph), greedy, unseen databases",
        rows=(
            *seeds_and_control("`write` and `rewrite`"),
            Row(name="write-0", label="only `write`", settings=('policy.trained_agents=["write"]',)),
            Row(name="rewrite-0", label="only `rewrite`", settings=('policy.trained_agents=["rewrite"]',)),
            Row(name="long-0", label="`write` and `rewrite`, 150 steps", settings=("loop.steps=150",)),
        ),
    ),
    Table(example="rag", title="Multi-hop questions (OpenAI Agents SDK), greedy, unseen entities", rows=ALL_CALLS),
    Table(example="math_tools", title="Problems, a calculator (AutoGen), greedy, unseen structures", rows=ALL_CALLS),
    Table(example="calculator_smollm2", title="Sums, SmolLM2-135M-Instruct, greedy, unseen sums", rows=ALL_CALLS),
    Table(
        example="calculator_smollm2",
        recipe="word_problems.toml",
        title="Word problems, SmolLM2-135M-Instruct, greedy, half of them with unseen sentences",
        rows=ALL_CALLS,
    ),
    Table(
        example="two_policies",
        title="A writer and a critic, two policies, greedy, unseen databases",
        rows=(
            *seeds_and_control("writer and critic"),
            Row(name="writer-0", label="only the writer", settings=("policies.critic.trainable=false",)),
            Row(name="critic-0", label="only the critic", settings=("policy.trainable=false",)),
        ),
    ),
)


def main() -> None:
    names = [table.name for table in TABLES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", help=f"of {', '.join(names)}; none = all")
    parser.add_argument("--rows", nargs="+", default=[], help="only these rows, by name")
    parser.add_argument("--steps", type=int, help="of each run, instead of the recipe's; draws no picture")
    parser.add_argument("--report", action="store_true", help="run nothing; print the table of the runs that are there")
    arguments = parser.parse_args()
    if unknown := set(arguments.examples) - set(names):
        parser.error(f"no table for {min(unknown)!r}; there is one for: {', '.join(names)}")
    tables = [
        replace(table, steps=arguments.steps)
        for table in TABLES
        if not arguments.examples or table.name in arguments.examples
    ]
    names_of_rows = {row.name for table in tables for row in table.rows}
    if unknown := set(arguments.rows) - names_of_rows:
        parser.error(f"no row {min(unknown)!r}; rows are: {', '.join(sorted(names_of_rows))}")
    if len(tables) == 1:
        make(tables[0], rows=arguments.rows, is_report=arguments.report)
        return
    options = [*(["--rows", *arguments.rows] if arguments.rows else []), *(["--report"] if arguments.report else [])]
    options += ["--steps", str(arguments.steps)] if arguments.steps else []
    for table in tables:  # each in a process of its own: examples have files of the same names
        subprocess.run([sys.executable, __file__, table.name, *options], check=True)


def make(table: Table, *, rows: Sequence[str], is_report: bool) -> None:
    """Run what is missing, then print the table and draw the picture."""
    for row in table.rows:
        if not is_report and (not rows or row.name in rows):
            run(table, row)
    done = [row for row in table.rows if has_ended(table.runs / row.name)]
    if done:
        print(f"\n{table.title}\n\n{as_markdown(table, done)}\n")
        if table.steps is None:
            draw(table, done)


def run(table: Table, row: Row) -> None:
    folder = table.runs / row.name
    command = lightningrl("train", str(table.folder / table.recipe), "--run", str(folder), "--seed", str(row.seed))
    of_steps = () if table.steps is None else (f"loop.steps={table.steps}", f"learner.total_steps={table.steps}")
    for setting in (*row.settings, *of_steps):
        command += ["--set", setting]
    if has_ended(folder):
        print(f"{row.name}: done before; delete {folder.relative_to(ROOT)} to run it again", flush=True)
        return
    if (folder / "run.json").is_file():
        command = lightningrl("train", "--resume", "--run", str(folder))
    print(f"{row.name}: {' '.join(command[1:])}", flush=True)
    subprocess.run(command, check=True, cwd=ROOT)


def has_ended(folder: Path) -> bool:
    """Whether a run has taken all of its steps; one that was killed is there, too, with its curve so far."""
    if not metrics_of(folder):
        return False
    steps = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["loop"]["steps"]
    return any(line["step"] == steps for line in metrics_of(folder) if "validation/reward" in line)


def as_markdown(table: Table, rows: Sequence[Row]) -> str:
    measured = {row.name: asyncio.run(measure(table, row)) for row in rows}
    columns = list(next(iter(measured.values()))[0])
    lines = [f"| trained | seed | minutes | {' | '.join(columns)} |", "|---|---|---" + "|---" * len(columns) + "|"]
    for row in rows:
        first, last = measured[row.name]
        minutes = metrics_of(table.runs / row.name)[-1]["minutes"]
        lines.append(f"| {row.label} | {row.seed} | {minutes:.1f} | {_changes(columns, first, last)} |")
    seeds = [measured[row.name] for row in rows if row.kind == "seed"]
    if len(seeds) > 1:
        means = [{name: sum(pair[side][name] for pair in seeds) / len(seeds) for name in columns} for side in (0, 1)]
        lines.append(f"| **mean of {len(seeds)} seeds** | | | {_changes(columns, *means)} |")
    return "\n".join(lines)


def _changes(columns: Sequence[str], first: dict[str, float], last: dict[str, float]) -> str:
    return " | ".join(f"{_number(first[name])} → {_number(last[name])}" for name in columns)


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"


async def measure(table: Table, row: Row) -> tuple[dict[str, float], dict[str, float]]:
    """What the first and the last validation of a run say."""
    from lightningrl.records import RolloutFilter
    from lightningrl.types import RolloutMode
    from lightningrl_server.store import SqlStore

    folder, of = table.runs / row.name, table.measure()
    store = await SqlStore.open(f"sqlite:///{(folder / 'store.sqlite').resolve()}", read_only=True)
    try:
        steps = sorted({int(line["step"]) for line in metrics_of(folder) if "validation/reward" in line})
        measured = []
        for step in (steps[0], steps[-1]):
            records = await store.list_rollouts(RolloutFilter(mode=RolloutMode.VALIDATION, step=step, limit=100_000))
            reward = [record.reward for record in records if record.reward is not None]
            trajectories = await store.trajectories([record.spec.id for record in records])
            measured.append({"reward": sum(reward) / max(1, len(reward)), **of(trajectories)})
        return measured[0], measured[1]
    finally:
        await store.close()


def draw(table: Table, rows: Sequence[Row]) -> None:
    """All runs' validation curves over steps, in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=130)
    plot(axes, table, rows)
    axes.set(xlabel="training step", ylabel="validation reward", ylim=(0, 1), title=table.title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False, fontsize="small")
    figure.tight_layout()
    path = DOCS / f"{table.name}_curve.png"
    figure.savefig(path)
    print(f"curve: {path.relative_to(ROOT)}")


def plot(axes: Axes, table: Table, rows: Sequence[Row]) -> None:
    """A line for each run, with what it cost."""
    variants = iter(OF_VARIANTS)
    for row in rows:
        lines = metrics_of(table.runs / row.name)
        points = [(line["step"], line["validation/reward"]) for line in lines if "validation/reward" in line]
        colour, marker = (
            OF_SEEDS[row.seed] if row.kind == "seed" else CONTROL if row.kind == "control" else next(variants)
        )
        seed = f", seed {row.seed}" if row.kind == "seed" else ""
        label = f"{row.label.replace('`', '')}{seed} ({lines[-1]['minutes']:.1f} minutes)"
        axes.plot(
            *zip(*points, strict=True), marker=marker, markersize=4, linewidth=1.4, color=colour, alpha=0.9, label=label
        )


if __name__ == "__main__":
    main()
