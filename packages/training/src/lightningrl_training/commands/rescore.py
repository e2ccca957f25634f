"""`lightningrl rescore`: another reward on a run's stored rollouts, and what it would have changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lightningrl.console import write_json
from lightningrl.sanitize import printable
from lightningrl_training.commands.xray import from_here, read_steps, share
from lightningrl_training.lab.rescore import Rescore
from lightningrl_training.run import Run
from lightningrl_viewer.reading.text import number

__all__ = ["rescore_command"]

_SHOWN: Final = 15
_WIDTH: Final = 30
"""Characters of the histogram's longest bar."""


def rescore_command(
    folder: Path, *, reward: str | None, name: str | None, steps: str | None, settings: Mapping[str, Any], as_json: bool
) -> None:
    chosen = None if steps is None else read_steps(steps)
    rescore = Run(folder).rescore(from_here(reward), name=name, settings=settings, steps=chosen)
    if as_json:
        write_json(rescore)
        return
    _print(Console(), rescore)


def _print(console: Console, rescore: Rescore) -> None:
    flips = sum(rollout.flips for rollout in rescore.changed)
    before, after = rescore.before, rescore.after
    console.print(
        f"mean reward {number(before.mean)} ± {number(before.std)} was, {number(after.mean)} ± {number(after.std)} "
        "would be "
        f"({before.rewarded} and {after.rewarded} of {rescore.rollouts} rollouts have one)",
        highlight=False,
    )
    if rescore.failures:
        console.print(
            f"a reward failed on {rescore.failures} rollouts; they would have been left out",
            highlight=False,
            style="yellow",
        )
    console.print(
        f"{len(rescore.changed)} rollouts would have another reward; {flips} change sides of their group's mean",
        highlight=False,
    )
    console.print(
        f"groups that teach: {len(rescore.gained)} of {rescore.groups} would begin to, {len(rescore.lost)} would no "
        "longer",
        highlight=False,
    )
    console.print(
        f"credit of calls: rank correlation {number(rescore.credit.rank)}, opposite signs on "
        f"{share(rescore.credit.flips)} of "
        f"{rescore.credit.calls}\n",
        highlight=False,
    )
    bars = Table(Column("reward", justify="right"), Column("was"), Column("would be"), box=None, padding=(0, 2, 0, 0))
    most = max((*before.histogram, *after.histogram, 1))
    for number_of_bin, (was, would_be) in enumerate(zip(before.histogram, after.histogram, strict=True)):
        low, high = rescore.edges[number_of_bin : number_of_bin + 2]
        bars.add_row(
            f"{low:.2f} to {high:.2f}", *(f"{'█' * round(_WIDTH * count / most)} {count}" for count in (was, would_be))
        )
    console.print(bars, highlight=False)
    if rescore.changed:
        console.print()
        rows = Table(
            *(Column(name, no_wrap=True) for name in ("rollout", "task", "step", "was", "would be", "")), box=None
        )
        for rollout in rescore.changed[:_SHOWN]:
            note = f"failed: {rollout.failed}" if rollout.failed else "changes sides" if rollout.flips else ""
            cells = (
                rollout.rollout_id,
                rollout.task_id,
                str(rollout.step),
                number(rollout.before),
                number(rollout.after),
                note,
            )
            rows.add_row(*(Text(printable(cell)) for cell in cells))
        console.print(rows)
        if len(rescore.changed) > _SHOWN:
            console.print(f"and {len(rescore.changed) - _SHOWN} more; --json has all", highlight=False)
