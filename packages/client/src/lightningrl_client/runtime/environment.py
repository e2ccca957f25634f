"""Environment variables of a worker and of programs that it starts: where clients that read them find the gateway.

Programs that an agent starts call models for the rollout that started them, however many run in the process.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote, urlsplit

from lightningrl.control_api import LOGS, TRACES
from lightningrl.dialects import DIALECTS, Dialect
from lightningrl.instrumentation import Args, Kwargs, Patches
from lightningrl.keys import KEY_VARIABLE
from lightningrl_client.attribution.model_calls import UNATTRIBUTED_KEY
from lightningrl_client.attribution.redirect import Redirection
from lightningrl_client.attribution.scope import ActiveRollout

__all__ = [
    "attempt_variables",
    "gateway_environment",
    "programs_attributed",
    "rollout_environment",
    "telemetry_environment",
    "worker_environment",
]

SINGLE_THREADED: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def gateway_environment(
    server_url: str, dialects: Iterable[Dialect], base_path: str = "/v1", key: str = UNATTRIBUTED_KEY
) -> dict[str, str]:
    """The variables by which the SDKs choose where to call; by default a place that refuses calls (fails closed)."""
    attempt = server_url.rstrip("/") + base_path.removesuffix("/v1")
    variables: dict[str, str] = {}
    for dialect in dialects:
        variables |= {name: attempt + base for name, base in dialect.base_variables.items()}
        variables |= dict.fromkeys(dialect.key_variables, key)
    return variables


def telemetry_environment(server_url: str, rollout: ActiveRollout, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a program's OTLP exporters to reach its attempt; what `environment` points elsewhere stays."""
    variables: dict[str, str] = {}
    for signal, endpoint in (("TRACES", TRACES), ("LOGS", LOGS)):
        name = f"OTEL_EXPORTER_OTLP_{signal}"
        if environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environment.get(f"{name}_ENDPOINT"):
            continue
        path = endpoint.path.format(rid=quote(rollout.rollout_id, safe=":"), n=rollout.attempt)
        variables |= {
            f"{name}_ENDPOINT": server_url.rstrip("/") + path,
            # values are URL-encoded, by OpenTelemetry's specification
            f"{name}_HEADERS": f"authorization=Bearer%20{quote(rollout.key)}",
            f"{name}_PROTOCOL": "http/protobuf",
        }
    return variables


def worker_environment(
    server_url: str,
    environment: Mapping[str, str],
    dialects: Iterable[Dialect] = DIALECTS,
    *,
    withheld: Iterable[str] = (),
) -> dict[str, str]:
    """A worker's environment: `environment`, one thread per numeric library, no proxy before our server, the gateway's
    variables. Those `withheld`, the run's own secrets, are left out, and so is the key of who starts workers."""
    left_out = {KEY_VARIABLE, *withheld}
    given = {name: value for name, value in environment.items() if name not in left_out}
    host = urlsplit(server_url).hostname or ""
    exceptions = [place.strip() for name in ("NO_PROXY", "no_proxy") for place in environment.get(name, "").split(",")]
    # `*` counts alone (curl, urllib)
    no_proxy = "*" if "*" in exceptions else ",".join(dict.fromkeys(filter(None, [*exceptions, host])))
    proxies = {"NO_PROXY": no_proxy, "no_proxy": no_proxy}
    return {**SINGLE_THREADED, **given, **proxies, **gateway_environment(server_url, dialects)}


@contextmanager
def rollout_environment(server_url: str, rollout: ActiveRollout, dialects: Sequence[Dialect]) -> Iterator[None]:
    """Point the variables at a running rollout: for subprocesses and unpatched clients. Exclusive processes only."""
    os.environ.update(gateway_environment(server_url, dialects, rollout.base_path, rollout.key))
    try:
        yield
    finally:
        os.environ.update(gateway_environment(server_url, dialects))


PLACE: Final = list(inspect.signature(subprocess.Popen.__init__).parameters).index("env") - 1
"""Index of `env` among Popen's arguments."""


@contextmanager
def programs_attributed(redirection: Redirection) -> Iterator[None]:
    """While it is open, programs that are started within a rollout find its attempt."""

    def start(wrapped: Callable[..., None], program: Any, args: Args, kwargs: Kwargs) -> None:
        given = args[PLACE] if len(args) > PLACE else kwargs.get("env")
        # an exclusive process has the variables of its rollout
        inherited = {} if redirection.scope.exclusive else os.environ
        before = inherited if given is None else given
        # else Popen says what is wrong with it
        ours = attempt_variables(redirection, before) if isinstance(before, Mapping) else {}
        if ours and len(args) > PLACE:
            args = (*args[:PLACE], {**before, **ours}, *args[PLACE + 1 :])
        elif ours:
            kwargs = {**kwargs, "env": {**before, **ours}}
        wrapped(*args, **kwargs)
        rollout = redirection.scope.current()
        if ours and rollout is not None and not redirection.scope.exclusive:
            words = program.args if isinstance(program.args, list | tuple) else [program.args]
            rollout.programs[program.pid] = f"program {' '.join(map(str, words))[:100]!r}"

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
