"""`lightningrl rollouts`: a run's rollouts as a person reads them, read by `lightningrl.look`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lightningrl.clean import printable
from lightningrl.cli import write_json
from lightningrl.errors import ConfigError
from lightningrl.look.reader import RunReader, open_run
from lightningrl.look.text import number, show_rollout
from lightningrl.store.protocol import RolloutFilter, RolloutRecord
from lightningrl.training.run_folder import newest_run
from lightningrl.types import Outcome, RolloutMode

__all__ = ["list_command", "show_command"]

Answer = TypeVar("Answer")
ALL = 1_000_000


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
    records = _ask(folder, lambda reader: reader.list_rollouts(where))
    if sort == "reward":
        records = sorted((record for record in records if record.reward is not None), key=lambda record: record.reward or 0.0)
    records = records[:limit]
    if as_json:
        for record in records:
            write_json(_json(record))
        return
    task_id = Column("task", overflow="fold")  # however long, the other columns stay whole
    rollout_id, *whole = (Column(name, no_wrap=True) for name in ("rollout", "mode", "outcome"))
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("reward", "calls", "attempts", "trained"))
    table = Table(
        rollout_id, task_id, *whole, *numbers, title=f"Rollouts of {folder}", title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    for record in records:
        table.add_row(*_row(record))
    Console().print(table if records else f"no rollouts in {folder} match; leave out a filter", highlight=False)


def show_command(rollout_id: str, *, run: Path | None, runs: Path, full: bool, as_json: bool = False) -> None:
    folder = run or newest_run(runs)
    if as_json:
        write_json(_ask(folder, lambda reader: reader.trace(rollout_id)))
        return
    Console().print(_ask(folder, lambda reader: show_rollout(reader, rollout_id, full=full)))


def _ask(folder: Path, question: Callable[[RunReader], Awaitable[Answer]]) -> Answer:
    async def ask() -> Answer:
        async with open_run(folder) as reader:
            return await question(reader)

    return asyncio.run(ask())


def _choice(what: str, text: str | None, kind: Any) -> Any:
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"no {what} {text!r}; choose of: {', '.join(member.value for member in kind)}") from None


def _json(record: RolloutRecord) -> dict[str, Any]:
    return {
        "rollout": record.spec.id,
        "task": record.spec.task.id,
        "mode": record.spec.mode.value,
        "state": record.state.value,
        "outcome": record.outcome.value if record.outcome else None,
        "reward": record.reward,
        "calls": record.attempts[-1].calls if record.attempts else 0,
        "attempts": len(record.attempts),
        "trained_step": record.trained_step,
    }


def _row(record: RolloutRecord) -> tuple[str, ...]:
    return (
        escape(printable(record.spec.id)),
        escape(printable(record.spec.task.id)),
        record.spec.mode.value,
        record.outcome.value if record.outcome else record.state.value,
        number(record.reward),
        str(record.attempts[-1].calls if record.attempts else 0),
        str(len(record.attempts)),
        "-" if record.trained_step is None else str(record.trained_step),
    )
