"""The learning tables of docs/reference/results.md: an example over seeds, with its controls and its variants.

    python benchmarks/learning_table.py rag                    all rows of one example
    python benchmarks/learning_table.py rag --rows seed-0      some rows, by name
    python benchmarks/learning_table.py rag --report           only read what earlier calls left in runs/table/rag
    python benchmarks/learning_table.py rag --steps 25         the same in fewer steps, in runs/table/rag-25
    python benchmarks/learning_table.py rag-credit --steps 25  the example with other credit, five seeds of each
    python benchmarks/learning_table.py                        every example (some hours on two cores)

Every row is a plain `lightningrl train examples/NAME` with the settings shown, then one `lightningrl eval` of its last
checkpoint on the example's test tasks, which chose nothing. Numbers are read from the run's own store, by the example's
own `measures.py`, at the first and the last validation. The picture goes to docs/NAME_curve.png; tables of credit have
none.

Brackets are 95 % intervals: in a run's row over tasks, in a mean's row over seeds (Student), of a difference
over the seeds of both (Welch; of several all at once). A claim about the recipe is the seeds'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measuring import ROOT, lightningrl, metrics_of

from lightningrl.figures import LEVEL, Interval, mean_interval, welch_interval
from lightningrl_training.evaluation.result import read_evaluation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lightningrl.types import Trajectory

RUNS = ROOT / "runs" / "table"
DOCS = ROOT / "docs"
SEEDS = (0, 1, 2)
OF_SEEDS = (("#00441b", "o"), ("#1b9e5a", "s"), ("#a6d96a", "^"), ("#0571b0", "D"), ("#67a9cf", "v"))
"""A colour and a marker for each seed, so that lines that meet are told apart, also without colours."""
CONTROLS = (("#333333", "x"), ("#777777", "+"), ("#bbbbbb", "1"))
GRAIN = 1 / 160
"""The least by which two scores of 160 tasks differ: seeds that happen to agree are not certain (Sheppard)."""
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
    test: str
    """Loader of the tasks that chose nothing, beside the recipe."""
    steps: int | None = None
    """None = as many as the recipe has."""
    about: str = ""
    """What it varies; empty = nothing but seeds and parts of the recipe."""

    @property
    def name(self) -> str:
        return f"{Path(self.recipe).stem or self.example}{'-' * bool(self.about)}{self.about}"

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
    rate = ("learner.learning_rate=0.0",)
    return (
        *(Row(name=f"seed-{seed}", label=label, seed=seed) for seed in SEEDS),
        *(Row(name=f"control-{seed}", label="control: learning rate 0", seed=seed, settings=rate) for seed in SEEDS),
    )


ALL_CALLS = seeds_and_control("all calls")
CREDIT = {
    "dr_grpo": (),
    "maxrl": ("credit.use=maxrl",),
    "states": ("credit.use=states", "credit.options.shrinkage=2.0", "credit.options.gate=4.0"),
    "turn_gae": ("credit.use=turn_gae", "credit.whiten=true", "learner.critic.model=trunk"),
    "turns": ("credit.use=turns", "intermediate_rewards.tools.use=tool_status"),
}
"""Settings by assigner, untuned. `dr_grpo` is the recipe as it is, which the others are held against."""
CREDIT_SEEDS = 5


def credit_table(example: str, title: str) -> Table:
    """An example's recipe with other assigners."""
    rows = (
        Row(name=f"{use}-{seed}", label=f"`{use}`", seed=seed, settings=settings)
        for use, settings in CREDIT.items()
        for seed in range(CREDIT_SEEDS)
    )
    return Table(example=example, title=title, rows=tuple(rows), test="data.py:test_tasks", about="credit")


