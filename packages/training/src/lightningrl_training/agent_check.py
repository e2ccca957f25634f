"""Imports the recipe's agent once and makes its adapters, in a process of its own, before anything heavy starts: a
worker would say what is wrong with them a minute later.

    check_agent ─► python -m lightningrl_training.agent_check FILE:NAME FOLDER ADAPTER… ─► its sentence, as ConfigError

The process has a worker's environment, so that a client made at import finds its key; its imports stay its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from lightningrl.errors import ConfigError, PluginError
from lightningrl_client.runtime.agent_loader import agent_reference, check_agent_file, load_agent, runs_in_process
from lightningrl_client.runtime.task_sources import worker_agent

if TYPE_CHECKING:
    from lightningrl.plugins import PluginManager
    from lightningrl.recipe import Recipe

__all__ = ["check_agent"]

REFUSED: Final = 3
"""Exit status with which the sentence is the last line of stderr."""
IMPORT_S: Final = 30.0
NOWHERE: Final = "http://127.0.0.1:9"
"""Address for model calls that are made at import: nobody listens there."""


@contextmanager
def check_agent(recipe: Recipe, plugins: PluginManager, *, will_work: bool = False) -> Iterator[Callable[[], None]]:
    """Check the recipe's agent beside the body, which gets a function that raises ConfigError with what is wrong. Where
    all workers are elsewhere, or `will_work` here in a moment and say the same, no process imports it."""
    agent, problem = "", None
    try:
        if runs_in_process(recipe):
            load_agent(recipe.agent, recipe.folder)
        else:
            agent = agent_reference(worker_agent(recipe))
            check_agent_file(recipe)
    except ConfigError as error:
        problem = error

    def wait() -> None:
        if problem is not None:
            raise problem
        if process is not None:
            _wait(process, agent)

    is_here = not will_work and recipe.runtime.workers > 0 and recipe.runtime.launcher == "local"
    process = _start(agent, recipe, plugins) if agent and is_here and problem is None else None
    try:
        yield wait
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def _start(agent: str, recipe: Recipe, plugins: PluginManager) -> subprocess.Popen[str]:
    """Start the process that imports the agent."""
    from lightningrl_client.runtime.environment import worker_environment
    from lightningrl_client.runtime.recipe_pool import withheld_variables

    withheld = withheld_variables(recipe, plugins.records("lightningrl_loggers"))
    return subprocess.Popen(
        [sys.executable, "-m", "lightningrl_training.agent_check", agent, str(recipe.folder), *recipe.adapters],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=worker_environment(NOWHERE, os.environ, withheld=withheld),
        start_new_session=True,
    )


def _wait(process: subprocess.Popen[str], agent: str) -> None:
    """Raise ConfigError with what is wrong. An import that takes longer than `IMPORT_S` is left to the workers."""
    try:
        _, errors = process.communicate(timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return
    status, last = process.returncode, errors.strip().rpartition("\n")[2][:600]
    if status == REFUSED:
        raise ConfigError(last)
    if status:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise ConfigError(
            f"agent {agent!r}: importing it ended its process with {how}: {last or 'it said nothing'}; fix it, then "
            "run again"
        )


def main() -> int:
    try:
        load_agent(*sys.argv[1:3])
        if adapters := sys.argv[3:]:
            from lightningrl_client.runtime.telemetry import load_adapter

            for adapter in adapters:
                load_adapter(adapter)
    except (ConfigError, PluginError) as error:
        sys.stderr.write("\n" + " ".join(str(error).split()) + "\n")
        return REFUSED
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads that the agent left behind must not keep the process
