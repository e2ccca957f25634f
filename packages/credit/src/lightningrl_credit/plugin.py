"""Registers credit assigners, what they need, and rewards, as any plugin would; imported when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterable

from lightningrl.plugins import Plugin, hookimpl


@hookimpl
def lightningrl_credit_assigners() -> Iterable[Plugin]:
    from lightningrl_credit.plugins import PLUGINS

    yield from PLUGINS


@hookimpl
def lightningrl_credit_needs() -> Iterable[Plugin]:
    from lightningrl_credit.needs import PLUGINS

    yield from PLUGINS


@hookimpl
def lightningrl_reward_functions() -> Iterable[Plugin]:
    from lightningrl_credit.rewards.plugins import PLUGINS

    yield from PLUGINS


@hookimpl
def lightningrl_intermediate_rewards() -> Iterable[Plugin]:
    from lightningrl_credit.rewards.plugins import INTERMEDIATE_PLUGINS

    yield from INTERMEDIATE_PLUGINS