TABLES = (
    Table(
        example="text_to_sql",
        test="data.py:test_tasks",
        title="Text-to-SQL (LangGraph), greedy, unseen databases",
        rows=(
            *seeds_and_control("`write` and `rewrite`"),
            Row(name="write-0", label="only `write`", settings=('policy.trained_agents=["write"]',)),
            Row(name="rewrite-0", label="only `rewrite`", settings=('policy.trained_agents=["rewrite"]',)),
            Row(name="long-0", label="`write` and `rewrite`, 150 steps", settings=("loop.steps=150",)),
        ),
    ),
    Table(
        example="rag",
        test="data.py:test_tasks",
        title="Multi-hop questions (OpenAI Agents SDK), greedy, unseen entities",
        rows=ALL_CALLS,
    ),
    Table(
        example="math_tools",
        test="data.py:test_tasks",
        title="Problems, a calculator (AutoGen), greedy, unseen structures",
        rows=ALL_CALLS,
    ),
    Table(
        example="calculator_smollm2",
        test="sums.py:test",
        title="Sums, SmolLM2-135M-Instruct, greedy, unseen sums",
        rows=ALL_CALLS,
    ),
    Table(
        example="calculator_smollm2",
        recipe="word_problems.toml",
        test="word_problems.py:test",
        title="Word problems, SmolLM2-135M-Instruct, greedy, half of them with unseen sentences",
        rows=ALL_CALLS,
    ),
    Table(
        example="shop",
        test="shop.py:test",
        title="A shop's prices and totals (LangChain), SmolLM2-135M-Instruct tuned on traces, greedy, unseen questions",
        rows=tuple(Row(name=f"seed-{seed}", label="all calls", seed=seed) for seed in range(5)),
    ),
    Table(
        example="two_policies",
        test="../text_to_sql/data.py:test_tasks",
        title="A writer and a critic, two policies, greedy, unseen databases",
        rows=(
            *seeds_and_control("writer and critic"),
            Row(name="writer-0", label="only the writer", settings=("policies.critic.trainable=false",)),
            Row(name="critic-0", label="only the critic", settings=("policy.trainable=false",)),
        ),
    ),
    credit_table("text_to_sql", "Text-to-SQL with other credit"),
    credit_table("math_tools", "Word problems with other credit"),
    credit_table("rag", "Multi-hop questions with other credit"),
)


