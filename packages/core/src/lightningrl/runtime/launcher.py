"""Where workers run: a launcher starts them, a line follows each; the pool supervises them, the same way everywhere.

WorkerPool ─ open, spawn, close ─► WorkerLauncher (`local`: processes of this machine; `ray`: actors over a cluster; …)
           ─ read, write, kill, wait ─► WorkerLine ─► the worker's standard input and output
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightningrl.config import RuntimeConfig, check_options
from lightningrl.errors import LightningError, PluginError
from lightningrl.plugins import PluginManager
from lightningrl.runtime.settings import WorkerSettings

__all__ = ["WorkerExit", "WorkerLauncher", "WorkerLine", "WorkerPoolError", "build_launcher", "check_launcher"]


class WorkerPoolError(LightningError):
    """The pool cannot go on: workers keep dying, find no place, or the server is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerExit:
    """How a worker ended."""

    how: str
    """Completes "the worker …": `died with SIGSEGV`, `exited with status 1`."""
    is_foreign: bool = False
    """It was ended from outside (SIGKILL, its machine went down), which says nothing about the agent."""
    lost_node: str | None = None
    """The machine that went down with it; all workers of one machine count as one death. None = its machine is up."""


class WorkerLine(Protocol):
    """The line to one running worker."""

    async def read(self) -> bytes:
        """The next line that the worker writes; empty = it writes no more. A cancelled read loses nothing."""
        ...

    def write(self, line: bytes) -> None:
        """Send the worker a line; where it is gone nothing happens."""
        ...

    async def kill(self) -> WorkerExit:
        """End the worker and what it started, now. May be called again."""
        ...

    async def wait(self) -> WorkerExit:
        """Returns once the worker has ended by itself."""
        ...


@runtime_checkable
class WorkerLauncher(Protocol):
    """Starts workers (`python -m lightningrl.runtime.worker`) somewhere."""

    async def open(self, server_url: str) -> None:
        """Get ready; raises ConfigError, within seconds, where no worker could be started."""
        ...

    async def spawn(self, settings: WorkerSettings, *, environment: Mapping[str, str], log: Path | None) -> WorkerLine:
        """Start a worker. `environment` is added to that of its machine; its stderr is appended to `log`, None = goes to our stderr."""
        ...

    async def close(self) -> None:
        """Let go of everything. May be called without `open`, and again."""
        ...


def check_launcher(runtime: RuntimeConfig, plugins: PluginManager) -> None:
    """Raise PluginError or ConfigError where the recipe's launcher is not installed or does not take its settings."""
    plugin = plugins.find("lightningrl_worker_launchers", runtime.launcher)
    check_options(plugin.factory, runtime.launchers.get(runtime.launcher, {}), what=f"worker launcher {runtime.launcher!r}")


def build_launcher(runtime: RuntimeConfig, plugins: PluginManager) -> WorkerLauncher:
    """The launcher that the recipe names, with its settings; not opened."""
    check_launcher(runtime, plugins)
    options: Mapping[str, Any] = runtime.launchers.get(runtime.launcher, {})
    launcher = plugins.find("lightningrl_worker_launchers", runtime.launcher).factory(**options)
    if not isinstance(launcher, WorkerLauncher):
        raise PluginError(f"worker launcher {runtime.launcher!r} has no open, spawn or close; see lightningrl.runtime.launcher")
    return launcher
