"""The recipe's workers, for a server that runs anywhere: `lightningrl work`, and what a run has in common with it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from lightningrl.console import cancel_on_signals
from lightningrl.credentials import check_address, check_key
from lightningrl.dialects import DIALECTS, Dialect, build_dialects
from lightningrl.errors import ConfigError
from lightningrl.plugins import Plugin, PluginManager, load_plugins
from lightningrl.recipe import Recipe
from lightningrl_client.recipe_file import load_recipe
from lightningrl_client.runtime.agent_loader import check_agent_file, runs_in_process
from lightningrl_client.runtime.in_process import ThreadLauncher
from lightningrl_client.runtime.launcher import build_launcher
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_client.runtime.task_sources import worker_agent

__all__ = ["start_pool", "withheld_variables", "work_command"]

STORE_VARIABLES: Final = ("PGPASSWORD", "PGPASSFILE", "PGSERVICE", "PGSERVICEFILE", "PGSSLKEY")
"""Variables that open the database of `store_url`."""
LOGGER_VARIABLES: Final = {
    "mlflow": ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_URI"),
    "swanlab": ("SWANLAB_API_KEY",),
    "wandb": ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"),
}
"""Variables with the keys of our own loggers, also where these are not installed: on a worker's machine."""


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
    agent: Any = worker_agent(recipe)
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
        infrastructure=recipe.outcomes.infrastructure,
        withheld=withheld_variables(recipe, plugins.records("lightningrl_loggers")),
        base_dir=recipe.folder,
        log_folder=logs,
        launcher=ThreadLauncher(agent) if is_here else build_launcher(recipe.runtime, plugins),
        patience_s=patience_s,
    )


def withheld_variables(recipe: Recipe, loggers: Mapping[str, Plugin]) -> tuple[str, ...]:
    """Environment variables with the run's own secrets, which agents do not get, less `runtime.environment`;
    `loggers`: those that are installed, by name."""
    upstreams = [] if recipe.upstream is None else [recipe.upstream, *recipe.upstream.models.values()]
    names = [
        *(asked.api_key_env for asked in (recipe.judge, *upstreams) if asked is not None),
        *(() if recipe.telemetry is None else recipe.telemetry.headers_env.values()),
        *(STORE_VARIABLES if recipe.store_url is not None else ()),
        *(variable for name in recipe.loggers for variable in LOGGER_VARIABLES.get(name, ())),
        *(variable for name in recipe.loggers if name in loggers for variable in loggers[name].secrets),
    ]
    return tuple(dict.fromkeys(name for name in names if name and name not in recipe.runtime.environment))


def work_command(source: Path, *, server: str, key: str, settings: Mapping[str, Any]) -> None:
    recipe = load_recipe(source, settings)
    key = check_key(key, "--key (or LIGHTNINGRL_KEY)")
    try:
        check_address(server)
    except ValueError as error:
        raise ConfigError(f"--server: {error}") from None
    if recipe.runtime.workers == 0:
        raise ConfigError("runtime.workers is 0, so there is nothing to start; say how many, for example --workers 4")
    plugins = load_plugins()
    for adapter in recipe.adapters:
        plugins.find("lightningrl_adapters", adapter)
    check_agent_file(recipe)
    dialects = build_dialects(plugins)

    async def main() -> None:
        cancel_on_signals()
        pool = start_pool(recipe, server, key, None, plugins, dialects=dialects)
        assert pool is not None
        try:
            await pool.start()
            sentence = f"{pool.describe()} run {recipe.agent} for {server}; stop them with Ctrl-C"
            Console().print(sentence, highlight=False)
            await pool.wait()
        except asyncio.CancelledError:
            Console().print("stopping: running attempts get a few seconds to end", highlight=False)
        finally:
            await pool.stop()

    asyncio.run(main())
