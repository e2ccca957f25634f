"""`lightningrl eval`: how good a policy is, and which of two is better."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from lightningrl.console import escape, write_json
from lightningrl.sanitize import printable
from lightningrl_training.commands.stopping import progress_bar
from lightningrl_training.evaluation.comparison import Comparison
from lightningrl_training.evaluation.report import EvaluationReport
from lightningrl_training.evaluation.result import Evaluation
from lightningrl_training.evaluation.statistics import Interval, Verdict
from lightningrl_training.run import evaluate

__all__ = ["evaluate_command"]


def evaluate_command(policy: str, *, as_json: bool, **options: Any) -> None:
    """`options`: of `lightningrl.evaluate`."""
    with progress_bar("stopped; what has run lies in the folder of its rollouts, without results") as show:
        report = evaluate(policy, show=show, **options)
    if as_json:
        write_json(report.numbers())
        return
    _print(Console(), report)


def _print(console: Console, report: EvaluationReport) -> None:
    table = Table(
        Column(""),
        *(Column(_shown(evaluation.policy), justify="right") for evaluation in report.evaluations),
        box=None,
        padding=(0, 2, 0, 0),
    )
    for name, cell in _rows(report.evaluations[0]):
        table.add_row(name, *(cell(evaluation) for evaluation in report.evaluations))
    for key in report.slices:
        for value in report.evaluations[0].slice_rewards(key):
            cells = (
                evaluation.slice_rewards(key).get(value) if _has(evaluation, key) else None
                for evaluation in report.evaluations
            )
            table.add_row(f"  {_shown(key)} = {_shown(value)}", *map(_interval, cells))
    console.print(table, highlight=False)
    if report.comparison is not None:
        _print_comparison(console, report.comparison, report.evaluations[0].asked)
    console.print(f"kept in {report.path}", highlight=False, soft_wrap=True)
    for evaluation in report.evaluations:
        console.print(
            f"rollouts: lightningrl rollouts list --run {shlex.quote(str(evaluation.rollouts))}",
            highlight=False,
            soft_wrap=True,
        )


def _rows(first: Evaluation) -> list[tuple[str, Callable[[Evaluation], str]]]:
    return [
        ("tasks × samples", lambda result: f"{len(result.tasks)} × {result.samples}"),
        (
            "sampled at",
            lambda result: (
                "as the agent asks" if result.sampling is None else f"temperature {result.sampling.temperature:g}"
            ),
        ),
        *(
            (f"pass@{k}", lambda result, k=k: _interval(result.pass_at(k)) if k <= result.samples else "-")
            for k in first.ks
        ),
        ("mean reward", lambda result: _interval(result.reward)),
        ("failed (lowest reward)", lambda result: str(result.failed)),
        ("without a result", lambda result: str(result.without_result)),
        (
            "tokens of a rollout",
            lambda result: "-" if result.tokens is None else f"{result.tokens[0]:.0f} + {result.tokens[1]:.0f}",
        ),
        ("seconds of a rollout", lambda result: f"{result.seconds:.2f}"),
        ("cost of all", lambda result: "-" if result.cost is None else f"{result.cost:.4f}"),
    ]


def _print_comparison(console: Console, comparison: Comparison, asked: int) -> None:
    is_whole = comparison.tasks == asked
    console.print(
        f"\ndifference on {comparison.tasks} of {asked} tasks (above 0: the first is better)", highlight=False
    )
    if is_whole:
        console.print(f"  {_interval(comparison.difference, '+')}  95 %, for one look after all tasks", highlight=False)
    if comparison.sequential is None:
        problem = (
            "rewards lie outside the range that the recipe gives them, which the test stands on; set rewards.NAME.range"
        )
        console.print(f"  no sequential verdict: {problem}", highlight=False, soft_wrap=True)
    else:
        console.print(
            f"  {_interval(comparison.sequential.interval, '+')}  95 %, for a look after every task", highlight=False
        )
        after = (
            ""
            if comparison.sequential.decided_after is None
            else f", decided after {comparison.sequential.decided_after} tasks"
        )
        verdict = "the first is " if comparison.verdict is not Verdict.NOT_ENOUGH else ""
        console.print(f"  [bold]{verdict}{comparison.verdict.value}[/]{after}", highlight=False)
    if comparison.slices:
        table = Table(
            Column("slice"), *(Column(name, justify="right") for name in ("tasks", "difference", "p", "")), box=None
        )
        for part in comparison.slices:
            verdict = "" if part.verdict is Verdict.NOT_ENOUGH else part.verdict.value
            name = f"{_shown(part.key)} = {_shown(part.value)}"
            table.add_row(name, str(part.tasks), _interval(part.difference, "+"), f"{part.p:.3f}", verdict)
        console.print(table, highlight=False)
        console.print("  p: corrected for the number of slices (Holm)", highlight=False)


def _has(evaluation: Evaluation, key: str) -> bool:
    return any(key in task.slices for task in evaluation.tasks)


def _interval(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:{sign}.3f}"
    return f"{interval.mean:{sign}.3f} \\[{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"


def _shown(text: str) -> str:
    return escape(printable(text))
