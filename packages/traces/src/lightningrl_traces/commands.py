"""Commands of traces, `lightningrl import-traces` and `lightningrl curate`: their options, and what they print. Their
work is imported when one runs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from lightningrl.commands import describe_command
from lightningrl.console import escape
from lightningrl.errors import ConfigError
from lightningrl.keys import KEY_VARIABLE

if TYPE_CHECKING:
    from lightningrl_traces.curation.files import Report
    from lightningrl_traces.importing import ImportReport

__all__ = ["COMMANDS"]

_REASONS: Final = 6
"""Reasons of a grade that are shown at most."""


def import_traces(
    source: Annotated[
        Path | None,
        typer.Argument(help="An export of traces, or a folder of them.", metavar="[SOURCE]", show_default=False),
    ] = None,
    *,
    into: Annotated[Path, typer.Option("--into", help="The run folder to make, new or empty.", metavar="FOLDER")],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Format of the files, where their beginning does not tell it; `lightningrl plugins` lists them.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            help="Take OTLP over HTTP at this port, in place of SOURCE, until Ctrl-C makes the run.",
            metavar="[HOST:]PORT",
            show_default=False,
        ),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward",
            help="The score that is the reward; default: the only one that the traces have.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Import traces of an agent in production as a run, with a grade and reasons for each call.

    OTLP (OpenInference, GenAI, Traceloop), Phoenix, Langfuse, LangSmith, ATIF, OpenEnv, logs of Claude Code and Codex,
    chat messages. Secrets and personal data are masked. What is killed goes on by the same command.

    Example:
      [bold]lightningrl import-traces export.jsonl --into runs/production[/]
      [bold]lightningrl import-traces --listen 4318 --into runs/production[/]
    """
    from lightningrl.plugins import load_plugins
    from lightningrl_traces.importing import import_traces as import_source

    console = Console()
    if (source is None) == (listen is None):
        raise ConfigError("name an export to import, or a port with --listen, and not both")
    if listen is not None and form is not None:
        raise ConfigError("--listen takes OTLP alone; remove --format")
    if source is not None:
        report = import_source(source, into, form, load_plugins(), reward)
    else:
        report = _listen(str(listen), into, console, reward)
    if report.is_old:
        console.print(f"{escape(str(into))} holds this import already", highlight=False)
        return
    _print_import(report, console)


def _listen(address: str, into: Path, console: Console, reward: str | None) -> ImportReport:
    from lightningrl.plugins import load_plugins
    from lightningrl_traces.receiver import receive_traces

    def announce(url: str) -> None:
        console.print(f"listening: OTEL_EXPORTER_OTLP_ENDPOINT={url}", highlight=False, soft_wrap=True)
        if os.environ.get(KEY_VARIABLE):
            console.print(
                f'with the key:  OTEL_EXPORTER_OTLP_HEADERS="authorization=Bearer ${KEY_VARIABLE}"', highlight=False
            )
        console.print("Ctrl-C ends it and makes the run", highlight=False)

    return receive_traces(address, into, load_plugins(), announce, reward)


def _print_import(report: ImportReport, console: Console) -> None:
    from lightningrl_traces.grades import Grade

    uses = {Grade.RL: "not to tune on: ", Grade.SFT: "not rl-safe: ", Grade.JUDGE: "not sft-safe: "}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("grade", "calls", "reasons"):
        table.add_column(name, justify="right" if name == "calls" else "left")
    for grade in Grade:
        counted = [(count, reason) for (of, reason), count in report.reasons.items() if of == grade]
        reasons = [f"{reason} ({count})" for count, reason in sorted(counted, key=lambda item: (-item[0], item[1]))]
        against = uses.get(grade, "") if reasons else ""
        table.add_row(grade.value, str(report.grades[grade]), against + ", ".join(reasons[:_REASONS]))
    calls = sum(report.grades.values())
    formats = ", ".join(report.formats)
    console.print(f"imported {report.rollouts} rollouts with {calls} calls from {formats}", highlight=False)
    console.print(table)
    for sentence, count in report.facts.items():
        console.print(f"{count} {sentence}", highlight=False)
    if report.scores:
        named = f"the score {report.reward!r}" if report.reward is not None else "none: name one with --reward NAME"
        console.print(f"reward: {named}; there are: {', '.join(report.scores)}", highlight=False, markup=False)
    console.print(f"\nlook: lightningrl view {escape(str(report.folder))}", highlight=False, soft_wrap=True)


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
    _print_report(asyncio.run(write_rows(runs, into, rules, rewards, mapping)), into)


def _print_report(report: Report, into: Path) -> None:
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


COMMANDS: Final = (describe_command(import_traces, "import-traces"), describe_command(curate))
