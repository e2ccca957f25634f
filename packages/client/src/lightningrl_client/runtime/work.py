"""`lightningrl work`: worker processes for a server that runs elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from lightningrl.console import cancel_on_signals
from lightningrl.credentials import check_address, check_key
from lightningrl.dialects import build_dialects
from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl_client.recipe_file import load_recipe
from lightningrl_client.runtime.agent_loader import check_agent_file
from lightningrl_client.runtime.recipe_pool import start_pool

__all__ = ["work_command"]


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
            Console().print(
                f"{pool.describe()} run {recipe.agent} for {server}; stop them with Ctrl-C", highlight=False
            )
            await pool.wait()
        except asyncio.CancelledError:
            Console().print("stopping: running attempts get a few seconds to end", highlight=False)
        finally:
            await pool.stop()

    asyncio.run(main())
