"""Environment variables of a worker: where clients that read them, and the agent's subprocesses, find the gateway."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final
from urllib.parse import quote, urlsplit

from lightningrl.control_api import LOGS, TRACES
from lightningrl.dialects import DIALECTS, Dialect
from lightningrl.keys import KEY_VARIABLE
from lightningrl_client.attribution.model_calls import UNATTRIBUTED_KEY
from lightningrl_client.attribution.scope import ActiveRollout

__all__ = ["gateway_environment", "rollout_environment", "telemetry_environment", "worker_environment"]

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
    """The variables by which a program's OTLP exporters send its spans and log records to its attempt. A signal that
    `environment` points somewhere stays there."""
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
    """The environment of a worker: `environment`, one thread per numeric library, no proxy before our server, the
    gateway's variables.

    Variables that are `withheld`, the run's own secrets, are left out, and so is the key that whoever starts workers
    was given.
    """
    left_out = {KEY_VARIABLE, *withheld}
    given = {name: value for name, value in environment.items() if name not in left_out}
    host = urlsplit(server_url).hostname or ""
    exceptions = [place.strip() for name in ("NO_PROXY", "no_proxy") for place in environment.get(name, "").split(",")]
    # `*` counts alone (curl, urllib)
    no_proxy = "*" if "*" in exceptions else ",".join(dict.fromkeys(filter(None, [*exceptions, host])))
    return {
        **SINGLE_THREADED,
        **given,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        **gateway_environment(server_url, dialects),
    }


@contextmanager
def rollout_environment(server_url: str, rollout: ActiveRollout, dialects: Sequence[Dialect]) -> Iterator[None]:
    """Point the variables at the rollout while it runs: for subprocesses and clients that no patch reaches. Exclusive
    processes only."""
    os.environ.update(gateway_environment(server_url, dialects, rollout.base_path, rollout.key))
    try:
        yield
    finally:
        os.environ.update(gateway_environment(server_url, dialects))
