"""`lightningrl rescore`: another reward on a run's stored rollouts, and what it would have changed."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Column
from rich.text import Text

from lightningrl.console import RunArgument, number, write_json
from lightningrl.sanitize import printable
from lightningrl_client.commands import SetOption, read_settings
from lightningrl_training.commands.printing import Page, make_table
from lightningrl_training.commands.xray import StepsOption, from_here, read_steps, share

if TYPE_CHECKING:
    from lightningrl_training.lab.recredit import Rescore

__all__ = ["rescore"]

_SHOWN: Final = 15
_WIDTH: Final = 30
"""Characters of the histogram's longest bar."""


def rescore(
    run: RunArgument,
    reward: Annotated[
        str | None,
        typer.Option(help='The reward to try: "file.py:new", or an installed one\'s name.', metavar="REFERENCE"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Which of the recipe's rewards it stands for; needed where there are several.")
    ] = None,
    steps: StepsOption = None,
    write: Annotated[bool, typer.Option("--write", help="Keep the rewards: of an imported run alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    settings: SetOption = None,
) -> None:
    """Try a reward on a run's stored rollouts: which would have earned otherwise, which groups would have taught, whose
    credit turns.

    The new reward is called for every trained rollout; what else was computed is taken from the record. Nothing is
    trained, the run stays as it is, but an imported one with --write.

    Examples:
      [bold]lightningrl rescore runs/mine --reward rewards.py:stricter[/]
      [bold]lightningrl rescore runs/mine --set rewards.brief.weight=0.2[/]
    """
    from lightningrl_training.run import Run

    rescored = Run(run).rescore(
        from_here(reward), name=name, settings=read_settings(settings), steps=read_steps(steps), write=write
    )
    if as_json:
        write_json(rescored)
        return
    _print(Page(), rescored)


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
