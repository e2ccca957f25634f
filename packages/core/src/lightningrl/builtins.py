"""What core itself brings: its credit assigners and rewards, as any plugin would."""

from __future__ import annotations

from collections.abc import Iterable

from lightningrl.credit import plugins as credit_plugins
from lightningrl.plugins import Plugin, hookimpl
from lightningrl.rewards import plugins as reward_plugins


@hookimpl
def lightningrl_credit_assigners() -> Iterable[Plugin]:
    yield from credit_plugins.PLUGINS


@hookimpl
def lightningrl_reward_functions() -> Iterable[Plugin]:
    yield from reward_plugins.PLUGINS


@hookimpl
def lightningrl_intermediate_rewards() -> Iterable[Plugin]:
    yield from reward_plugins.INTERMEDIATE_PLUGINS
