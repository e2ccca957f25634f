"""An attack on a recipe's rewards: gold is looked for, mutators make outputs of it, and what they earn is judged.

recipe ─► some tasks ─► the form in which gold earns most ─► mutators ─► Scores ─► Judgement ─► RedTeamReport
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightningrl.errors import ConfigError, PluginError, describe_raised
from lightningrl.plugins import PluginManager
from lightningrl.recipe import Recipe
from lightningrl.types import Task
from lightningrl_credit.rewards import NamedReward, ReportedReward, RewardSet
from lightningrl_training.redteam.attacks import Attack, Mutator, Severity, Target, Worth, canonical_text
from lightningrl_training.redteam.files import FORGERIES, WatchedReward, forged, is_async, is_watchable, reachable
from lightningrl_training.redteam.forms import candidates, fields_named, fields_returned
from lightningrl_training.redteam.gold import GOLD, GoldOutputs, answers_besides, find_gold, form_of_outputs
from lightningrl_training.redteam.judgement import Judgement, Trial
from lightningrl_training.redteam.mutators import NOISE
from lightningrl_training.redteam.report import RedTeamFinding, RedTeamReport, shorten
from lightningrl_training.redteam.scores import Scores

__all__ = ["HOOK", "RedTeam", "choose_tasks", "mutators_of"]

HOOK: Final = "lightningrl_reward_mutators"
BY_CHANCE: Final = 0.5
"""Greatest share of chance: an attack that needs more of the tasks may be gold on each of them."""
NOISE_WORDS: Final = "nonsense words"
REPEATED: Final = 8
"""Tasks of which outputs are rewarded a second time."""


def mutators_of(plugins: PluginManager) -> dict[str, Mutator]:
    """The installed mutators, by name. Raises PluginError for one that cannot be built."""
    return {name: plugin.build() for name, plugin in plugins.records(HOOK).items()}


def choose_tasks(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """So many of the tasks, at random, the same for a seed."""
    return list(tasks) if len(tasks) <= count else random.Random(seed).sample(list(tasks), count)  # noqa: S311


@dataclass(kw_only=True, eq=False)
class RedTeam:
    """An attack on the rewards of a recipe, with some of its tasks."""

    recipe: Recipe
    rewards: Sequence[NamedReward] | RewardSet
    """Rewards; the files that they read are watched, but those of a set that is there already."""
    tasks: Sequence[Task]
    mutators: Mapping[str, Mutator]
    gold: Callable[[Task], Any] | None = None
    """The output that earns the most on a task, where somebody knows it."""
    seconds: float = 120.0
    outputs: Sequence[Any] = ()
    """Outputs that the agent has returned."""
    show: Callable[[int, int], None] = lambda done, planned: None
    _scores: Scores = field(init=False)
    _set: RewardSet = field(init=False)
    _forms: dict[str, str] = field(init=False, default_factory=dict[str, str])
    gold_returns: dict[str, float] = field(init=False, default_factory=dict[str, float])
    """Return of gold by task, where one return is paid to all."""
    _findings: list[RedTeamFinding] = field(init=False, default_factory=list[RedTeamFinding])
    _strict: list[RedTeamFinding] = field(init=False, default_factory=list[RedTeamFinding])

    async def run(self) -> RedTeamReport:
        """Attack each return that a role is paid. Raises PluginError where a mutator raises."""
        with tempfile.TemporaryDirectory(prefix="lightningrl-redteam-", ignore_cleanup_errors=True) as folder:
            log = Path(folder) / "opened.jsonl"
            self._set = (
                self.rewards
                if isinstance(self.rewards, RewardSet)
                else RewardSet([_watched(reward, log) for reward in self.rewards])
            )
            policy = next(iter(self.recipe.all_policies))
            self._scores = Scores(rewards=self._set, seconds=self.seconds, show=self.show, policy=policy)
            for names in self._returns():
                await self._attack([reward for reward in self._set.rewards if reward.name in names], log)
        late = (
            f"{self._scores.planned - self._scores.done} outputs were not rewarded: {self.seconds:g} s were over, or "
        )
        late += "others like them had run out of time; give it more with --seconds"
        return RedTeamReport(
            findings=tuple(sorted(self._findings, key=lambda finding: list(Severity).index(finding.severity))),
            strict=tuple(self._strict),
            tasks=len(self.tasks),
            outputs=self._scores.done,
            planned=self._scores.planned,
            gold=self._forms,
            notes=(late,) if self._scores.done < self._scores.planned else (),
        )

    def _returns(self) -> list[frozenset[str]]:
        """Sets of rewards that some role is paid, each once."""
        weights = self._set.weights
        return list(dict.fromkeys(filter(None, (weights.paid_to(role) for role in (*sorted(weights.roles), None)))))

    async def _attack(self, rewards: Sequence[NamedReward], log: Path) -> None:
        fields = tuple(dict.fromkeys(key for reward in rewards for key in fields_named(_own(reward.function))))
        attempt = partial(self._try, frozenset(reward.name for reward in rewards))
        gold = await self._find_gold(rewards, fields, attempt)
        label = " + ".join(reward.name for reward in rewards)
        self.gold_returns = gold.returns
        self._forms[label] = gold.form.name if gold.answers else ""
        targets = [self._target(task, gold, fields) for task in self.tasks]
        tried = await attempt([attack for target in targets for attack in self._attacks(target)])
        kinds = self._kinds(gold)
        typed = [replace(trial, is_typed=type(trial.attack.output) in kinds) for trial in (*gold.tried, *tried)]
        judgement = Judgement(reward=label, tried=typed, gold=gold.returns, full=_most(rewards))
        is_told = any(isinstance(reward.function, ReportedReward) for reward in rewards)
        self._findings += [_eased(finding) if is_told else finding for finding in judgement.findings()]
        self._strict += judgement.strict()
        self._findings += [
            *self._without_answer(label, gold),
            *await self._repeat(label, rewards, [*gold.looked, *typed], attempt),
        ]
        self._findings += await self._forge(label, log, targets, gold, attempt)

    async def _find_gold(self, rewards: Sequence[NamedReward], fields: tuple[str, ...], attempt: Any) -> GoldOutputs:
        full = 1.0 if (most := _most(rewards)) is None else most
        outputs = [(task, self._known_gold(task)) for task in self.tasks]
        if given := [(task, output) for task, output in outputs if output is not None]:
            return await find_gold(given, [form_of_outputs([output for _, output in given])], attempt, full)
        answered = [(task, task.answer) for task in self.tasks if task.answer is not None]
        options = [self.recipe.rewards[reward.name].options for reward in rewards]
        patterns = [text for of in options for key in ("extract", "pattern") if isinstance(text := of.get(key), str)]
        return await find_gold(answered, candidates(self._returned(), fields, patterns), attempt, full)

    def _known_gold(self, task: Task) -> Any:
        """The output that somebody says is the best; None where nobody does. Raises ConfigError."""
        if self.gold is None:
            return None
        try:
            return self.gold(task)
        except Exception as error:
            raise ConfigError(
                f"gold of task {task.id!r} raised {describe_raised(error)}; mend it, or leave it out"
            ) from error

    def _returned(self) -> tuple[str, ...]:
        """Keys of the agent's outputs; none where they are texts."""
        shown = next((tuple(output) for output in self.outputs if isinstance(output, dict)), ())
        return shown or (() if self.outputs else fields_returned(self.recipe.agent, self.recipe.folder))

    def _kinds(self, gold: GoldOutputs) -> set[type]:
        """Types of outputs that the agent returns, as far as anybody knows."""
        seen = [output for output in self.outputs if output is not None]
        outputs = seen or [trial.attack.output for trial in gold.tried if gold.answers]
        return {type(output) for output in outputs}

    def _target(self, task: Task, gold: GoldOutputs, fields: tuple[str, ...]) -> Target:
        answer = gold.answers.get(task.id)
        return Target(
            task=task,
            form=gold.form,
            answer=answer,
            gold=None if answer is None else gold.form.wrap(answer),
            others=answers_besides(task, answer, gold.answers),
            fields=fields,
        )

    def _attacks(self, target: Target) -> list[tuple[str, Task, Attack]]:
        """Attacks of the mutators on a task, without those that are gold by chance."""
        made: list[tuple[str, Task, Attack]] = []
        right = None if target.gold is None else canonical_text(target.gold)
        for name, mutate in self.mutators.items():
            try:
                attacks = list(mutate(target))
            except Exception as error:
                raise PluginError(
                    f"reward mutator {name!r} raised {describe_raised(error)} on task {target.task.id!r}; mend or "
                    "uninstall it"
                ) from error
            for attack in _distinct(attacks):
                is_wrong = attack.worth in (Worth.NOTHING, Worth.WRONG) and attack.least_share <= BY_CHANCE
                if not (is_wrong and right is not None and canonical_text(attack.output) == right):
                    calls = attack.tool_calls or target.form.tool_calls
                    made.append((name, target.task, replace(attack, tool_calls=calls)))
        return made

    async def _try(self, names: frozenset[str], asked: Sequence[tuple[str, Task, Attack]]) -> list[Trial]:
        """Reward attacks; those that there was no time for are left out."""
        earned = await self._scores.earn([(task, attack) for _, task, attack in asked])
        total = self._set.weights.total
        return [
            Trial(
                mutator=mutator,
                task=task,
                attack=attack,
                earned=value.of(names),
                total=total(value.values, names),
            )
            for (mutator, task, attack), value in zip(asked, earned, strict=True)
            if value is not None
        ]

    def _without_answer(self, label: str, gold: GoldOutputs) -> list[RedTeamFinding]:
        """A finding where tasks have no answer that gold could be made of."""
        missing = [task for task in self.tasks if task.id not in gold.returns]
        if not missing:
            return []
        without = [task for task in self.tasks if task.answer is None]
        many = f"{len(missing)} of {len(self.tasks)} tasks"
        if gold.answers:
            what, severity = f"{many} have no answer, so that nobody can say what is right there", Severity.MEDIUM
        elif len(without) == len(self.tasks):
            what, severity = "no task has an answer, so that only outputs without worth could be tried", Severity.NOTE
        else:
            what, severity = (
                "no output made of the answers earns more than nonsense, so that gold is unknown",
                Severity.NOTE,
            )
        advice = "give each task its answer, or a function from a task to its best output: --gold file.py:name"
        return [
            _finding(label, GOLD, severity, what, advice, task=missing[0], tasks=len(missing), tried=len(self.tasks))
        ]

    async def _repeat(
        self, label: str, rewards: Sequence[NamedReward], tried: Sequence[Trial], attempt: Any
    ) -> list[RedTeamFinding]:
        """Reward some outputs again: the same must earn the same."""
        chosen = {task.id for task in self.tasks[:REPEATED]}
        repeated = [trial for trial in tried if trial.task.id in chosen and trial.attack.what in (GOLD, NOISE_WORDS)]
        once = {(trial.task.id, trial.attack.what): trial for trial in repeated}.values()
        again = await attempt([(trial.mutator, trial.task, trial.attack) for trial in once])
        same: dict[tuple[str, str], list[Trial]] = defaultdict(list)
        for trial in (*tried, *again):
            if not trial.attack.reported and not trial.attack.tool_calls and trial.total is not None:
                same[trial.task.id, repr(trial.attack.output)].append(trial)
        pairs = [(min(group, key=_total), max(group, key=_total)) for group in same.values()]
        differing = [(least, most) for least, most in pairs if most.total != least.total]
        if not differing:
            return []
        least, most = max(differing, key=lambda pair: _total(pair[1]) - _total(pair[0]))
        is_judge = any(is_async(_own(reward.function)) for reward in rewards)
        what = f"the same output earns {shorten(least.total)} and {shorten(most.total)}"
        advice = "take chance, clocks and what was seen before out of the reward; ask a judge at temperature 0"
        severity = Severity.NOTE if is_judge else Severity.MEDIUM
        count = len({most.task.id for _, most in differing})
        return [
            _finding(
                label, "repeat", severity, what, advice, trial=most, task=most.task, tasks=count, tried=len(self.tasks)
            )
        ]

    async def _forge(
        self, label: str, log: Path, targets: Sequence[Target], gold: GoldOutputs, attempt: Any
    ) -> list[RedTeamFinding]:
        """Write what an agent could write into the files that a reward reads, and look whether it is believed."""
        findings = []
        advice = "keep verdicts where the agent cannot write, or remove the file before the agent starts"
        target = next((target for target in targets if target.task.id in gold.returns), targets[0])
        nonsense = Attack(output=target.form.wrap(NOISE), what="forged", worth=Worth.NOTHING, advice=advice)
        best = gold.returns.get(target.task.id, 1.0)
        for path in reachable(log, self.recipe.folder):
            if path.exists():
                what = f"it reads {str(path)!r}, which an agent can write"
                findings.append(
                    _finding(label, "files", Severity.MEDIUM, what, advice, task=target.task, tasks=1, tried=1)
                )
            for text in FORGERIES if not path.exists() else ():
                with forged(path, text.replace("{gold}", target.text)) as is_written:
                    tried = await attempt([("files", target.task, nonsense)]) if is_written else []
                if tried and (tried[0].total or 0.0) >= best > 0.0:
                    what = f"nonsense earns {tried[0].total:g} once the agent has written {text!r} to {str(path)!r}"
                    findings.append(
                        _finding(
                            label,
                            "files",
                            Severity.HIGH,
                            what,
                            advice,
                            trial=tried[0],
                            task=target.task,
                            tasks=1,
                            tried=1,
                        )
                    )
                    break
        return findings


