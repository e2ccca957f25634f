"""An attack on a recipe's rewards: gold is made of the answers, mutators make outputs of it, and payments are judged.

recipe ─► some tasks ─► the form in which gold earns most ─► mutators ─► Scores ─► Judgement ─► RedTeamReport

The rewards and some of the tasks are built, and nothing else: no policy, no server, unless a search is asked for.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from lightningrl.errors import ConfigError, PluginError, describe_raised
from lightningrl.loading import load_callable
from lightningrl.plugins import PluginManager, load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Task, Trajectory
from lightningrl_client.recipe_file import read_recipe
from lightningrl_credit.rewards import NamedReward, ReportedReward, RewardSet
from lightningrl_training.build import build_tasks_and_rewards
from lightningrl_training.redteam.attacks import (
    Attack,
    Form,
    Mutator,
    RedTeamFinding,
    RedTeamReport,
    Severity,
    Target,
    Worth,
    canonical_text,
    shorten,
)
from lightningrl_training.redteam.judgement import (
    Judgement,
    Scores,
    Trial,
    WatchedReward,
    files_within_reach,
    forged,
    is_async,
)
from lightningrl_training.redteam.mutators import FORMS, NOISE, form_of_fields
from lightningrl_training.run_sync import Show, show_nobody

__all__ = ["RedTeam", "attack_recipe", "choose_tasks", "mutators_of", "suspicious"]

TASKS: Final = 32
TASKS_OF_A_JUDGE: Final = 3
"""Tasks by default where a reward is async: it may ask a model, which costs money."""
GOLD: Final = "gold"
PROBED: Final = 4
"""Tasks on which forms are tried."""
BY_CHANCE: Final = 0.5
"""Greatest share of chance: an attack that needs more of the tasks may be gold on each of them."""
NOISE_WORDS: Final = "nonsense words"
REPEATED: Final = 8
"""Tasks of which outputs are rewarded a second time."""
FORGERIES: Final = ("1", "1.0", '{"reward": 1.0, "score": 1.0, "success": true, "passed": true}', "pass", "{gold}")
"""Texts that an agent would write into a file that a reward reads."""
SAMPLES: Final = 4
"""Rollouts of a task in a search."""
MOST_SHOWN: Final = 5


async def attack_recipe(
    source: Path | Recipe,
    *,
    tasks: int | None = None,
    seed: int = 0,
    seconds: float = 120.0,
    gold: str | Callable[[Task], Any] | None = None,
    only: Sequence[str] = (),
    search: int = 0,
    settings: Mapping[str, Any] | None = None,
    show: Show = show_nobody,
) -> RedTeamReport:
    """Attack the rewards of a recipe.

    tasks     so many of the training tasks, at random; None = 32, or 3 where a reward is async
    seed      of their choice
    seconds   for all of it but the search
    gold      a function, or `file.py:name`, from a task to the output that earns the most; None = the task
              source's, or made of the answers
    only      names of the mutators to take; empty = all that are installed
    search    rollouts of the recipe's own agent and policy to look through, too; 0 = none
    show      told what is being done, and how much of how much is

    Raises ConfigError or PluginError for what cannot be built.
    """
    recipe, wrong = read_recipe(source, settings or {})
    if wrong:
        raise ConfigError(*wrong)
    plugins = load_plugins()
    task_source, loaded, rewards = build_tasks_and_rewards(recipe, plugins)
    by_default = TASKS_OF_A_JUDGE if any(is_async(reward.function) for reward in rewards) else TASKS
    mutators = mutators_of(plugins)
    for name in only:
        if name not in mutators:
            raise ConfigError(f"no reward mutator named {name!r}; installed: {', '.join(sorted(mutators))}")
    team = RedTeam(
        recipe=recipe,
        rewards=rewards,
        tasks=choose_tasks(loaded.train, tasks or by_default, seed),
        mutators={name: mutator for name, mutator in mutators.items() if not only or name in only},
        gold=(load_callable(gold, recipe.folder) if isinstance(gold, str) else gold)
        or getattr(task_source, "gold", None),
        seconds=seconds,
        show=lambda done, planned: show("rewarding outputs", done, planned),
    )
    report = await team.run()
    if not search:
        return report
    sampled = await _sample_rollouts(recipe, plugins, team.gold_returns, count=search, show=show)
    return replace(report, findings=(*report.findings, *suspicious(sampled, team.gold_returns)))


def mutators_of(plugins: PluginManager) -> dict[str, Mutator]:
    """The installed mutators, by name. Raises PluginError for one that cannot be built."""
    return {name: plugin.build() for name, plugin in plugins.records("lightningrl_reward_mutators").items()}


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
    gold_returns: dict[str, float] = field(init=False, default_factory=dict[str, float])
    """Return of gold by task, where one return is paid to all."""

    async def run(self) -> RedTeamReport:
        """Attack each return that a role is paid. Raises PluginError where a mutator raises."""
        with tempfile.TemporaryDirectory(prefix="lightningrl-redteam-", ignore_cleanup_errors=True) as folder:
            log = Path(folder) / "opened.jsonl"
            rewards = self.rewards
            if not isinstance(rewards, RewardSet):
                rewards = RewardSet([WatchedReward.watch(reward, log) for reward in rewards])
            weights, policy = rewards.weights, next(iter(self.recipe.all_policies))
            scores = Scores(rewards=rewards, seconds=self.seconds, show=self.show, policy=policy)
            returns = dict.fromkeys(weights.paid_to(role) for role in (*sorted(weights.roles), None))
            attacks = [_ReturnAttack(team=self, scores=scores, names=names, log=log) for names in returns if names]
            for attack in attacks:
                await attack.run()
                self.gold_returns = attack.gold
        findings = [finding for attack in attacks for finding in attack.findings]
        late = (
            f"{scores.planned - scores.done} outputs were not rewarded: {self.seconds:g} s were over, or others like "
            "them had run out of time; give it more with --seconds"
        )
        return RedTeamReport(
            findings=tuple(sorted(findings, key=lambda finding: list(Severity).index(finding.severity))),
            strict=tuple(finding for attack in attacks for finding in attack.strict),
            tasks=len(self.tasks),
            outputs=scores.done,
            planned=scores.planned,
            gold={attack.label: attack.form.name if attack.answers else "" for attack in attacks},
            notes=(late,) if scores.done < scores.planned else (),
        )


@dataclass(kw_only=True, eq=False)
class _ReturnAttack:
    """An attack on what some rewards pay together."""

    team: RedTeam
    scores: Scores
    names: frozenset[str]
    log: Path
    form: Form = FORMS[0]
    answers: dict[str, Any] = field(default_factory=dict[str, Any])
    """Answers by task; empty = no output was found that earns more than nonsense."""
    gold: dict[str, float] = field(default_factory=dict[str, float])
    """Return of gold, by task."""
    findings: list[RedTeamFinding] = field(default_factory=list[RedTeamFinding])
    strict: list[RedTeamFinding] = field(default_factory=list[RedTeamFinding])
    _tried: list[Trial] = field(default_factory=list[Trial])

    @cached_property
    def rewards(self) -> list[NamedReward]:
        return [reward for reward in self.scores.rewards.rewards if reward.name in self.names]

    @property
    def label(self) -> str:
        return " + ".join(reward.name for reward in self.rewards)

    @cached_property
    def _functions(self) -> list[Any]:
        """The user's functions."""
        functions = [reward.function for reward in self.rewards]
        return [function.function if isinstance(function, WatchedReward) else function for function in functions]

    @cached_property
    def _full(self) -> float:
        """The most that the rewards give together, where all declare a range; else 1."""
        if any(reward.range is None for reward in self.rewards):
            return 1.0
        return sum(max(reward.weight * end for end in reward.range or ()) for reward in self.rewards)

    async def run(self) -> None:
        gold = await self._find_gold()
        targets = [self._target(task) for task in self.team.tasks]
        tried = await self._try([attack for target in targets for attack in self._attacks(target)])
        shown = [output for output in self.team.outputs if output is not None]
        shown = shown or [trial.attack.output for trial in gold if self.answers]
        judgement = Judgement(
            reward=self.label, tried=[*gold, *tried], gold=self.gold, kinds={*map(type, shown)}, full=self._full
        )
        is_told = any(isinstance(function, ReportedReward) for function in self._functions)
        for finding in judgement.findings():  # a recipe that names `reported` has chosen to believe the agent
            is_chosen = is_told and finding.mutator == "reported"
            self.findings.append(replace(finding, severity=Severity.NOTE) if is_chosen else finding)
        self.strict += judgement.strict()
        self._name_tasks_without_answer()
        await self._repeat(judgement)
        await self._forge(judgement, targets)

    async def _try(self, asked: Sequence[tuple[str, Task, Attack]]) -> list[Trial]:
        """Reward attacks; those that there was no time for are left out."""
        tried = await self.scores.earn(self.names, asked)
        self._tried += tried
        return tried

    async def _find_gold(self) -> list[Trial]:
        """Take the form in which answers earn the most, and pay gold in it. Returns the trials of gold; where no answer
        earns more than nonsense, all that was looked at."""
        answered, forms = self._answered()
        probed = answered[:PROBED]
        await self._try([(GOLD, task, _nonsense(output)) for task, _ in probed for output in (NOISE, "")])
        most, best = min((trial.total for trial in self._tried if trial.total is not None), default=0.0), None
        for form in forms if probed else ():
            tried = await self._try([(GOLD, task, _right(form, answer)) for task, answer in probed])
            totals = [trial.total for trial in tried if trial.total is not None]
            mean = sum(totals) / len(probed)
            if not totals:
                continue
            if mean > most + 1e-3 * abs(most):
                best, most = form, mean
            elif best is None and mean >= self._full:  # what is read as an answer may earn less than what is not
                swapped = zip(probed, [*probed[1:], *probed[:1]], strict=True)
                wrong = await self._try([(GOLD, task, _wrong(form, answer)) for (task, _), (_, answer) in swapped])
                best = form if any(trial.total is not None and trial.total < self._full for trial in wrong) else None
            if mean >= self._full:
                break
        if best is None:
            return list(self._tried)
        self.form, self.answers = best, {task.id: best.pick(answer) for task, answer in answered}
        tried = await self._try([(GOLD, task, _right(best, answer)) for task, answer in answered])
        self.gold = {trial.task.id: trial.total for trial in tried if trial.total is not None}
        return tried

    def _best_output(self, task: Task) -> Any:
        """The output that somebody says is the best; None where nobody does. Raises ConfigError."""
        try:
            return None if self.team.gold is None else self.team.gold(task)
        except Exception as error:
            raise ConfigError(
                f"gold of task {task.id!r} raised {describe_raised(error)}; mend it, or leave it out"
            ) from error

    def _answered(self) -> tuple[list[tuple[Task, Any]], Sequence[Form]]:
        """Tasks with their answers, and the forms that these may take."""
        given = [(task, output) for task in self.team.tasks if (output := self._best_output(task)) is not None]
        if given:
            return given, [form_of_fields(_keys(output for _, output in given), "as it is given")]
        named = [name for function in self._functions if isinstance(name := getattr(function, "field", None), str)]
        fields = _keys(self.team.outputs) or [name.split(".") for name in named]
        answered = [(task, task.answer) for task in self.team.tasks if task.answer is not None]
        return answered, [form_of_fields(fields), *FORMS] if fields else FORMS

    def _target(self, task: Task) -> Target:
        """The task with gold, and with the answers of other tasks that are not right here."""
        answer = self.answers.get(task.id)
        answers = task.answer if isinstance(task.answer, list) else [task.answer]
        right = {canonical_text(part) for part in (answer, *answers)}
        others: dict[str, Any] = {}
        for other in self.answers.values():
            others.setdefault(canonical_text(other), other)
        return Target(
            task=task,
            form=self.form,
            answer=answer,
            gold=None if answer is None else self.form.wrap(answer),
            others=tuple(other for text, other in others.items() if text not in right),
        )

    def _attacks(self, target: Target) -> Iterator[tuple[str, Task, Attack]]:
        """Attacks of the mutators on a task, without those that are gold by chance, or the same by another name."""
        right = None if target.gold is None else canonical_text(target.gold)
        for name, mutate in self.team.mutators.items():
            try:
                attacks = list(mutate(target))
            except Exception as error:
                raise PluginError(
                    f"reward mutator {name!r} raised {describe_raised(error)} on task {target.task.id!r}; mend or "
                    "uninstall it"
                ) from error
            seen = set()
            for attack in attacks:
                key = (repr(attack.output), repr(attack.reported), len(attack.tool_calls))
                is_wrong = attack.worth in (Worth.NOTHING, Worth.WRONG) and attack.least_share <= BY_CHANCE
                if key not in seen and not (is_wrong and right is not None and canonical_text(attack.output) == right):
                    yield name, target.task, attack
                seen.add(key)

    def _name_tasks_without_answer(self) -> None:
        tasks = self.team.tasks
        missing = [task for task in tasks if task.id not in self.gold]
        if not missing:
            return
        severity = Severity.NOTE
        if self.answers:
            severity = Severity.MEDIUM
            what = f"{len(missing)} of {len(tasks)} tasks have no answer, so that nobody can say what is right there"
        elif all(task.answer is None for task in tasks):
            what = "no task has an answer, so that only outputs without worth could be tried"
        else:
            what = "no output made of the answers earns more than nonsense, so that gold is unknown"
        advice = "give each task its answer, or a function from a task to its best output: --gold file.py:name"
        self._add(severity, GOLD, what, advice, missing[0], tasks=len(missing), tried=len(tasks))

    async def _repeat(self, judgement: Judgement) -> None:
        """Reward some outputs again: the same must earn the same."""
        chosen = {task.id for task in self.team.tasks[:REPEATED]}
        once = {
            (trial.task.id, trial.attack.what): (trial.mutator, trial.task, trial.attack)
            for trial in self._tried
            if trial.task.id in chosen and trial.attack.what in (GOLD, NOISE_WORDS)
        }
        await self._try(list(once.values()))
        same: dict[tuple[str, str], list[Trial]] = defaultdict(list)
        for trial in self._tried:
            if not trial.attack.reported and not trial.attack.tool_calls and trial.total is not None:
                same[trial.task.id, repr(trial.attack.output)].append(trial)
        pairs = [(min(group, key=_total), max(group, key=_total)) for group in same.values()]
        differing = [(least, most) for least, most in pairs if least.total != most.total]
        if not differing:
            return
        least, most = max(differing, key=lambda pair: _total(pair[1]) - _total(pair[0]))
        what = f"the same output earns {shorten(least.total)} and {shorten(most.total)}"
        advice = "take chance, clocks and what was seen before out of the reward; ask a judge at temperature 0"
        severity = Severity.NOTE if any(map(is_async, self._functions)) else Severity.MEDIUM
        finding = judgement.finding([most], len(self.team.tasks), what, severity, advice, "repeat")
        self.findings.append(replace(finding, tasks=len({most.task.id for _, most in differing})))

    async def _forge(self, judgement: Judgement, targets: Sequence[Target]) -> None:
        """Write what an agent could write into the files that a reward reads, and check whether it is believed."""
        advice = "keep verdicts where the agent cannot write, or remove the file before the agent starts"
        target = next((target for target in targets if target.task.id in self.gold), targets[0])
        nonsense = replace(_nonsense(target.form.wrap(NOISE)), what="forged", advice=advice)
        best = self.gold.get(target.task.id, 1.0)
        for path in files_within_reach(self.log, self.team.recipe.folder):
            if path.exists():
                what = f"it reads {str(path)!r}, which an agent can write"
                self._add(Severity.MEDIUM, "files", what, advice, target.task)
                continue
            for text in FORGERIES:
                with forged(path, text.replace("{gold}", target.text)) as is_written:
                    tried = await self._try([("files", target.task, nonsense)]) if is_written else []
                if tried and _total(tried[0]) >= best > 0.0:
                    what = f"nonsense earns {tried[0].total:g} once the agent has written {text!r} to {str(path)!r}"
                    self.findings.append(judgement.finding(tried, 1, what, Severity.HIGH))
                    break

    def _add(
        self, severity: Severity, check: str, sentence: str, advice: str, task: Task, *, tasks: int = 1, tried: int = 1
    ) -> None:
        """Add a finding that no output shows."""
        finding = RedTeamFinding(
            severity=severity,
            mutator=check,
            reward=self.label,
            sentence=sentence,
            advice=advice,
            task=task.id,
            tasks=tasks,
            tried=tried,
        )
        self.findings.append(finding)


