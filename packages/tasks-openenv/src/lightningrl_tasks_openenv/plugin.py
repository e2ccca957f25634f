"""Plugin of this distribution: the `openenv` task source. Its clients are imported when it is made, and not before."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import lightningrl_tasks_openenv
from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_tasks"]


class _Factory:
    """`OpenEnvTasks` and its signature, imported when one of them is asked for."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(lightningrl_tasks_openenv.OpenEnvTasks)

    def __call__(self, **options: Any) -> Any:
        return lightningrl_tasks_openenv.OpenEnvTasks(**options)


@hookimpl
def lightningrl_tasks() -> Iterable[Plugin]:
    yield Plugin(name="openenv", summary="OpenEnv servers: tasks, tools, a reward for each step", factory=_Factory())
