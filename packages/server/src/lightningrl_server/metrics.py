"""Metrics for Prometheus at `/metrics`: the server's state as it is asked, calls as they were counted, the run's newest numbers.

gateway ─ each call ─► counters, histogram ─┐
store, engines, workers, vitals, metrics.jsonl ─ when asked ─┴► text
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from lightningrl.types import Outcome, PolicyStatus, RolloutState
from lightningrl_server.store.protocol import Look
from lightningrl_server.workers import Workers

__all__ = ["TEXT", "Engines", "ServerMetrics", "Vitals", "memory_bytes", "newest_metrics"]

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds."""
_TAIL_BYTES: Final = 256 * 1024
"""Of `metrics.jsonl`."""
_MOST_NAMES: Final = 1000
"""Metrics of a step: a hook may report what it likes."""


class Engines(Protocol):
    """Link to whatever samples: says how policies are served now."""

    def status(self) -> Sequence[PolicyStatus]: ...


class ServerMetrics:
    """Of one server. A `lightningrl_server.gateway.watch.CallWatch`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._seconds = Histogram(
            "lightningrl_call_seconds", "From a model call's arrival to its record", ["policy"], buckets=_BUCKETS, registry=self._registry
        )
        self._tokens = Counter("lightningrl_tokens", "Tokens of recorded calls", ["policy", "kind"], registry=self._registry)
        self._refused = Counter("lightningrl_calls_refused", "Model calls that were refused", ["code"], registry=self._registry)
        self.calls_of_no_rollout = 0
        """Of those that were refused."""
        self._of_policy: dict[str, tuple[Histogram, Counter, Counter]] = {}

    def answered(self, policy: str, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        found = self._of_policy.get(policy)
        if found is None:
            prompt, completion = (self._tokens.labels(policy, kind) for kind in ("prompt", "completion"))
            found = self._of_policy[policy] = self._seconds.labels(policy), prompt, completion
        histogram, prompt, completion = found
        histogram.observe(seconds)
        prompt.inc(prompt_tokens)
        completion.inc(completion_tokens)

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()
        self.calls_of_no_rollout += code == "no_rollout"

    async def text(self, look: Look, engines: Engines, workers: Workers, vitals: Vitals | None, folder: Path | None) -> bytes:
        """All of it, in Prometheus' text format."""
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
            *_single("lightningrl_memory_bytes", "Resident memory of the server", memory_bytes()),
            *_single(
                "lightningrl_longest_pause_seconds",
                "The longest that the event loop stood still, since the start",
                None if vitals is None else vitals.longest_pause_s,
            ),
            *_by_label("lightningrl_metric", "The run's newest value of each metric in metrics.jsonl", "name", named),
        ]
        return generate_latest(self._registry) + generate_latest(_KnownFamilies(families))


class _KnownFamilies:
    """Families that are known already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def newest_metrics(path: Path) -> dict[str, float]:
    """The last value of each metric, from the end of a run's `metrics.jsonl`; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    found: dict[str, float] = {}
    for line in lines:
        try:
            row: Any = json.loads(line)
        except ValueError:  # the tail begins within a line; the trainer writes another just now
            continue
        if isinstance(row, dict):
            found |= {str(name): float(value) for name, value in row.items() if isinstance(value, int | float)}
    return dict(list(found.items())[-_MOST_NAMES:])


def _policies(engines: Engines) -> Iterator[Metric]:
    policies = engines.status()
    kinds: dict[str, tuple[str, dict[str, float | None]]] = {
        "version": ("Version of the weights that are served", {one.policy: one.version for one in policies}),
        "engines": ("Engines that are connected", {one.policy: one.connected for one in policies}),
        "in_flight": ("Calls that are being generated or wait", {one.policy: one.in_flight for one in policies}),
        "held": ("1 while calls are held for new weights", {one.policy: float(one.held) for one in policies}),
    }
    for name, (about, values) in kinds.items():
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


INTERVAL_S: Final = 0.25
_STATM: Final = Path("/proc/self/statm")


class Vitals:
    """Of one event loop. `watch` runs beside everything else and wakes four times a second."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.longest_pause_s = 0.0
        """The longest that nothing else could run, since the start: one body that takes long, or a machine that is too busy."""
        self._interval_s = interval_s

    async def watch(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(self._interval_s)
            self.longest_pause_s = max(self.longest_pause_s, loop.time() - before - self._interval_s)


def memory_bytes() -> int | None:
    """Resident memory of this process; None where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