def _keys(outputs: Iterable[Any]) -> list[list[str]]:
    """Paths of the fields of the first object among outputs; none where all are texts."""
    return next(([[key] for key in output] for output in outputs if isinstance(output, dict)), [])


def _right(form: Form, answer: Any) -> Attack:
    advice = "mend the reward, or the task's answer"
    return Attack(output=form.wrap(form.pick(answer)), what=GOLD, worth=Worth.RIGHT, advice=advice)


def _wrong(form: Form, answer: Any) -> Attack:
    return replace(_right(form, answer), what="the answer of another task", worth=Worth.WRONG)


def _nonsense(output: Any) -> Attack:
    return Attack(output=output, what=NOISE_WORDS, worth=Worth.NOTHING, advice="compare it with the answer")


def _total(trial: Trial) -> float:
    return trial.total or 0.0


async def _sample_rollouts(
    recipe: Recipe, plugins: PluginManager, gold: Mapping[str, float], *, count: int, show: Show
) -> list[Trajectory]:
    """Sample rollouts of the recipe's own agent and policy, and reward them."""
    from lightningrl_training.checks import build_checked
    from lightningrl_training.collector import fetch_ended
    from lightningrl_training.serving import serve_recipe
    from lightningrl_training.tasks import plan_evaluation

    show("loading the policy", 0, 0)
    parts = build_checked(recipe, plugins)
    chosen = [task for task in parts.tasks.train if not gold or task.id in gold][: -(-count // SAMPLES)]
    with tempfile.TemporaryDirectory(prefix="lightningrl-redteam-", ignore_cleanup_errors=True) as scratch:
        async with serve_recipe(recipe, parts, Path(scratch), starting=lambda what: show(what, 0, 0)) as (
            recipe,
            served,
        ):
            show("sampling rollouts", 0, 0)
            sampling = recipe.sampling.settings()
            numbered = dict(enumerate(chosen))
            specs = plan_evaluation(numbered, recipe, samples=SAMPLES, sampling=sampling, step=0)[:count]
            await served.client.create_rollouts(specs)
            ended = await fetch_ended(served.client, [spec.id for spec in specs])
            return await parts.evaluator.evaluate(ended)


def suspicious(rollouts: Sequence[Trajectory], gold: Mapping[str, float]) -> list[RedTeamFinding]:
    """Findings among rewarded rollouts: outputs that are paid as gold and are not. `gold`: what gold earned, by task;
    without it 1.0 is all that there is.

    One output that earns all on tasks with other answers is a hole. One that only differs from gold is to be read.
    """

    def add(paid: Sequence[Trajectory], sentence: str, severity: Severity) -> None:
        first = paid[0]
        finding = RedTeamFinding(
            severity=severity,
            mutator="search",
            reward=" + ".join(first.rewards),
            sentence=sentence,
            advice="let the reward refuse it, where it is wrong; `lightningrl rescore` says what that would change",
            task=first.task.id,
            output=shorten(first.output),
            earned=first.reward,
            gold=gold.get(first.task.id),
            tasks=len({rollout.task.id for rollout in paid}),
            tried=len(rollouts),
        )
        findings.append(finding)

    findings: list[RedTeamFinding] = []
    paid = [
        rollout
        for rollout in rollouts
        if rollout.reward is not None and rollout.reward >= 0.99 * gold.get(rollout.task.id, 1.0) > 0.0
    ]
    by_output: dict[str, list[Trajectory]] = defaultdict(list)
    for rollout in paid:
        by_output[canonical_text(rollout.output)].append(rollout)
    for alike in by_output.values():
        answers = {canonical_text(rollout.task.answer) for rollout in alike}
        if len(answers) > 1:
            what = f"the policy's same output earns as much as gold on tasks with {len(answers)} other answers"
            add(alike, what, Severity.HIGH)
    for rollout in [rollout for rollout in paid if not _has_answer(rollout)][:MOST_SHOWN]:
        add([rollout], "the policy earns as much as gold with an output that lacks the answer; read it", Severity.NOTE)
    return findings


def _has_answer(rollout: Trajectory) -> bool:
    answers = rollout.task.answer if isinstance(rollout.task.answer, list) else [rollout.task.answer]
    output = canonical_text(rollout.output)
    return any(canonical_text(answer) in output for answer in answers)
