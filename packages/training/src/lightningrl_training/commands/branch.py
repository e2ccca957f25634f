"""`lightningrl branch`: values of the states of a recorded rollout, measured by going on from them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightningrl.console import RunArgument, number, write_json
from lightningrl.sanitize import one_line
from lightningrl_client.commands import SetOption, WorkersOption, read_settings
from lightningrl_training.commands.printing import Page, make_table, shown
from lightningrl_training.commands.stopping import progress_bar

if TYPE_CHECKING:
    from lightningrl_training.lab.branching import BranchedRollout

__all__ = ["branch"]

LONGEST = 60
"""Characters of what a call says that the table shows."""


def branch(
    run: RunArgument,
    rollout_id: Annotated[str, typer.Argument(help="A rollout's id, from `rollouts list`.", metavar="ROLLOUT")],
    at: Annotated[
        list[int] | None, typer.Option(help="After so many calls; may be given again. By default after each.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Branches at each.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each state.")] = False,
    workers: WorkersOption = None,
    settings: SetOption = None,
) -> None:
    """Say what each state of a rollout is worth: run its agent anew, answer its first calls as they were, sample the
    rest.

    Each call is then worth the difference of the states before and after it. What the agent does not ask again (a
    clock, a random id, a tool that changed) ends its branch as `diverged`, with the reason. The run stays as it is.

    Examples:
      [bold]lightningrl branch runs/mine g000017-003[/]
      [bold]lightningrl branch runs/mine g000017-003 --at 2 --samples 16[/]
    """
    from lightningrl_training.run import Run

    chosen = read_settings(settings, workers=workers)
    with progress_bar("stopped; run it again to go on") as show:
        branched = Run(run).branch(rollout_id, at=at, samples=samples, settings=chosen, show=show)
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
    from lightningrl.types import Outcome

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