def _distinct(attacks: Sequence[Attack]) -> list[Attack]:
    """Attacks without those that are the same by another name, as where gold's form is a text as it is."""
    first: dict[tuple[str, str, int], Attack] = {}
    for attack in attacks:
        first.setdefault((repr(attack.output), repr(attack.reported), len(attack.tool_calls)), attack)
    return list(first.values())


def _total(trial: Trial) -> float:
    return trial.total or 0.0


def _own(function: Any) -> Any:
    """The user's function."""
    return function.function if isinstance(function, WatchedReward) else function


def _watched(reward: NamedReward, log: Path) -> NamedReward:
    """The reward as in a run, whose process notes the files that it opens."""
    function = WatchedReward(reward.function, log) if is_watchable(reward.function) else reward.function
    return replace(reward, function=function)


def _most(rewards: Sequence[NamedReward]) -> float | None:
    """The most that rewards give together, where all declare a range."""
    if any(reward.range is None for reward in rewards):
        return None
    return sum(max(reward.weight * end for end in reward.range or ()) for reward in rewards)


def _eased(finding: RedTeamFinding) -> RedTeamFinding:
    """A recipe that names `reported` has chosen to believe the agent."""
    return replace(finding, severity=Severity.NOTE) if finding.mutator == "reported" else finding


def _finding(
    label: str,
    mutator: str,
    severity: Severity,
    sentence: str,
    advice: str,
    *,
    task: Task,
    tasks: int,
    tried: int,
    trial: Trial | None = None,
) -> RedTeamFinding:
    return RedTeamFinding(
        severity=severity,
        mutator=mutator,
        reward=label,
        sentence=sentence,
        advice=advice,
        task=task.id,
        output="" if trial is None else shorten(trial.attack.output),
        earned=None if trial is None else trial.total,
        tasks=tasks,
        tried=tried,
    )
