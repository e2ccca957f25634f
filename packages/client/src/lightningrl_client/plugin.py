"""Registers the client's command, its launcher of local workers, and the adapter for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterable
from pkgutil import resolve_name

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_adapters", "lightningrl_commands", "lightningrl_worker_launchers"]


@hookimpl
def lightningrl_adapters() -> Iterable[Plugin]:
    yield Plugin(
        name="opentelemetry",
        summary="any framework with OpenTelemetry spans (OpenInference, GenAI conventions): roles, spans and tools",
        factory=lambda: resolve_name("lightningrl_client.telemetry.opentelemetry:OpenTelemetryAdapter")(),
    )


@hookimpl
def lightningrl_commands() -> Iterable[Plugin]:
    from lightningrl_client.commands import COMMANDS

    yield from COMMANDS


@hookimpl
def lightningrl_worker_launchers() -> Iterable[Plugin]:
    yield Plugin(
        name="local",
        summary="agent workers are processes of this machine",
        factory=lambda: resolve_name("lightningrl_client.runtime.supervisor:LocalLauncher")(),
    )
