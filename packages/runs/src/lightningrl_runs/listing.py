"""`lightningrl rollouts`: a run's rollouts as a person reads them, read by `lightningrl_runs`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightningrl.console import number, write_json
from lightningrl.errors import ConfigError
from lightningrl.records import RolloutFilter, RolloutRecord
from lightningrl.sanitize import one_line, printable
from lightningrl.types import Outcome, RolloutMode
from lightningrl_runs.dialogue import final_text, question_of
from lightningrl_runs.origin import newest_run
from lightningrl_runs.reader import StoredRun, ask_run
from lightningrl_runs.text import show_rollout

__all__ = ["list_command", "show_command"]

ALL = 1_000_000
WIDE_FOR_ANSWER, WIDE_FOR_INPUT = 120, 150
"""Columns of a terminal that has room for them beside the output."""
LEAST = 8
"""Columns of a cell that is cut."""
NUMBERS = {"reward", "calls", "attempts", "trained"}
LONGEST_CELL = 200


def list_command(
    *,
    run: Path | None,
    runs: Path,
    step: int | None = None,
    task: str | None = None,
    mode: str | None = None,
    outcome: str | None = None,
    limit: int = 20,
    sort: str = "newest",
    as_json: bool = False,
) -> None:
    folder = run or newest_run(runs)
    if sort not in {"newest", "reward"}:
        raise ConfigError(f"rollouts cannot be sorted by {sort!r}; choose of: newest, reward")
    where = RolloutFilter(
        mode=_choice("mode", mode, RolloutMode),
        outcome=_choice("outcome", outcome, Outcome),
        step=step,
        task_id=task,
        limit=limit if sort == "newest" else ALL,
    )
    records, calls = asyncio.run(ask_run(folder, lambda run: _read(run, where, sort, limit)))
    if as_json:
        for record in records:
            write_json(_json(record, calls))
        return
    console = Console()
    nothing = f"no rollouts in {folder} match; leave out a filter"
    console.print(_table(records, calls, folder, console.width) if records else nothing, highlight=False)


async def _read(
    run: StoredRun, where: RolloutFilter, sort: str, limit: int
) -> tuple[Sequence[RolloutRecord], Mapping[str, int]]:
    records = await run.list_rollouts(where)
    if sort == "reward":
        records = sorted(
            (record for record in records if record.reward is not None), key=lambda record: record.reward or 0.0
        )
    return records[:limit], await run.queries.call_counts([record.id for record in records[:limit]])


def show_command(rollout_id: str, *, run: Path | None, runs: Path, full: bool, as_json: bool = False) -> None:
    folder = run or newest_run(runs)
    if as_json:
        write_json(asyncio.run(ask_run(folder, lambda run: run.trace(rollout_id))))
        return
    Console().print(asyncio.run(ask_run(folder, lambda run: show_rollout(run, rollout_id, full=full))))


def _choice(what: str, text: str | None, kind: Any) -> Any:
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"no {what} {text!r}; choose of: {', '.join(member.value for member in kind)}") from None


def _json(record: RolloutRecord, calls: Mapping[str, int]) -> dict[str, Any]:
    return {
        "rollout": record.id,
        "task": record.task.id,
        "mode": record.spec.mode.value,
        "state": record.state.value,
        "outcome": record.outcome.value if record.outcome else None,
        "reward": record.reward,
        "calls": calls.get(record.id, record.attempts[-1].calls if record.attempts else 0),
        "attempts": len(record.attempts),
        "trained_step": record.trained_step,
        "input": record.task.input,
        "answer": record.task.answer,
        "output": record.output,
        "error": record.error,
    }


def _table(records: Sequence[RolloutRecord], calls: Mapping[str, int], folder: Path, width: int) -> Table:
    """A line for each. Attempts and steps stand there where they say something, the task's input and answer where there
    is room, and what came out has the rest of the line."""
    whole = {
        "rollout": [printable(record.id) for record in records],
        "mode": [record.spec.mode.value for record in records],
        "outcome": [record.outcome.value if record.outcome else record.state.value for record in records],
        "reward": [number(record.reward) for record in records],
        "calls": [str(_json(record, calls)["calls"]) for record in records],
    }
    if any(len(record.attempts) > 1 for record in records):
        whole["attempts"] = [str(len(record.attempts)) for record in records]
    if any(record.trained_step is not None for record in records):
        whole["trained"] = ["-" if record.trained_step is None else str(record.trained_step) for record in records]
    cut = {
        "input": [record.task.input for record in records] if width >= WIDE_FOR_INPUT else [],
        "answer": [record.task.answer for record in records] if width >= WIDE_FOR_ANSWER else [],
        "output": [record.error or record.output for record in records],
    }
    beside = {name: [_line(value) for value in values] for name, values in cut.items() if values}
    tasks = [printable(" ".join(record.task.id.split())) for record in records]
    room = width - sum(max(map(cell_len, (name, *cells))) + 1 for name, cells in whole.items())
    task_width = min(max(map(cell_len, ("task", *tasks))), max(LEAST, room // 3))
    room -= task_width + 1
    widths = {
        name: min(max(map(cell_len, (name, *cells))), room // (len(beside) + 1)) for name, cells in beside.items()
    }
    widths["output"] = max(LEAST, room - sum(width + 1 for name, width in widths.items() if name != "output"))
    table = Table(title=f"Rollouts of {folder}", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in whole:
        table.add_column(name, no_wrap=True, justify="right" if name in NUMBERS else "left")
        if name == "rollout":
            table.add_column("task", width=task_width, overflow="fold")  # however long, the other columns stay whole
    for name in beside:
        table.add_column(name, no_wrap=True, overflow="ellipsis", width=widths[name])
    ids, *others = whole.values()
    for cells in zip(ids, tasks, *others, *beside.values(), strict=True):
        table.add_row(*map(escape, cells))
    return table


def _line(value: Any) -> str:
    return "" if value is None else one_line(question_of(value) or final_text(value), LONGEST_CELL)
