"""Registers the client's command, its launcher of local workers, and the adapter for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightningrl.plugins import Plugin, hookimpl

if TYPE_CHECKING:
    from lightningrl_client.runtime.supervisor import LocalLauncher
    from lightningrl_client.telemetry.opentelemetry import OpenTelemetryAdapter

__all__ = ["lightningrl_adapters", "lightningrl_commands", "lightningrl_worker_launchers"]


@hookimpl
def lightningrl_adapters() -> Iterable[Plugin]:
    yield Plugin(
        name="opentelemetry",
        summary="any framework with OpenTelemetry spans (OpenInference, GenAI conventions): roles, spans and tools",
        factory=create_opentelemetry_adapter,
    )


@hookimpl
def lightningrl_commands() -> Iterable[Plugin]:
    from lightningrl_client.commands import COMMANDS

    yield from COMMANDS


@hookimpl
def lightningrl_worker_launchers() -> Iterable[Plugin]:
    yield Plugin(name="local", summary="agent workers are processes of this machine", factory=create_local_launcher)


def create_opentelemetry_adapter() -> OpenTelemetryAdapter:
    """An `OpenTelemetryAdapter`; it has no settings."""
    from lightningrl_client.telemetry.opentelemetry import OpenTelemetryAdapter

    return OpenTelemetryAdapter()


def create_local_launcher() -> LocalLauncher:
    """A `LocalLauncher`; it has no settings."""
    from lightningrl_client.runtime.supervisor import LocalLauncher

    return LocalLauncher()
