"""The credit X-ray: turns by methods as colour and number, what methods disagree on first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightningrl_credit.xray import RolloutXRay, XRay
from lightningrl_runs.xray import Question
from lightningrl_viewer.page import NoSuchPage, Page, PageRequest, PageView, ViewedRun

__all__ = ["PAGE"]

_CELLS: Final = 1500
"""Cells of all heat maps of a page, about: what a browser reads at ease."""
_TURNS: Final = 40
"""Turns of a rollout that are shown, from `turn` on."""
_LEVELS: Final = 5
"""Shades of a colour."""
_PAIRS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A method's credit of a rollout's turns."""

    name: str
    same: tuple[str, ...]
    """Methods that are the same here."""
    is_own: bool
    cells: tuple[tuple[float | None, str], ...]
    """Number and class of its colour, which is relative to the row's largest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeatMap:
    """One rollout's turns by methods."""

    rollout: RolloutXRay
    first: int
    """Turn of the first column."""
    turns: tuple[tuple[int, str | None], ...]
    """Number and role."""
    rows: tuple[Row, ...]

    @property
    def after(self) -> int | None:
        """The first turn that is not shown."""
        end = self.first + len(self.turns)
        return end if end < len(self.rollout.roles) else None


async def show(viewed: ViewedRun, request: PageRequest) -> PageView:
    query = request.query
    question = Question(
        rollout=query.get("rollout") or None,
        group=query.get("group") or None,
        step=request.number("step") or 0,
        whole=query.get("of") == "run",
    )
    turn = request.number("turn") or 0
    if turn < 0:
        raise NoSuchPage(f"turn is {turn}; turns are counted from 0")
    answer = await viewed.credit.ask(question)
    xray = answer.xray
    assert xray is not None
    maps = _heat_maps(xray, turn)
    shown = [heat_map.rollout for heat_map in maps]
    return PageView(
        "credit.html",
        title="Credit",
        xray=xray,
        maps=maps,
        others=[one for one in xray.rollouts if one.reward is not None and one not in shown],
        pairs=xray.pairs[:_PAIRS],
        question=question,
        first=answer.first,
        last=answer.last,
    )


def _heat_maps(xray: XRay, turn: int) -> list[HeatMap]:
    maps: list[HeatMap] = []
    cells = 0
    for rollout in xray.rollouts:
        if rollout.reward is None:  # nobody scored it
            continue
        shown = _heat_map(rollout, xray, turn)
        cells += len(shown.turns) * len(shown.rows)
        if maps and cells > _CELLS:
            break
        maps.append(shown)
    return maps


def _heat_map(rollout: RolloutXRay, xray: XRay, turn: int) -> HeatMap:
    span = slice(turn, turn + _TURNS)
    own = {method.name for method in xray.methods if method.is_own}
    rows = [
        Row(name=name, same=tuple(same), is_own=name in own, cells=_cells(rollout.credit[name], span))
        for name, same in xray.distinct.items()
    ]
    if rollout.measured is not None:
        rows.append(Row(name="measured: Q − V", same=(), is_own=False, cells=_cells(rollout.measured, span)))
    return HeatMap(rollout=rollout, first=turn, turns=tuple(enumerate(rollout.roles))[span], rows=tuple(rows))


def _cells(values: Sequence[float | None], span: slice) -> tuple[tuple[float | None, str], ...]:
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    return tuple((None if value is None else round(value, 2) + 0.0, _colour(value, largest)) for value in values[span])


def _colour(value: float | None, largest: float) -> str:
    level = 0 if value is None or not largest else round(_LEVELS * abs(value) / largest + 0.4)
    if value is None or not level:
        return "none" if value is None else "zero"
    return f"{'up' if value > 0 else 'down'}-{level}"


PAGE = Page("credit", show, name="Credit", key="x", tells_of_run_alone=False)
