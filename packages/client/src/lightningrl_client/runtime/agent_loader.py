"""Loads the user's agent, by `"agent.py:answer"`, `"package.module:function"`, the object itself, or the table of a
coding harness."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightningrl.errors import ConfigError
from lightningrl.loading import load_callable
from lightningrl_client.runtime.task_sources import OF_SOURCE, load_source_agent, takes_task, worker_agent

if TYPE_CHECKING:
    from lightningrl.recipe import Recipe

__all__ = ["LoadedAgent", "agent_reference", "check_agent_file", "load_agent", "runs_in_process"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedAgent:
    """An agent, ready to be called with a task's input."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    takes_task: bool = False
    """True for an agent that is called with the task, too."""


def check_agent_file(recipe: Recipe) -> None:
    """Raise ConfigError where the agent's file is not there; it is workers who import it."""
    if not isinstance(recipe.agent, str) or worker_agent(recipe) != recipe.agent:
        return
    source, _, name = recipe.agent.rpartition(":")
    file, who = str(recipe.folder / source), f"agent {recipe.agent!r}"
    if not source or not name:
        raise ConfigError(f"{who} names no callable; write 'agent.py:answer' or 'package.module:answer'")
    if source.endswith(".py") and not Path(file).is_file():
        raise ConfigError(f"{who}: no file {file!r}; paths are relative to the recipe")


def load_agent(agent: str | Callable[..., Any], base_dir: Path | str = ".") -> LoadedAgent:
    """Import the agent. Raises ConfigError if it is not there, cannot be imported, or is no agent."""
    if isinstance(agent, str) and agent.startswith("harness:{"):
        return _load_harness(agent, Path(base_dir))
    own = load_source_agent(agent, Path(base_dir)) if isinstance(agent, str) else None
    function = own or (load_callable(agent, base_dir) if isinstance(agent, str) else agent)
    name = agent if isinstance(agent, str) else getattr(agent, "__qualname__", type(agent).__name__)
    name = name if own is None else OF_SOURCE
    if inspect.isclass(function):
        raise ConfigError(f"agent {name!r} is a class; name a function that takes a task's input")
    call = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isasyncgenfunction(call) or inspect.isgeneratorfunction(call):
        remedy = "return one answer instead of yielding (consume the stream inside the agent)"
        raise ConfigError(f"agent {name!r} is a generator; {remedy}")
    with_task = own is not None and takes_task(function)
    if not with_task:
        _check_signature(name, function)
    return LoadedAgent(name=name, function=function, is_async=inspect.iscoroutinefunction(call), takes_task=with_task)


def _load_harness(text: str, folder: Path) -> LoadedAgent:
    from lightningrl_client.runtime.harnesses.agent import load_harness

    harness = load_harness(text, folder)
    return LoadedAgent(name=f"harness {harness.row.name}", function=harness, is_async=True, takes_task=True)


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin says nothing of what it takes
        return
    try:
        signature.bind("input")
    except TypeError:
        shown = f"({', '.join(signature.parameters)})" if signature.parameters else "no argument"
        remedy = "an agent is called with one argument, the task's input: give the others defaults"
        raise ConfigError(f"agent {name!r} takes {shown}; {remedy}") from None


def agent_reference(agent: str | Mapping[str, Any] | Callable[..., Any]) -> str:
    """The text by which another process finds the same agent. Raises ConfigError for lambdas, closures, instances, and
    tables that name no harness."""
    if isinstance(agent, str):
        return agent
    if isinstance(agent, Mapping):
        from lightningrl_client.runtime.harnesses.agent import harness_reference

        return harness_reference(agent)
    module_name, name = getattr(agent, "__module__", None), getattr(agent, "__qualname__", None)
    is_of_an_object = inspect.ismethod(agent) and not inspect.isclass(agent.__self__)
    if not module_name or not name or "<" in name or is_of_an_object:
        remedy = "define it at the top of a module, or name it: 'agent.py:answer'"
        raise ConfigError(f"agent {agent!r} cannot be found by a worker process; {remedy}")
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if module_name != "__main__" and "." in module_name:
        return f"{module_name}:{name}"
    if file is None:
        remedy = f"put it into a file and name it: 'agent.py:{name}'"
        raise ConfigError(f"agent {name!r} lives in an interactive session; {remedy}")
    return f"{Path(file).resolve()}:{name}"


def runs_in_process(recipe: Recipe) -> bool:
    """True if the agent is an object that no other process can import, and its workers are to be on this machine."""
    if isinstance(recipe.agent, Mapping):
        return False
    try:
        agent_reference(recipe.agent)
    except ConfigError:
        return recipe.runtime.launcher == "local" and recipe.runtime.workers > 0
    return False
