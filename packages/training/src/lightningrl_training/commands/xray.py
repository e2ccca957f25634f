"""`lightningrl xray`: the credit of every installed method on a run's rollouts, in the terminal."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from lightningrl.console import RunArgument, number, write_json
from lightningrl.errors import ConfigError
from lightningrl.sanitize import printable
from lightningrl_client.commands import read_settings
from lightningrl_training.commands.printing import Page, make_table

if TYPE_CHECKING:
    from lightningrl_credit.xray import Agreement, RolloutXRay, XRay

__all__ = ["StepsOption", "from_here", "read_steps", "share", "xray"]

StepsOption = Annotated[str | None, typer.Option(help="Only of these steps: 3, 3-7 or 1,4,9.")]
_PAIRS: Final = 5
_ROLLOUTS: Final = 10
_STRONG: Final = 160
"""Colour of the largest credit of a rollout, of 255."""


def xray(
    run: RunArgument,
    rollout: Annotated[
        str | None, typer.Option(help="Of its group alone, with a heat map of this rollout: turns by methods.")
    ] = None,
    steps: StepsOption = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Another method to show: a name with its reference or its options, as in a recipe. May be repeated.",
            metavar="NAME=USE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """Say what every installed method of credit makes of a run's rollouts: where they disagree, and which of them are
    the same here.

    From the record alone: nobody is asked, nothing is trained, the run stays as it is. The run's own method comes
    first, and is compared with what the run used.

    Examples:
      [bold]lightningrl xray runs/mine[/]
      [bold]lightningrl xray runs/mine --rollout g000017-003[/]
      [bold]lightningrl xray runs/mine --method mine=credit.py:Mine[/]
      [bold]lightningrl xray runs/mine --method 'steep={use = "turns", options = {gamma = 0.5}}'[/]
    """
    from lightningrl_training.run import Run

    methods, chosen = read_settings(method), read_steps(steps)
    if rollout is not None and chosen is not None:
        raise ConfigError("--rollout is of one step; leave out --steps")

    seen = Run(run).xray(rollout=rollout, steps=chosen, methods={name: from_here(use) for name, use in methods.items()})
    if as_json:
        write_json(seen)
        return
    page = Page()
    if rollout is not None:
        for shown in seen.rollouts:
            _print_rollout(page, shown, seen)
    _print_run(page, seen, lists_rollouts=rollout is None)


def from_here(value: Any) -> Any:
    """Make a reference into a file, `"file.py:name"`, absolute where the file lies in this folder; others are the
    recipe's."""
    from lightningrl.loading import absolute_reference, is_reference

    if isinstance(value, str) and is_reference(value):
        with contextlib.suppress(ConfigError):
            return absolute_reference(value, Path.cwd())
    return value


def read_steps(text: str | None) -> list[int] | None:
    """Parse `3`, `3-7` or `1,4,9`; None = all. Raises ConfigError."""
    if text is None:
        return None
    steps: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last - first > 1_000_000:
            raise ConfigError(f"steps {text!r} are none that can be read; give 3, 3-7 or 1,4,9")
        steps += range(first, last + 1)
    return steps


def _print_run(page: Page, xray: XRay, *, lists_rollouts: bool) -> None:
    span = f"step {xray.steps[0]}" if len(xray.steps) == 1 else f"steps {xray.steps[0]} to {xray.steps[-1]}"
    page.print(f"{span}: {xray.rollout_count} rollouts, {xray.calls} trained calls")
    page.print(_own_sentence(xray))
    anchors = ", ".join(f"{name} {share(value)}" for name, value in xray.anchors.items())
    page.print(f"calls whose state others of the task's rollouts were in, and not all: {anchors}\n")
    page.table(_methods(xray))
    if xray.pairs:
        page.print("\nmethods that disagree most", style="bold")
        for first, other, pair in xray.pairs[:_PAIRS]:
            page.print(Text(f"  {printable(first)} and {printable(other)}: {_said(pair)}"))
    if lists_rollouts and any(first.flips for first in xray.rollouts):
        page.print("\nrollouts that methods disagree on most  (--rollout ID shows the heat map)", style="bold")
        rows = make_table(
            *(Column(name, no_wrap=True) for name in ("  rollout", "task", "step", "reward", "opposite signs"))
        )
        for rollout in xray.rollouts[:_ROLLOUTS]:
            cells = (
                f"  {rollout.rollout_id}",
                rollout.task_id,
                str(rollout.step),
                number(rollout.reward),
                str(rollout.flips),
            )
            rows.add_row(*(Text(printable(cell)) for cell in cells))
        page.table(rows)
    if xray.missing:
        page.print("\nnot computed", style="bold")
        for missing in xray.missing:
            page.print(Text(f"  {printable(missing.name)}: {printable(missing.why)}"))


def _methods(xray: XRay) -> Table:
    against = "own", "outcome", *(("Q",) if xray.branched else ())
    numbers = "no gradient", *(f"{name}, {whose}" for whose in against for name in ("rank", "flips"))
    table = make_table(Column("method", no_wrap=True), numbers=numbers, gap=1)
    table.add_column()
    for method in xray.methods:
        pairs = [method.own, method.outcome, *([method.measured] if xray.branched and method.measured else [])]
        cells = [cell for pair in pairs for cell in (number(pair.rank), share(pair.flips))]
        same = "" if method.same_as is None else f"on these rollouts equal to {printable(method.same_as)}"
        note = ", ".join(filter(None, ("the run's own" if method.is_own else "", same)))
        name = Text(printable(method.name), style="bold" if method.is_own else "")
        table.add_row(name, share(method.silent), *cells, Text(note, style="dim"))
    return table


def _own_sentence(xray: XRay) -> str:
    if xray.own_difference is None:
        return "the run's own method cannot be computed here: its row is what the run used"
    if xray.own_difference == 0.0:
        return "the run's own method gives exactly what the run used"
    return (
        f"the run's own method differs by up to {xray.own_difference:.3g} from what the run used: its code or its "
        "options have changed since"
    )


def _said(pair: Agreement) -> str:
    return f"rank correlation {number(pair.rank)}, opposite signs on {share(pair.flips)} of {pair.calls} calls"


def _print_rollout(page: Page, rollout: RolloutXRay, xray: XRay) -> None:
    """Print a table with turns from left to right and methods from top to bottom; each row has a colour scale of its
    own."""
    where = f"{printable(rollout.rollout_id)}, task {printable(rollout.task_id)}, step {rollout.step}"
    page.print(Text(f"{where}, reward {number(rollout.reward)}"))
    table = make_table(Column("method", no_wrap=True), gap=1)
    for turn, role in enumerate(rollout.roles):
        table.add_column(Text(f"{turn} {printable(role or '')}".strip()), justify="right", no_wrap=True)
    for name, same in xray.distinct.items():
        label = " = ".join(map(printable, (name, *same))) + (" (own)" if name == xray.own else "")
        table.add_row(Text(label), *_cells(rollout.credit[name]))
    if rollout.measured is not None:
        table.add_row("measured: Q - V", *_cells(rollout.measured))
    page.table(table)
    page.print()


def _cells(values: Sequence[float | None]) -> list[Text]:
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    return [Text(_signed(value), style=_colour(value, largest)) for value in values]


def _colour(value: float | None, largest: float) -> Style:
    if value is None or not largest or not value:
        return Style(dim=value is None)
    depth = round(30 + (_STRONG - 30) * abs(value) / largest)
    return Style(color="white", bgcolor=f"rgb(0,{depth},60)" if value > 0 else f"rgb({depth},0,30)")


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if 0.0 < value < 0.1 else f"{value:.0%}"
