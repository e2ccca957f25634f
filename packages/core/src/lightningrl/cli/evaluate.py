"""`lightningrl eval`: how good a policy is, and which of two is better."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from lightningrl.clean import printable
from lightningrl.cli import escape
from lightningrl.cli.stopping import progress_bar
from lightningrl.evaluation.comparison import Comparison
from lightningrl.evaluation.report import EvaluationReport
from lightningrl.evaluation.result import Evaluation
from lightningrl.evaluation.statistics import Interval, Verdict
from lightningrl.run import evaluate

__all__ = ["evaluate_command"]


def evaluate_command(policy: str, *, as_json: bool, **options: Any) -> None:
    """`options`: of `lightningrl.evaluate`."""
    with progress_bar("stopped; what has run lies in the folder of its rollouts, without results") as show:
        report = evaluate(policy, show=show, **options)
    if as_json:
        sys.stdout.write(json.dumps(report.numbers(), ensure_ascii=False) + "\n")
        return
    _print(Console(), report)


def _print(console: Console, report: EvaluationReport) -> None:
    table = Table(Column(""), *(Column(_shown(one.policy), justify="right") for one in report.evaluations), box=None, padding=(0, 2, 0, 0))
    for name, cell in _rows(report.evaluations[0]):
        table.add_row(name, *(cell(one) for one in report.evaluations))
    for key in report.slices:
        for value in report.evaluations[0].slice_rewards(key):
            cells = (one.slice_rewards(key).get(value) if _has(one, key) else None for one in report.evaluations)
            table.add_row(f"  {_shown(key)} = {_shown(value)}", *map(_interval, cells))
    console.print(table, highlight=False)
    if report.comparison is not None:
        _print_comparison(console, report.comparison, report.evaluations[0].asked)
    console.print(f"kept in {report.path}", highlight=False, soft_wrap=True)
    for one in report.evaluations:
        console.print(f"rollouts: lightningrl rollouts list --run {one.rollouts}", highlight=False, soft_wrap=True)


def _rows(first: Evaluation) -> list[tuple[str, Callable[[Evaluation], str]]]:
    return [
        ("tasks × samples", lambda one: f"{len(one.tasks)} × {one.samples}"),
        ("sampled at", lambda one: "as the agent asks" if one.sampling is None else f"temperature {one.sampling.temperature:g}"),
        *((f"pass@{k}", lambda one, k=k: _interval(one.pass_at(k)) if k <= one.samples else "-") for k in first.ks),
        ("mean reward", lambda one: _interval(one.reward)),
        ("failed (lowest reward)", lambda one: str(one.failed)),
        ("without a result", lambda one: str(one.without_result)),
        ("tokens of a rollout", lambda one: "-" if one.tokens is None else f"{one.tokens[0]:.0f} + {one.tokens[1]:.0f}"),
        ("seconds of a rollout", lambda one: f"{one.seconds:.2f}"),
        ("cost of all", lambda one: "-" if one.cost is None else f"{one.cost:.4f}"),
    ]


def _print_comparison(console: Console, found: Comparison, asked: int) -> None:
    is_whole = found.tasks == asked
    console.print(f"\ndifference on {found.tasks} of {asked} tasks (above 0: the first is better)", highlight=False)
    if is_whole:
        console.print(f"  {_interval(found.difference, '+')}  95 %, for one look after all tasks", highlight=False)
    if found.sequential is None:
        said = "rewards lie outside the range that the recipe gives them, which the test stands on; set rewards.NAME.range"
        console.print(f"  no sequential verdict: {said}", highlight=False, soft_wrap=True)
    else:
        console.print(f"  {_interval(found.sequential.interval, '+')}  95 %, for a look after every task", highlight=False)
        after = "" if found.sequential.decided_after is None else f", decided after {found.sequential.decided_after} tasks"
        verdict = "the first is " if found.verdict is not Verdict.NOT_ENOUGH else ""
        console.print(f"  [bold]{verdict}{found.verdict.value}[/]{after}", highlight=False)
    if found.slices:
        table = Table(Column("slice"), *(Column(name, justify="right") for name in ("tasks", "difference", "p", "")), box=None)
        for part in found.slices:
            verdict = "" if part.verdict is Verdict.NOT_ENOUGH else part.verdict.value
            name = f"{_shown(part.key)} = {_shown(part.value)}"
            table.add_row(name, str(part.tasks), _interval(part.difference, "+"), f"{part.p:.3f}", verdict)
        console.print(table, highlight=False)
        console.print("  p: corrected for the number of slices (Holm)", highlight=False)


def _has(one: Evaluation, key: str) -> bool:
    return any(key in task.slices for task in one.tasks)


def _interval(found: Interval | None, sign: str = "") -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.mean:{sign}.3f}"
    return f"{found.mean:{sign}.3f} \\[{found.low:{sign}.3f}, {found.high:{sign}.3f}]"


def _shown(text: str) -> str:
    return escape(printable(text))
