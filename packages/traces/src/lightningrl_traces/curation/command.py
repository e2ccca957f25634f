"""`lightningrl curate`: its options, and what it prints."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightningrl.errors import ConfigError

if TYPE_CHECKING:
    from lightningrl_traces.curation.report import Report

__all__ = ["curate"]


Least = typer.Option(help="Good = a reward of at least so much.", show_default=False)
Best = typer.Option(help="Good = among so many best of its group.", min=1, show_default=False)
Score = typer.Option(help="Good = a reward by name, a judge's for instance, of at least so much.", metavar="NAME=LEAST")
Failures = typer.Option(help="Good = at most so many failed tool calls.", min=0, show_default=False)
Outcomes = typer.Option(help="Good = one of these outcomes; default: succeeded.", show_default=False)
Grades = typer.Option(help="Grades of calls to take; default: rl-safe and sft-safe.", show_default=False)
Roles = typer.Option(help="Roles of calls to take; default: all.", show_default=False)
Modes = typer.Option(help="Rollouts to take; default: train.", show_default=False)
Characters = typer.Option(help="Most characters of prompt and answer.", min=1, show_default=False)
Near = typer.Option(help="Similarity from which on rows or tasks are one; 1 = only equal ones.")
PerTask = typer.Option(help="Most rollouts of one task.", min=1, show_default=False)
Reward = typer.Option(help='A reward for each rollout, "file.py:function", in place of its own.', show_default=False)
Input = typer.Option("--input", help="Dotted path of the agent's input in a task.", metavar="PATH", show_default=False)
Output = typer.Option("--output", help="Dotted path of its answer in an output.", metavar="PATH", show_default=False)
Rerendered = typer.Option("--rerendered", help="Take calls whose history the chat template writes otherwise, too.")


def curate(
    runs: Annotated[list[Path], typer.Argument(help="Run folders: own runs or imported traces.", metavar="RUN")],
    into: Annotated[Path, typer.Option("--into", help="The folder to write, empty or new.", metavar="FOLDER")],
    reward: Annotated[str | None, Reward] = None,
    min_reward: Annotated[float | None, Least] = None,
    above_mean: Annotated[bool, typer.Option("--above-mean", help="Good = better than its group's mean.")] = False,
    best: Annotated[int | None, Best] = None,
    score: Annotated[list[str] | None, Score] = None,
    outcome: Annotated[list[str] | None, Outcomes] = None,
    max_tool_failures: Annotated[int | None, Failures] = None,
    grade: Annotated[list[str] | None, Grades] = None,
    role: Annotated[list[str] | None, Roles] = None,
    mode: Annotated[list[str] | None, Modes] = None,
    max_characters: Annotated[int | None, Characters] = None,
    near: Annotated[float, Near] = 0.95,
    per_task: Annotated[int | None, PerTask] = None,
    validation: Annotated[float, typer.Option(help="Share of the tasks to hold back.")] = 0.0,
    rerendered: Annotated[bool, Rerendered] = False,
    input_path: Annotated[str | None, Input] = None,
    output_path: Annotated[str | None, Output] = None,
) -> None:
    """Make rows to tune a model on from the calls of runs: sft.jsonl, dpo.jsonl, kto.jsonl, tasks.jsonl, report.json.

    Examples:
      [bold]lightningrl curate runs/mine --into rows --min-reward 1[/]
      [bold]lightningrl curate runs/a runs/b --into rows --best 1 --validation 0.1[/]
      [bold]lightningrl curate runs/traces --into rows --reward rewards.py:kind --min-reward 1[/]
    """
    import asyncio

    from lightningrl.loading import load_callable
    from lightningrl_credit.rewards import NamedReward, RewardSet
    from lightningrl_traces.curation.curation import TaskMapping
    from lightningrl_traces.curation.curation import curate as write_rows
    from lightningrl_traces.curation.rules import Rules

    chosen = {"outcomes": outcome, "grades": grade, "roles": role, "modes": mode}
    rules = Rules(
        min_reward=min_reward,
        above_mean=above_mean,
        best=best,
        scores=dict(map(_least, score or ())),
        max_tool_failures=max_tool_failures,
        max_characters=max_characters,
        near=near,
        per_task=per_task,
        validation=validation,
        rerendered=rerendered,
        **{name: frozenset(values) for name, values in chosen.items() if values},
    )
    name = (reward or "").rpartition(":")[2]
    rewards = RewardSet([NamedReward(name=name, function=load_callable(reward))]) if reward is not None else None
    mapping = TaskMapping(input=input_path, output=output_path) if input_path or output_path else None
    _print(asyncio.run(write_rows(runs, into, rules, rewards, mapping)), into)


def _print(report: Report, into: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(report.as_table(), soft_wrap=False)
    if report.states:
        console.print(f"{report.states} tasks are states of messages; name what your agent takes: --input PATH")
    console.print(f"wrote {into}: sft.jsonl, dpo.jsonl, kto.jsonl, tasks.jsonl, report.json")
    console.print(f"next: lightningrl init my-agent --from traces --rows {shlex.quote(str(into))}", markup=False)


def _least(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    try:
        if not name:
            raise ValueError
        return name, float(value)
    except ValueError:
        raise ConfigError(f"--score {text!r} is no NAME=LEAST; write, for instance, judge=0.7") from None
