"""`lightningrl branch`: values of the states of a recorded rollout, measured by going on from them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightningrl.console import write_json
from lightningrl.sanitize import one_line
from lightningrl.types import Outcome
from lightningrl_training.commands.printing import Page, make_table, shown
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
    page = Page()
    reward = number(branched.recorded.reward)
    page.print(f"{shown(rollout_id)}, reward {reward}; branched with the weights after step {branched.step}")
    table = make_table(numbers=("after", "value", "±", "branches", "diverged"), gap=1)
    table.add_column("the next call says")
    for row in _rows(branched):
        measured = number(row["value"]), number(row["error"]), str(len(row["returns"])), str(row["diverged"])
        table.add_row(str(row["calls"]), *measured, one_line(row["next"], LONGEST))
    page.table(table)
    for why in dict.fromkeys(why for state in branched.states for why in state.divergences):
        page.print(f"diverged: {shown(why)}")
    page.print(f"look at them: lightningrl rollouts list --run {shlex.quote(str(branched.folder))}")


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
