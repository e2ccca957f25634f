"""The recipe's workers, for a server that runs anywhere: what `lightningrl work` and a run have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightningrl.dialects import DIALECTS, Dialect
from lightningrl.plugins import PluginManager
from lightningrl.recipe import Recipe
from lightningrl_client.runtime.agent_loader import runs_in_process
from lightningrl_client.runtime.in_process import ThreadLauncher
from lightningrl_client.runtime.launcher import build_launcher
from lightningrl_client.runtime.pool import WorkerPool

__all__ = ["start_pool"]


def start_pool(
    recipe: Recipe | None,
    server_url: str,
    run_key: str,
    logs: Path | None,
    plugins: PluginManager,
    *,
    dialects: Sequence[Dialect] = DIALECTS,
    patience_s: float = 60.0,
    part: tuple[int, int] = (0, 1),
) -> WorkerPool | None:
    """The recipe's worker pool, not started; None where the recipe has no workers here. `part`: the how-manieth of how
    many servers this is, each of which gets its share."""
    number, servers = part
    workers = 0 if recipe is None else len(range(number, recipe.runtime.workers, servers))
    if recipe is None or workers == 0:
        return None
    agent: Any = recipe.agent
    is_here = runs_in_process(recipe)
    return WorkerPool(
        server_url,
        run_key,
        getattr(agent, "__qualname__", type(agent).__name__) if is_here else agent,
        workers=workers,
        concurrency=recipe.runtime.concurrency,
        adapters=recipe.adapters,
        base_urls=recipe.runtime.base_urls,
        dialects=dialects,
        withheld=recipe.withheld_variables(plugins.records("lightningrl_loggers")),
        base_dir=recipe.folder,
        log_folder=logs,
        launcher=ThreadLauncher(agent) if is_here else build_launcher(recipe.runtime, plugins),
        patience_s=patience_s,
    )
