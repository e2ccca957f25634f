"""`lightningrl rescore`: another reward on a run's stored rollouts, and what it would have changed."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rich.table import Column
from rich.text import Text

from lightningrl.console import write_json
from lightningrl.sanitize import printable
from lightningrl_training.commands.printing import Page, make_table
from lightningrl_training.commands.xray import from_here, read_steps, share
from lightningrl_training.lab.recredit import Rescore
from lightningrl_training.run import Run
from lightningrl_viewer.reading.text import number

__all__ = ["rescore_command"]

_SHOWN: Final = 15
_WIDTH: Final = 30
"""Characters of the histogram's longest bar."""


def rescore_command(
    folder: Path,
    *,
    reward: str | None,
    name: str | None,
    steps: str | None,
    settings: Mapping[str, Any],
    as_json: bool,
    write: bool = False,
) -> None:
    chosen = None if steps is None else read_steps(steps)
    rescore = Run(folder).rescore(from_here(reward), name=name, settings=settings, steps=chosen, write=write)
    if as_json:
        write_json(rescore)
        return
    _print(Page(), rescore)


def _print(page: Page, rescore: Rescore) -> None:
    flips = sum(rollout.flips for rollout in rescore.changed)
    before, after = rescore.before, rescore.after
    page.print(
        f"mean reward {number(before.mean)} ± {number(before.std)} was, {number(after.mean)} ± {number(after.std)} "
        f"would be ({before.rewarded} and {after.rewarded} of {rescore.rollouts} rollouts have one)"
    )
    if rescore.failures:
        sentence = (
            f"a reward failed on {rescore.failures} rollouts: each has the lowest, or none if it works on no other; "
            f"the first: {printable(rescore.failure or '')}"
        )
        page.print(sentence, style="yellow", markup=False)
    page.print(f"{len(rescore.changed)} rollouts would have another reward; {flips} change sides of their group's mean")
    gained, lost = len(rescore.gained), len(rescore.lost)
    page.print(f"groups that teach: {gained} of {rescore.groups} would begin to, {lost} would no longer")
    credit = rescore.credit
    page.print(
        f"credit of calls: rank correlation {number(credit.rank)}, opposite signs on {share(credit.flips)} of "
        f"{credit.calls}\n"
    )
    bars = make_table(Column("reward", justify="right"), "was", "would be")
    most = max((*before.histogram, *after.histogram, 1))
    for (low, high), *counts in zip(pairwise(rescore.edges), before.histogram, after.histogram, strict=True):
        bars.add_row(f"{low:.2f} to {high:.2f}", *(f"{'█' * round(_WIDTH * count / most)} {count}" for count in counts))
    page.table(bars)
    if rescore.changed:
        page.print()
        rows = make_table(*(Column(name, no_wrap=True) for name in ("rollout", "task", "step", "was", "would be", "")))
        for rollout in rescore.changed[:_SHOWN]:
            note = f"failed: {rollout.failed}" if rollout.failed else "changes sides" if rollout.flips else ""
            rewards = number(rollout.before), number(rollout.after)
            cells = rollout.rollout_id, rollout.task_id, str(rollout.step), *rewards, note
            rows.add_row(*(Text(printable(cell)) for cell in cells))
        page.table(rows)
        if len(rescore.changed) > _SHOWN:
            page.print(f"and {len(rescore.changed) - _SHOWN} more; --json has all")
