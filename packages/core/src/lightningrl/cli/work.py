"""`lightningrl work`: worker processes for a server that runs elsewhere."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from lightningrl.config import load_recipe
from lightningrl.plugins import load_plugins
from lightningrl.training.parts import check_agent_file

__all__ = ["work_command"]


def work_command(source: Path, *, server: str, key: str, workers: int, settings: Mapping[str, Any]) -> None:
    recipe = load_recipe(source, {**settings, "runtime.workers": workers})
    plugins = load_plugins()
    for adapter in recipe.adapters:
        plugins.find("lightningrl_adapters", adapter)
    check_agent_file(recipe)

    async def main() -> None:
        from lightningrl.training.session import start_pool

        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        pool = start_pool(recipe, server, key, None)
        if pool is None:
            return
        try:
            await pool.start()
            Console().print(f"{workers} workers run {recipe.agent} for {server}; stop them with Ctrl-C", highlight=False)
            await pool.wait()
        except asyncio.CancelledError:
            Console().print("stopping: running attempts get a few seconds to end", highlight=False)
        finally:
            await pool.stop()

    asyncio.run(main())
