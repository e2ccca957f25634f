"""Task folders in Harbor's format, as a plugin; what runs them is imported when a run uses it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from lightningrl.plugins import Plugin, hookimpl


class _Lazy:
    """Factory of the source, imported when it is called or its options are read."""

    def __call__(self, **options: Any) -> Any:
        return self._load()(**options)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._load())

    @staticmethod
    def _load() -> Callable[..., Any]:
        source: Callable[..., Any] = importlib.import_module("lightningrl_tasks_harbor.source").HarborTasks
        return source


@hookimpl
def lightningrl_tasks() -> Iterable[Plugin]:
    summary = "task folders in Harbor's format: a box for each rollout, one bash tool, tests/test.sh as the reward"
    yield Plugin(name="harbor", summary=summary, factory=_Lazy())
