"""Plugin of this distribution: the `autogen` adapter. AutoGen is imported when it is made, and not before."""

from __future__ import annotations

from collections.abc import Iterable

import lightningrl_autogen
from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_adapters"]


@hookimpl
def lightningrl_adapters() -> Iterable[Plugin]:
    yield Plugin(
        name="autogen",
        summary="AutoGen: roles, spans and tools of agents and teams, on runtimes of any kind",
        factory=lambda: lightningrl_autogen.AutoGenAdapter(),
    )
