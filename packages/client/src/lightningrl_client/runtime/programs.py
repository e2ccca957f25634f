"""Programs that an agent starts call models for the rollout that started them, however many run in the process.

    subprocess.Popen (asyncio and anyio use it)    its `env`            ┐ the attempt's address and key, in the place
    multiprocessing, `spawn` and `forkserver`      what the child reads ┘ of those that the process has
    multiprocessing, `fork`                        nothing: a forked child has our patches

An environment of the caller's own that names neither an address nor a key of an API is left as it is, and so is one
that names an address elsewhere: what its author left out stays out.
"""

from __future__ import annotations

import inspect
import multiprocessing.spawn
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from lightningrl.instrumentation import Args, Kwargs, Patches
from lightningrl_client.attribution.redirect import Redirection
from lightningrl_client.runtime.environment import gateway_environment

__all__ = ["attempt_variables", "programs_attributed"]

PLACE: Final = list(inspect.signature(subprocess.Popen.__init__).parameters).index("env") - 1
"""Index of `env` among Popen's arguments."""


@contextmanager
def programs_attributed(redirection: Redirection) -> Iterator[None]:
    """While it is open, programs that are started within a rollout find its attempt."""

    def start(wrapped: Callable[..., None], _: Any, args: Args, kwargs: Kwargs) -> None:
        given = args[PLACE] if len(args) > PLACE else kwargs.get("env")
        # an exclusive process has the variables of its rollout
        inherited = {} if redirection.scope.exclusive else os.environ
        before = inherited if given is None else given
        if isinstance(before, Mapping):  # else Popen says what is wrong with it
            ours = attempt_variables(redirection, before)
            if ours:
                env = {**before, **ours}
                if len(args) > PLACE:
                    args = (*args[:PLACE], env, *args[PLACE + 1 :])
                else:
                    kwargs = {**kwargs, "env": env}
        wrapped(*args, **kwargs)

    def prepare(wrapped: Callable[..., dict[str, Any]], _: Any, args: Args, kwargs: Kwargs) -> dict[str, Any]:
        data = wrapped(*args, **kwargs)
        ours = {} if redirection.scope.exclusive else attempt_variables(redirection, os.environ)
        return {**data, "lightningrl": _Variables(ours)} if ours else data

    patches = Patches()
    patches.wrap(subprocess.Popen, "__init__", start)
    patches.wrap(multiprocessing.spawn, "get_preparation_data", prepare)
    try:
        yield
    finally:
        patches.restore()


def attempt_variables(redirection: Redirection, given: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a program with the environment `given` finds the attempt that runs here; none outside of a
    rollout, and none of an API that `given` says nothing of, or whose address is elsewhere."""
    rollout = redirection.scope.current()
    if rollout is None or (redirection.is_guest and not redirection.scope.is_within()):
        return {}
    asked = [
        dialect
        for dialect in redirection.dialects
        if any(given.get(name) for name in (*dialect.base_variables, *dialect.key_variables))
        and all(redirection.is_answered(str(given[name])) for name in dialect.base_variables if given.get(name))
    ]
    return gateway_environment(redirection.server_url, asked, rollout.base_path, rollout.key)


class _Variables:
    """Variables that a new process takes over when it reads what it is to do."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = dict(variables)

    def __reduce__(self) -> tuple[Callable[[Mapping[str, str]], None], tuple[dict[str, str]]]:
        return _take_over, (self._variables,)


def _take_over(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
