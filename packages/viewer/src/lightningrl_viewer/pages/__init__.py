"""The pages of a run, in the order of the navigation."""

from __future__ import annotations

from lightningrl_viewer.page import Page
from lightningrl_viewer.pages import credit, group, recipe, rollout, rollouts, run, system

__all__ = ["PAGES"]

PAGES: tuple[Page, ...] = (
    run.PAGE,
    rollouts.PAGE,
    rollout.PAGE,
    rollout.TEXT,
    group.PAGE,
    credit.PAGE,
    system.PAGE,
    recipe.PAGE,
)
