"""The system: policies and their versions, workers, queue, leases, failures by kind, refused calls."""

from __future__ import annotations

import time

from lightningrl_viewer.page import Budget, Page, PageRequest, PageView, ViewedRun

__all__ = ["PAGE"]

PAGE_BYTES = 60_000
_MOST = 200


async def show(viewed: ViewedRun, _: PageRequest) -> PageView:
    health, position = await viewed.run.queries.health(), await viewed.run.queries.position()
    budget = Budget(PAGE_BYTES)
    return PageView(
        "system.html",
        title="System",
        found=health,
        position=position,
        now=time.time(),
        live=None if viewed.live is None else await viewed.live(),
        leases=health.leases[:_MOST],
        workers=health.workers[:_MOST],
        errors=[budget.truncate("", failure.text, 1_500) for failure in health.failures],
        messages=[budget.truncate("", refusal.text, 1_500) for refusal in health.refusals[:_MOST]],
    )


PAGE = Page("system", show, name="System", key="s", tells_of_run_alone=False)
