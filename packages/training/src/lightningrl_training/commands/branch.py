"""`lightningrl branch`: values of the states of a recorded rollout, measured by going on from them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table

from lightningrl.console import write_json
from lightningrl.sanitize import one_line, printable
from lightningrl.types import Outcome
from lightningrl_training.commands.stopping import progress_bar
from lightningrl_training.run import Run
from lightningrl_viewer.reading.text import number

if TYPE_CHECKING:
    from lightningrl_training.lab.branching import BranchedRollout

__all__ = ["branch_command"]

LONGEST = 60
"""Characters of what a call says that the table shows."""


def branch_command(
    run: Path, rollout_id: str, *, at: Sequence[int] | None, samples: int, as_json: bool, settings: Mapping[str, Any]
) -> None:
    with progress_bar("stopped; run it again to go on") as show:
        branched = Run(run).branch(rollout_id, at=at, samples=samples, settings=settings, show=show)
    if as_json:
        for row in _rows(branched):
            write_json(row)
        return
    console = Console()
    numbers = (Column(name, justify="right") for name in ("after", "value", "±", "branches", "diverged"))
    reward = number(branched.recorded.reward)
    console.print(
        f"{printable(rollout_id)}, reward {reward}; branched with the weights after step {branched.step}",
        highlight=False,
    )
    table = Table(*numbers, Column("the next call says"), box=None, padding=(0, 1, 0, 0))
    for row in _rows(branched):
        shown = (
            str(row["calls"]),
            number(row["value"]),
            number(row["error"]),
            str(len(row["returns"])),
            str(row["diverged"]),
        )
        table.add_row(*shown, one_line(row["next"], LONGEST))
    console.print(table, highlight=False)
    for why in dict.fromkeys(why for state in branched.states for why in state.divergences):
        console.print(f"diverged: {printable(why)}", highlight=False, soft_wrap=True)
    console.print(
        f"look at them: lightningrl rollouts list --run {shlex.quote(str(branched.folder))}",
        highlight=False,
        soft_wrap=True,
    )


def _rows(branched: BranchedRollout) -> Iterator[dict[str, Any]]:
    for state in branched.states:
        yield {
            "calls": state.calls,
            "value": state.value,
            "error": state.error,
            "returns": state.returns,
            "diverged": state.outcomes.get(Outcome.DIVERGED, 0),
            "outcomes": {outcome.value: count for outcome, count in state.outcomes.items()},
            "why": state.divergences,
            "next": " ".join("".join(branched.answers[state.calls : state.calls + 1]).split()),
        }