def main() -> None:
    names = [table.name for table in TABLES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", help=f"of {', '.join(names)}; none = all but those of credit")
    parser.add_argument("--rows", nargs="+", default=[], help="only these rows, by name")
    parser.add_argument("--steps", type=int, help="of each run, instead of the recipe's; draws no picture")
    parser.add_argument("--report", action="store_true", help="run nothing; print the table of the runs that are there")
    arguments = parser.parse_args()
    if unknown := set(arguments.examples) - set(names):
        parser.error(f"no table for {min(unknown)!r}; there is one for: {', '.join(names)}")
    tables = [
        replace(table, steps=arguments.steps)
        for table in TABLES
        if (table.name in arguments.examples if arguments.examples else not table.about)
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
        if table.steps is None and not table.about:
            draw(table, done)


def run(table: Table, row: Row) -> None:
    """Train what is not trained yet, then examine it on the test tasks, once."""
    folder = table.runs / row.name
    command = lightningrl("train", str(table.folder / table.recipe), "--run", str(folder), "--seed", str(row.seed))
    of_steps = () if table.steps is None else (f"loop.steps={table.steps}", f"learner.total_steps={table.steps}")
    for setting in (*row.settings, *of_steps):
        command += ["--set", setting]
    if has_ended(folder):
        print(f"{row.name}: trained before; delete {folder.relative_to(ROOT)} to run it again", flush=True)
    else:
        if (folder / "run.json").is_file():
            command = lightningrl("train", "--resume", "--run", str(folder))
        _run(row, command)
    if not test_of(folder).is_file():
        _run(
            row,
            lightningrl("eval", f"{folder}@newest", "--tasks", table.test, "--out", str(test_of(folder))),
        )


def _run(row: Row, command: Sequence[str]) -> None:
    print(f"{row.name}: {' '.join(command[1:])}", flush=True)
    subprocess.run(command, check=True, cwd=ROOT)


def test_of(folder: Path) -> Path:
    """File of a run's evaluation on the test tasks."""
    return folder / "test.json"


def has_ended(folder: Path) -> bool:
    """Whether a run has taken all of its steps; one that was killed is there, too, with its curve so far."""
    if not metrics_of(folder):
        return False
    steps = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["loop"]["steps"]
    return any(line["step"] == steps for line in metrics_of(folder) if "validation/reward" in line)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The numbers of one run."""

    first: dict[str, float]
    """First validation, by column."""
    last: dict[str, float]
    after: Interval
    """Reward of the last validation, over its tasks."""
    test: Interval | None
    """Reward on the test tasks, over tasks; None = not examined yet."""


def as_markdown(table: Table, rows: Sequence[Row]) -> str:
    """The table: runs, means over seeds, and trained less control."""
    measured = {row.name: asyncio.run(measure(table, row)) for row in rows}
    columns = list(next(iter(measured.values())).first)
    lines = [
        f"| trained | seed | minutes | {' | '.join(columns)} | test |",
        "|---|---|---" + "|---" * len(columns) + "|---|",
    ]
    for row in rows:
        one = measured[row.name]
        minutes = metrics_of(table.runs / row.name)[-1]["minutes"]
        changes = _changes(columns, one.first, one.last, {"reward": one.after})
        test = "-" if one.test is None else f"{one.test:.3f}"
        lines.append(f"| {row.label} | {row.seed} | {minutes:.1f} | {changes} | {test} |")
    kinds = {row.kind: row.label for row in rows}
    several = {
        kind: runs for kind in kinds if len(runs := [measured[row.name] for row in rows if row.kind == kind]) > 1
    }
    for kind, runs in several.items():
        lines.append(_mean_row(columns, runs, f"**{kinds[kind]}, mean of {len(runs)} seeds**"))
    base = "dr_grpo" if table.about else "control"
    others = [kind for kind in several if kind != base] if base in several else []
    level = 1.0 - (1.0 - LEVEL) / max(1, len(others))  # of several differences all hold at once (Bonferroni)
    for kind in others:
        label = f"**{kinds[kind]} less {kinds[base].partition(':')[0]}**"
        lines.append(_difference_row(columns, several[kind], several[base], label, level))
    return "\n".join(lines)


def _mean_row(columns: Sequence[str], seeds: Sequence[Measured], label: str) -> str:
    first, last = ({name: fmean(side[name] for side in sides) for name in columns} for sides in _sides(seeds))
    after = mean_interval([one.last["reward"] for one in seeds], bounds=(0.0, 1.0), grain=GRAIN)
    tests = [one.test.mean for one in seeds if one.test is not None]
    test = f"{mean_interval(tests, bounds=(0.0, 1.0), grain=GRAIN):.3f}" if len(tests) == len(seeds) else "-"
    return f"| {label} | | | {_changes(columns, first, last, {'reward': after})} | {test} |"


def _difference_row(
    columns: Sequence[str], first: Sequence[Measured], second: Sequence[Measured], label: str, level: float
) -> str:
    """The first's mean less the second's, in the last validation and on the test tasks."""
    after = welch_interval(
        [one.last["reward"] for one in first], [one.last["reward"] for one in second], grain=GRAIN, level=level
    )
    tests = [[one.test.mean for one in runs if one.test is not None] for runs in (first, second)]
    test = "-"
    if all(len(each) > 1 for each in tests):
        test = f"{welch_interval(*tests, grain=GRAIN, level=level):+.3f}"
    cells = [f"{after:+.3f}" if name == "reward" else "" for name in columns]
    return f"| {label} | | | {' | '.join(cells)} | {test} |"


def _sides(seeds: Sequence[Measured]) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    return [one.first for one in seeds], [one.last for one in seeds]


def _changes(
    columns: Sequence[str], first: dict[str, float], last: dict[str, float], intervals: Mapping[str, Interval]
) -> str:
    return " | ".join(
        f"{_number(first[name])} → {format(intervals[name], '.3f') if name in intervals else _number(last[name])}"
        for name in columns
    )


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"


async def measure(table: Table, row: Row) -> Measured:
    """Read what the first and the last validation of a run say, and its test. A failure of the agent's is a 0."""
    from lightningrl.records import RolloutFilter
    from lightningrl.types import Outcome, RolloutMode
    from lightningrl_server.store import SqlStore

    folder, of = table.runs / row.name, table.measure()
    store = await SqlStore.open(f"sqlite:///{(folder / 'store.sqlite').resolve()}", read_only=True)
    try:
        steps = sorted({int(line["step"]) for line in metrics_of(folder) if "validation/reward" in line})
        measured: list[dict[str, float]] = []
        rewards: list[float] = []
        for step in (steps[0], steps[-1]):
            records = await store.list_rollouts(RolloutFilter(mode=RolloutMode.VALIDATION, step=step, limit=100_000))
            rewards = [
                record.reward or 0.0
                for record in records
                if record.reward is not None or (record.outcome is not None and Outcome(record.outcome).is_agents_own)
            ]
            trajectories = await store.trajectories([record.spec.id for record in records])
            measured.append({"reward": fmean(rewards), **of(trajectories)})
        after = mean_interval(rewards, bounds=(0.0, 1.0))
        return Measured(first=measured[0], last=measured[1], after=after, test=read_test(folder))
    finally:
        await store.close()


def read_test(folder: Path) -> Interval | None:
    path = test_of(folder)
    return read_evaluation(path).reward if path.is_file() else None


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
            OF_SEEDS[row.seed]
            if row.kind == "seed"
            else CONTROLS[row.seed]
            if row.kind == "control"
            else next(variants)
        )
        seed = f", seed {row.seed}" if row.kind in {"seed", "control"} else ""
        label = f"{row.label.replace('`', '')}{seed} ({lines[-1]['minutes']:.1f} minutes)"
        axes.plot(
            *zip(*points, strict=True), marker=marker, markersize=4, linewidth=1.4, color=colour, alpha=0.9, label=label
        )


if __name__ == "__main__":
    main()
