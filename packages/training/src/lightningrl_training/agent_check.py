"""Imports the recipe's agent once and makes its adapters, in a process of its own, before anything heavy starts: a
worker would say what is wrong with them a minute later.

    check_agent(recipe) ─► python -m lightningrl_training.agent_check FILE:NAME FOLDER ADAPTER… ─► its sentence, as
    ConfigError

The process has a worker's environment, so that a client made at import finds its key; nothing that it imports reaches
ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

from lightningrl.errors import ConfigError, PluginError
from lightningrl_client.runtime.agent_loader import agent_reference, check_agent_file, load_agent, runs_in_process

if TYPE_CHECKING:
    from lightningrl.recipe import Recipe

__all__ = ["check_agent"]

REFUSED: Final = 3
"""Exit status with which the sentence is the last line of stderr."""
IMPORT_S: Final = 30.0
NOWHERE: Final = "http://127.0.0.1:9"
"""Address for model calls that are made at import: nobody listens there."""


class Check(Protocol):
    """A check that runs."""

    def wait(self) -> None:
        """Raise ConfigError with what is wrong."""
        ...


def check_agent(recipe: Recipe, *, will_work: bool = False) -> AbstractContextManager[Check]:
    """A check of the recipe's agent: entering starts it, `wait` raises what is wrong, leaving ends it. Where all
    workers are elsewhere, or `will_work` here in a moment and say the same, no process imports it."""
    try:
        if runs_in_process(recipe):
            load_agent(recipe.agent, recipe.folder)
            return nullcontext(NoProcess())
        agent = agent_reference(recipe.agent)
        check_agent_file(recipe)
    except ConfigError as error:
        return nullcontext(NoProcess(error))
    is_here = not will_work and recipe.runtime.workers > 0 and recipe.runtime.launcher == "local"
    return AgentProcess(agent, recipe) if is_here else nullcontext(NoProcess())


class NoProcess:
    """A check that needs no process."""

    def __init__(self, error: ConfigError | None = None) -> None:
        self._error = error

    def wait(self) -> None:
        """Raise the error that was found, if any."""
        if self._error is not None:
            raise self._error


class AgentProcess:
    """The process that imports the agent."""

    def __init__(self, agent: str, recipe: Recipe) -> None:
        self._agent = agent
        self._recipe = recipe
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> AgentProcess:
        from lightningrl_client.runtime.environment import worker_environment

        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "lightningrl_training.agent_check",
                self._agent,
                str(self._recipe.folder),
                *self._recipe.adapters,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=worker_environment(NOWHERE, os.environ, withheld=self._recipe.withheld_variables),
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def wait(self) -> None:
        """Raise ConfigError with what is wrong. An import that takes longer than `IMPORT_S` is left to the workers."""
        assert self._process is not None
        try:
            _, errors = self._process.communicate(timeout=IMPORT_S)
        except subprocess.TimeoutExpired:
            return
        status = self._process.returncode
        last = errors.strip().rpartition("\n")[2][:600]
        if status == REFUSED:
            raise ConfigError(last)
        if status:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            raise ConfigError(
                f"agent {self._agent!r}: importing it ended its process with {how}: {last or 'it said nothing'}; fix "
                "it, then run again"
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
