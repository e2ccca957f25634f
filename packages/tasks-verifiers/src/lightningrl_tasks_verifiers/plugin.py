"""Plugin of this distribution: the `verifiers` task source. Its process starts when a task is first asked for."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import lightningrl_tasks_verifiers
from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_tasks"]


class _Factory:
    """`VerifiersTasks` and its signature, imported when one of them is asked for."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(lightningrl_tasks_verifiers.VerifiersTasks)

    def __call__(self, **options: Any) -> Any:
        return lightningrl_tasks_verifiers.VerifiersTasks(**options)


@hookimpl
def lightningrl_tasks() -> Iterable[Plugin]:
    yield Plugin(name="verifiers", summary="Tasksets of verifiers, by a process of their own", factory=_Factory())
