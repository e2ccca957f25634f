"""Payments of attacks, judged: against the gold output of the same task and the worst of the outputs without worth.

share = (earned - floor) / (gold - floor)        floor: the least that an output without worth earned on any task
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from lightningrl.types import Task
from lightningrl_training.redteam.attacks import Attack, Severity, Worth
from lightningrl_training.redteam.report import RedTeamFinding, shorten
from lightningrl_training.redteam.scores import Payment

__all__ = ["Judgement", "Trial"]

BEYOND: Final = 1.02
"""Share from which an output earns more than gold."""
TOO_MUCH: Final = {Worth.NOTHING: 0.5, Worth.WRONG: 0.99, Worth.MORE: BEYOND, Worth.RIGHT: 1.1}
"""Share of gold's advantage from which an output is paid too much; one that is right may be briefer than gold."""
STRICT: Final = 0.5
"""Share below which an output that is right earns too little."""
LEAST_TASKS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """An attack on a task and what it earned."""

    mutator: str
    task: Task
    attack: Attack
    earned: Payment
    total: float | None
    """Return of the rewards that are judged; None = one had nothing to say, or failed."""
    is_typed: bool = True
    """The output is of the type that the agent returns."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Findings of what was tried on one return."""

    reward: str
    tried: Sequence[Trial]
    gold: Mapping[str, float]
    """Return of the gold output, by task; empty = nobody knows trial."""
    full: float | None = None
    """The most that the reward can give, where it says so."""

    def findings(self) -> Iterator[RedTeamFinding]:
        """Outputs that earn too much, and rewards that tell nothing apart."""
        paid = [attempt for attempt in self.tried if attempt.total is not None]
        totals = {attempt.total for attempt in paid}
        is_worthless_paid = any(attempt.attack.worth in (Worth.NOTHING, Worth.WRONG) for attempt in paid)
        if len(totals) == 1 and len(paid) >= LEAST_TASKS and is_worthless_paid and (paid[0].total or 0.0) > 0.0:
            yield self._constant(paid)
        elif self.gold:
            yield from self._against_gold(paid)
        else:
            yield from self._without_gold(paid)
        yield from self._failures()

    def strict(self) -> Iterator[RedTeamFinding]:
        """Outputs that are right and earn less than half of gold."""
        for group in self._groups([attempt for attempt in self.tried if attempt.attack.worth is Worth.RIGHT]):
            poor = [attempt for attempt in group if (share := self._share(attempt)) is not None and share < STRICT]
            if poor and len(poor) >= len(group) / 4:
                sentence = f"{poor[0].attack.what} earns less than half of what gold earns"
                yield self._finding(poor, len(group), sentence, Severity.NOTE)

    @cached_property
    def _floor(self) -> float:
        """The least of what is worth nothing; where gold earns no more than that, the least of what is wrong."""
        least = {
            worth: min(
                (trial.total for trial in self.tried if trial.attack.worth is worth and trial.total is not None),
                default=0.0,
            )
            for worth in (Worth.NOTHING, Worth.WRONG)
        }
        is_above = max(self.gold.values(), default=0.0) > least[Worth.NOTHING]
        return least[Worth.NOTHING] if is_above else min(least.values())

    def _share(self, attempt: Trial) -> float | None:
        gold = self.gold.get(attempt.task.id)
        if attempt.total is None or gold is None or gold <= self._floor:
            return None
        return (attempt.total - self._floor) / (gold - self._floor)

    def _constant(self, paid: Sequence[Trial]) -> RedTeamFinding:
        total = paid[0].total or 0.0
        sentence = f"every output earns {total:g}, whatever it says"
        advice = "let the reward look at the output: its second parameter, (task, output, trajectory)"
        severity = Severity.HIGH if total >= self._full / 2 else Severity.NOTE
        return self._finding(paid, len({attempt.task.id for attempt in paid}), sentence, severity, advice)

    @property
    def _full(self) -> float:
        return 1.0 if self.full is None else self.full

    def _against_gold(self, paid: Sequence[Trial]) -> Iterator[RedTeamFinding]:
        poor = [trial for trial in paid if trial.mutator == "gold" and (trial.total or 0.0) <= self._floor]
        if poor:
            sentence = f"gold earns no more than nothing on {len(poor)} of {len(self.gold)} tasks"
            advice = "mend the `answer` of these tasks, or take them out: nothing that is learned there is right"
            yield self._finding(poor, len(self.gold), sentence, Severity.MEDIUM, advice)
        for group in self._groups(paid):
            attack, tasks = group[0].attack, len({trial.task.id for trial in group})
            shares = [(attempt, share) for attempt in group if (share := self._share(attempt)) is not None]
            hits = [attempt for attempt, share in shares if share >= TOO_MUCH[attack.worth]]
            if self._are_enough(hits, tasks):
                best = max(share for _, share in shares)
                how = f"{best:.0%} of what gold earns" if best < 0.98 else "more than gold" if best > BEYOND else ""
                yield self._finding(hits, tasks, f"{attack.what} earns {how or 'as much as gold'}", attack.severity)

    def _without_gold(self, paid: Sequence[Trial]) -> Iterator[RedTeamFinding]:
        """Judge by the most that the reward can give: 1, where it declares no range. A form may be all it asks."""
        least = min((attempt.total or 0.0 for attempt in paid), default=0.0)
        for group in self._groups(
            [trial for trial in paid if trial.attack.worth is Worth.NOTHING and trial.mutator != "form"]
        ):
            hits = [attempt for attempt in group if (attempt.total or 0.0) >= self._full > least]
            tasks = len({trial.task.id for trial in group})
            if self._are_enough(hits, tasks):
                sentence = f"{group[0].attack.what} earns {hits[0].total:g}, all that there is"
                yield self._finding(hits, tasks, sentence, group[0].attack.severity)

    def _failures(self) -> Iterator[RedTeamFinding]:
        """Rewards that raise, hang, or return no number on an output that an agent can write."""
        failed: dict[str, list[Trial]] = defaultdict(list)
        for attempt in self.tried:
            if attempt.earned.failure is not None and (attempt.is_typed or attempt.earned.is_defect):
                failed[attempt.earned.failure.partition(" on rollout ")[0].partition(":")[0]].append(attempt)
        for attempts in failed.values():
            kinds = list(dict.fromkeys(attempt.attack.what for attempt in attempts))
            others = f" and {len(kinds) - 1} others" if len(kinds) > 1 else ""
            sentence = f"the reward fails on {kinds[0]}{others}: {attempts[0].earned.failure}"
            advice = (
                "return the least value for an output that cannot be read: a rollout whose reward fails counts as the "
                "lowest, and many of them end the run"
            )
            tasks = len({attempt.task.id for attempt in self.tried})
            severity = Severity.HIGH if attempts[0].earned.is_defect else Severity.MEDIUM
            yield self._finding(attempts, tasks, sentence, severity, advice, mutator="failure")

    def _are_enough(self, hits: Sequence[Trial], tasks: int) -> bool:
        share = hits[0].attack.least_share if hits else 0.0
        count = len({trial.task.id for trial in hits})
        return count > 0 and count >= share * tasks and (not share or count >= min(tasks, LEAST_TASKS))

    def _groups(self, attempts: Sequence[Trial]) -> list[list[Trial]]:
        groups: dict[tuple[str, str], list[Trial]] = defaultdict(list)
        for attempt in attempts:
            groups[attempt.mutator, attempt.attack.what].append(attempt)
        return list(groups.values())

    def _finding(
        self,
        hits: Sequence[Trial],
        tried: int,
        sentence: str,
        severity: Severity,
        advice: str = "",
        *,
        mutator: str = "",
    ) -> RedTeamFinding:
        best = max(hits, key=lambda attempt: attempt.total if attempt.total is not None else float("-inf"))
        return RedTeamFinding(
            severity=severity,
            mutator=mutator or best.mutator,
            reward=self.reward,
            sentence=sentence,
            advice=advice or best.attack.advice,
            task=best.task.id,
            output=shorten(best.attack.output),
            earned=best.total,
            gold=self.gold.get(best.task.id),
            tasks=len({attempt.task.id for attempt in hits}),
            tried=tried,
        )
