"""`lightningrl rescore`: another reward on a run's stored rollouts, and what it would have changed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightningrl.clean import printable
from lightningrl.cli.trace_text import number
from lightningrl.cli.xray import from_here, read_steps, share
from lightningrl.run import Run
from lightningrl.training.rescore import Rescore

__all__ = ["rescore_command"]

_SHOWN: Final = 15
_WIDTH: Final = 30
"""Characters of the histogram's longest bar."""


def rescore_command(
    folder: Path, *, reward: str | None, name: str | None, steps: str | None, settings: Mapping[str, Any], as_json: bool
) -> None:
    chosen = None if steps is None else read_steps(steps)
    found = Run(folder).rescore(from_here(reward), name=name, settings=settings, steps=chosen)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        return
    _print(Console(), found)


def _print(console: Console, found: Rescore) -> None:
    flips = sum(one.flips for one in found.changed)
    before, after = found.before, found.after
    console.print(
        f"mean reward {number(before.mean)} ± {number(before.std)} was, {number(after.mean)} ± {number(after.std)} would be "
        f"({before.rewarded} and {after.rewarded} of {found.rollouts} rollouts have one)",
        highlight=False,
    )
    if found.failures:
        console.print(f"a reward failed on {found.failures} rollouts; they would have been left out", highlight=False, style="yellow")
    console.print(f"{len(found.changed)} rollouts would have another reward; {flips} change sides of their group's mean", highlight=False)
    console.print(
        f"groups that teach: {len(found.gained)} of {found.groups} would begin to, {len(found.lost)} would no longer", highlight=False
    )
    console.print(
        f"credit of calls: rank correlation {number(found.credit.rank)}, opposite signs on {share(found.credit.flips)} of "
        f"{found.credit.calls}\n",
        highlight=False,
    )
    bars = Table(Column("reward", justify="right"), Column("was"), Column("would be"), box=None, padding=(0, 2, 0, 0))
    most = max((*before.histogram, *after.histogram, 1))
    for number_of_bin, (was, would_be) in enumerate(zip(before.histogram, after.histogram, strict=True)):
        low, high = found.edges[number_of_bin : number_of_bin + 2]
        bars.add_row(f"{low:.2f} to {high:.2f}", *(f"{'█' * round(_WIDTH * count / most)} {count}" for count in (was, would_be)))
    console.print(bars, highlight=False)
    if found.changed:
        console.print()
        rows = Table(*(Column(name, no_wrap=True) for name in ("rollout", "task", "step", "was", "would be", "")), box=None)
        for one in found.changed[:_SHOWN]:
            note = f"failed: {one.failed}" if one.failed else "changes sides" if one.flips else ""
            cells = (one.rollout_id, one.task_id, str(one.step), number(one.before), number(one.after), note)
            rows.add_row(*(Text(printable(cell)) for cell in cells))
        console.print(rows)
        if len(found.changed) > _SHOWN:
            console.print(f"and {len(found.changed) - _SHOWN} more; --json has all", highlight=False)
