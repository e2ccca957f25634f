"""What core itself brings: its adapter for OpenTelemetry, credit assigners, rewards and local workers, as any plugin would."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightningrl.advantages import needs
from lightningrl.credit import plugins as credit_plugins
from lightningrl.plugins import Plugin, hookimpl
from lightningrl.rewards import plugins as reward_plugins

if TYPE_CHECKING:
    from lightningrl.runtime.supervisor import LocalLauncher
    from lightningrl.telemetry.opentelemetry import OpenTelemetryAdapter


@hookimpl
def lightningrl_adapters() -> Iterable[Plugin]:
    yield Plugin(
        name="opentelemetry",
        summary="any framework with OpenTelemetry spans (OpenInference, GenAI conventions): roles, spans and tools",
        factory=create_opentelemetry_adapter,
    )


@hookimpl
def lightningrl_credit_assigners() -> Iterable[Plugin]:
    yield from credit_plugins.PLUGINS


@hookimpl
def lightningrl_credit_needs() -> Iterable[Plugin]:
    yield from needs.PLUGINS


@hookimpl
def lightningrl_reward_functions() -> Iterable[Plugin]:
    yield from reward_plugins.PLUGINS


@hookimpl
def lightningrl_intermediate_rewards() -> Iterable[Plugin]:
    yield from reward_plugins.INTERMEDIATE_PLUGINS


@hookimpl
def lightningrl_worker_launchers() -> Iterable[Plugin]:
    yield Plugin(name="local", summary="agent workers are processes of this machine", factory=create_local_launcher)


def create_opentelemetry_adapter() -> OpenTelemetryAdapter:
    """An `OpenTelemetryAdapter`; it has no settings."""
    from lightningrl.telemetry.opentelemetry import OpenTelemetryAdapter

    return OpenTelemetryAdapter()


def create_local_launcher() -> LocalLauncher:
    """A `LocalLauncher`; it has no settings."""
    from lightningrl.runtime.supervisor import LocalLauncher

    return LocalLauncher()
