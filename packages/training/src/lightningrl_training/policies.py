"""The policies of a run while it runs: each with its engine and, where it is trained, its learner.

samples ─► by policy ─► hold its requests ─► Backend.learn ─► release them with the new version
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lightningrl.backends import Backend, LearnReport, Returner, Speed
from lightningrl.errors import RunFolderError
from lightningrl.types import Sample, Trajectory
from lightningrl_training.steps_telemetry import NO_SPANS, StepSpans, note

__all__ = ["Policies", "PolicyLink", "RunningPolicy", "load_backend"]


class PolicyLink(Protocol):
    """Holds the policy's requests while weights change; `lightningrl_server.engines.link.EngineLink` is one."""

    async def hold(self) -> None: ...
    async def release(self, version: int) -> None: ...
    @property
    def call_speed(self) -> float | None:
        """Tokens per second that a call is sampled with; None = none was yet."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningPolicy:
    """A policy with its engine and, where it is trained, its learner."""

    name: str
    backend: Backend
    link: PolicyLink
    is_trained: bool
    speed: Speed | None = None
    """Measured at the start; None = nobody waits for it, or its backend does not say."""


class Policies:
    """All policies of a run, taught and saved together."""

    def __init__(self, policies: Iterable[RunningPolicy], spans: StepSpans = NO_SPANS) -> None:
        self._spans = spans
        self._policies = tuple(policies)
        self._trained = tuple(policy for policy in self._policies if policy.is_trained)

    @property
    def versions(self) -> dict[str, int]:
        """Versions that the policies serve, by name."""
        return {policy.name: policy.backend.engine.info.version for policy in self._policies}

    @property
    def call_speed(self) -> float | None:
        """Tokens per second that a call of the slowest policy is sampled with; None = none was yet."""
        speeds = [policy.link.call_speed for policy in self._policies]
        return min((speed for speed in speeds if speed is not None), default=None)

    @property
    def speed(self) -> Speed | None:
        """Speed of the slowest sampler among the policies that were measured."""
        measured = [policy.speed for policy in self._policies if policy.speed is not None]
        return min(measured, key=lambda speed: speed.sampled, default=None)

    def staleness(self, trajectories: Iterable[Trajectory]) -> int:
        """Versions between the weights that these were sampled by and those of now, the most of any trained call."""
        versions = self.versions
        calls = (call for trajectory in trajectories for call in trajectory.transitions if call.trainable)
        return max((abs(versions[call.policy] - call.policy_version) for call in calls), default=0)

    async def learn(
        self, samples: Sequence[Sample], *, say: Callable[[str], None] = lambda sentence: None
    ) -> dict[str, LearnReport]:
        """One optimisation step of each trained policy with rows, one after the other. `say` gets a backend's notes."""
        reports: dict[str, LearnReport] = {}
        for policy in self._trained:
            rows = [sample for sample in samples if sample.policy == policy.name]
            if rows:
                reports[policy.name] = await self._learn(policy, rows)
                for sentence in reports[policy.name].notes:
                    say(sentence)
        return reports

    async def _learn(self, policy: RunningPolicy, rows: list[Sample]) -> LearnReport:
        backend, link = policy.backend, policy.link
        if backend.serves_while_learning:
            report = await self._teach(policy, rows)
            await self._swap(policy, report.policy_version)
            return report
        await link.hold()
        try:
            return await self._teach(policy, rows)
        finally:
            await self._swap(policy, backend.engine.info.version)

    async def _teach(self, policy: RunningPolicy, rows: list[Sample]) -> LearnReport:
        with self._spans.span("learn", policy=policy.name, rows=len(rows)) as span:
            report = await asyncio.to_thread(policy.backend.learn, rows)
            note(span, {"tokens": report.tokens})
            return report

    async def _swap(self, policy: RunningPolicy, version: int) -> None:
        """Let calls go on, with these weights."""
        with self._spans.span("swap", policy=policy.name, version=version):
            await policy.link.release(version)

    @property
    def can_go_back(self) -> bool:
        """True if each trained policy can return to saved weights while the run goes on."""
        return all(isinstance(policy.backend, Returner) for policy in self._trained)

    async def go_back(self, folder: Path, *, slower: float) -> dict[str, float]:
        """Restore what `save` wrote; returns the learning rates from now on, `slower` times those before, by policy."""
        rates: dict[str, float] = {}
        for policy in self._trained:
            assert isinstance(policy.backend, Returner)
            await policy.link.hold()
            try:
                rates[policy.name] = await asyncio.to_thread(
                    policy.backend.go_back, folder / policy.name, slower=slower
                )
            finally:
                await self._swap(policy, policy.backend.engine.info.version)
        return rates

    def describe(self, reports: Mapping[str, LearnReport]) -> dict[str, float]:
        """A step's metrics: `learn/loss`, `policy_version`; of several policies `learn/NAME/loss`, and so on. A policy
        that had no rows has its version alone."""
        metrics: dict[str, float] = {}
        for policy in self._trained:
            below = f"/{policy.name}" if len(self._trained) > 1 else ""
            if policy.name in reports:
                metrics |= {f"learn{below}/{key}": value for key, value in reports[policy.name].metrics.items()}
            metrics[f"policy_version{below}"] = float(self.versions[policy.name])
        return metrics

    def save(self, folder: Path) -> None:
        """Save each trained policy below its name. A frozen one is what the recipe says."""
        folder.mkdir(parents=True, exist_ok=True)
        for policy in self._trained:
            policy.backend.save(folder / policy.name)


def load_backend(backend: Backend, folder: Path, name: str) -> None:
    """Restore what `Policies.save` wrote of a policy. Raises RunFolderError where the checkpoint has no such policy."""
    if not (folder / name).is_dir():
        raise RunFolderError(
            f"checkpoint {str(folder)!r} has no policy {name!r}; go on with the recipe that it was saved with"
        )
    backend.load(folder / name)
