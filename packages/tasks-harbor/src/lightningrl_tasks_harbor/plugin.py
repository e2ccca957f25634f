"""Task folders in Harbor's format, as a plugin; what runs them is imported when a run uses it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lightningrl.plugins import Plugin, hookimpl

if TYPE_CHECKING:
    from lightningrl_tasks_harbor.source import HarborTasks


def _source(**options: Any) -> HarborTasks:
    from lightningrl_tasks_harbor.source import HarborTasks

    return HarborTasks(**options)


@hookimpl
def lightningrl_tasks() -> Iterable[Plugin]:
    summary = "task folders in Harbor's format: a box for each rollout, one bash tool, tests/test.sh as the reward"
    yield Plugin(name="harbor", summary=summary, factory=_source)
