"""Places where workers run: a launcher has supervisors started there. The state of workers is known to the server.

WorkerPool ─ start, stop ─► WorkerLauncher ─► Supervisor, one per machine ─► worker processes
                            `local`: here; `ray`: in one actor per node
                            Kubernetes needs none: `lightningrl work` in a Deployment
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightningrl.errors import LightningError, PluginError
from lightningrl.plugins import PluginManager
from lightningrl.recipe_keys import check_options
from lightningrl.recipe_tables import RuntimeConfig
from lightningrl_client.runtime.settings import WorkerSettings

__all__ = ["WorkerLauncher", "WorkerPlan", "WorkerPoolError", "build_launcher", "check_launcher"]


class WorkerPoolError(LightningError):
    """The workers cannot go on: they keep dying, find no place, or the server is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """Plan by which workers are started."""

    settings: WorkerSettings
    """Their ids begin with its `worker_id`."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Added to that of their machine."""
    log_folder: Path | None = None
    """Takes `worker-0.log` and so on; None = what they print goes to the supervisor's stderr."""


@runtime_checkable
class WorkerLauncher(Protocol):
    """Has workers run somewhere."""

    async def start(self, count: int, plan: WorkerPlan) -> None:
        """Have `count` workers run, in one or more `Supervisor`s whose names begin with the plan's `worker_id`. Raises
        ConfigError or WorkerPoolError where that cannot be; what fails later a supervisor tells the server."""

    async def stop(self, grace_s: float) -> None:
        """Running attempts get `grace_s` to finish. May be called without `start`, and again."""

    def describe(self) -> str:
        """Where, completing "4 workers …": `on this machine`, `on 2 Ray nodes`."""


def check_launcher(runtime: RuntimeConfig, plugins: PluginManager) -> None:
    """Raise PluginError or ConfigError where the recipe's launcher is not installed or does not take its settings."""
    plugin = plugins.find("lightningrl_worker_launchers", runtime.launcher)
    check_options(
        plugin.factory, runtime.launchers.get(runtime.launcher, {}), what=f"worker launcher {runtime.launcher!r}"
    )


def build_launcher(runtime: RuntimeConfig, plugins: PluginManager) -> WorkerLauncher:
    """The launcher that the recipe names, with its settings; nothing is started."""
    check_launcher(runtime, plugins)
    options: Mapping[str, Any] = runtime.launchers.get(runtime.launcher, {})
    launcher = plugins.find("lightningrl_worker_launchers", runtime.launcher).build(**options)
    if not isinstance(launcher, WorkerLauncher):
        problem = f"worker launcher {runtime.launcher!r} has no start, stop or describe"
        raise PluginError(f"{problem}; see lightningrl_client.runtime.launcher")
    return launcher
