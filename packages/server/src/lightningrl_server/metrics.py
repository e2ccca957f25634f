"""Numbers of the server: what it counts of its calls and sees of itself, for Prometheus at `/metrics`.

gateway ─ each call ─► counters, histogram ─┐
store, engines, workers, event loop, metrics.jsonl ─ when asked ─┴► text
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from lightningrl.machine import resident_bytes
from lightningrl.records import PolicyStatus
from lightningrl.types import Outcome, RolloutState
from lightningrl_server.store.protocol import Look
from lightningrl_server.workers import Workers

__all__ = ["TEXT", "Engines", "ServerMetrics", "newest_metrics"]

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histogram, in seconds."""
_TAIL_BYTES: Final = 256 * 1024
"""Bytes that are read from the end of `metrics.jsonl`."""
_MOST_NAMES: Final = 1000
"""Metrics of a step: a hook may report what it likes."""
_PAUSE: Final = "The longest that the event loop stood still, since the start"
_WATCH_S: Final = 0.25
"""Seconds between two looks at the event loop."""


class Engines(Protocol):
    """Link to whatever samples: says how policies are served now."""

    def status(self) -> Sequence[PolicyStatus]: ...


class ServerMetrics:
    """Counts one server's calls and watches its event loop. A `lightningrl_server.gateway.settings.CallWatch`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        counter = partial(Counter, registry=self._registry)
        about = "From a model call's arrival to its record"
        self._seconds = Histogram(
            "lightningrl_call_seconds", about, ["policy"], buckets=_BUCKETS, registry=self._registry
        )
        self._tokens = counter("lightningrl_tokens", "Tokens of recorded calls", ["policy", "kind"])
        self._refused = counter("lightningrl_calls_refused", "Model calls that were refused", ["code"])
        self.calls_of_no_rollout = 0
        """Refused calls that belonged to no rollout."""
        self.longest_pause_s: float | None = None
        """Seconds that nothing else could run at most, since the start: one body that takes long, or a busy machine.
        None = nobody watches."""
        self._of_policy: dict[str, tuple[Histogram, Counter, Counter]] = {}

    def answered(self, policy: str, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        counters = self._of_policy.get(policy)
        if counters is None:
            prompt, completion = (self._tokens.labels(policy, kind) for kind in ("prompt", "completion"))
            counters = self._of_policy[policy] = self._seconds.labels(policy), prompt, completion
        histogram, prompt, completion = counters
        histogram.observe(seconds)
        prompt.inc(prompt_tokens)
        completion.inc(completion_tokens)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()
        self.calls_of_no_rollout += code == "no_rollout"

    async def watch(self, interval_s: float = _WATCH_S) -> None:
        """Watch the event loop until cancelled, beside everything else."""
        self.longest_pause_s = 0.0
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(interval_s)
            self.longest_pause_s = max(self.longest_pause_s, loop.time() - before - interval_s)

    async def text(self, look: Look, engines: Engines, workers: Workers, folder: Path | None) -> bytes:
        """Return everything in Prometheus' text format."""
        counts = await look.counts()
        named = {} if folder is None else newest_metrics(folder / "metrics.jsonl")
        states = {state.value: counts.states.get(state, 0) for state in RolloutState}
        outcomes = {outcome.value: counts.outcomes.get(outcome, 0) for outcome in Outcome}
        families = [
            *_by_label("lightningrl_rollouts", "Rollouts by state: running ones are leased", "state", states),
            *_by_label("lightningrl_rollouts_finished", "Finished rollouts by outcome", "outcome", outcomes),
            *_single("lightningrl_attempts", "Attempts that were leased", counts.attempts),
            *_single("lightningrl_calls", "Calls in the store", counts.calls),
            *_single("lightningrl_breaks", "Calls whose history was rendered anew", counts.breaks),
            *_single("lightningrl_late", "Calls and results refused because their attempt was over", counts.late),
            *_by_label("lightningrl_workers", "Workers that were heard of", "state", workers.states(time.time())),
            *_policies(engines),
            *_single("lightningrl_memory_bytes", "Resident memory of the server", resident_bytes()),
            *_single("lightningrl_longest_pause_seconds", _PAUSE, self.longest_pause_s),
            *_by_label("lightningrl_metric", "The run's newest value of each metric in metrics.jsonl", "name", named),
        ]
        return generate_latest(self._registry) + generate_latest(_KnownFamilies(families))


class _KnownFamilies:
    """Collector of families that are made already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def newest_metrics(path: Path) -> dict[str, float]:
    """Return the last value of each metric, from the end of a run's `metrics.jsonl`; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    values: dict[str, float] = {}
    for line in lines:
        try:
            row: Any = json.loads(line)
        except ValueError:  # the tail begins within a line; the trainer writes another just now
            continue
        if isinstance(row, dict):
            values |= {str(name): float(value) for name, value in row.items() if isinstance(value, int | float)}
    return dict(list(values.items())[-_MOST_NAMES:])


def _policies(engines: Engines) -> Iterator[Metric]:
    policies = engines.status()
    kinds: tuple[tuple[str, str, Callable[[PolicyStatus], float | None]], ...] = (
        ("version", "Version of the weights that are served", lambda policy: policy.version),
        ("engines", "Engines that are connected", lambda policy: policy.connected),
        ("in_flight", "Calls that are being generated or wait", lambda policy: policy.in_flight),
        ("held", "1 while calls are held for new weights", lambda policy: float(policy.held)),
    )
    for name, about, value in kinds:
        values = {policy.policy: value(policy) for policy in policies}
        yield from _by_label(f"lightningrl_policy_{name}", about, "policy", values)


def _single(name: str, about: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield GaugeMetricFamily(name, about, value=value)


def _by_label(name: str, about: str, label: str, values: Mapping[str, float | None]) -> Iterator[Metric]:
    family = GaugeMetricFamily(name, about, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    if family.samples:
        yield family
