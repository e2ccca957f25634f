"""`lightningrl redteam`: its sentences, its exit status, its plugins, and the recipes that are shipped."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightningrl import Plugin, hookimpl
from lightningrl.commands import app
from lightningrl.errors import ConfigError, PluginError
from lightningrl.plugins import PluginManager, load_plugins
from lightningrl.scaffold import new_agent
from lightningrl.types import Outcome, Task, Trajectory
from lightningrl_client.recipe_file import load_recipe
from lightningrl_credit.rewards import RewardSet
from lightningrl_training.build import build_tasks_and_rewards
from lightningrl_training.doctor.findings import Finding, Verdict
from lightningrl_training.doctor.observation import Observation
from lightningrl_training.doctor.reward_attack import attack_rewards, rewards_stand
from lightningrl_training.redteam import Attack, Severity, Target, Worth, mutators_of
from lightningrl_training.redteam.attack import attack_recipe, suspicious

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted(
    recipe
    for recipe in ROOT.glob("examples/*/*.toml")
    if recipe.stem not in ("calc_x", "musique", "spider")
    and recipe.parent.name not in ("textcraft", "worlds")  # of data not shipped
)


def write_recipe(folder: Path, reward: str, tasks: str = "") -> Path:
    """A recipe whose policy is never looked at."""
    tasks = (
        tasks or 'return [{"id": f"t{n}", "input": f"{n} * 3 + 40?", "answer": str(n * 3 + 40)} for n in range(2, 9)]'
    )
    (folder / "parts.py").write_text(
        f"def tasks():\n    {tasks}\n\n\ndef answer(question):\n    return ''\n\n\ndef right(task, output, trajectory):\n    {reward}\n"
    )
    recipe = folder / "recipe.toml"
    recipe.write_text(
        'agent = "parts.py:answer"\ntasks.train = "parts.py:tasks"\npolicy.model = "no/such-model"\n'
        'rewards.right.use = "parts.py:right"\n'
    )
    return recipe


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["redteam", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


@pytest.mark.parametrize("recipe", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_recipe_raises_no_alarm(recipe: Path) -> None:
    report = asyncio.run(attack_recipe(recipe, tasks=4))
    assert [finding for finding in report.findings if finding.severity is not Severity.NOTE] == []
    assert report.outputs == report.planned > 100


def test_the_starter_of_init_raises_no_alarm(tmp_path: Path) -> None:
    report = asyncio.run(attack_recipe(new_agent(tmp_path / "mine"), tasks=4))
    assert report.findings == ()
    assert list(report.gold) == ["right"]


def test_a_finding_says_what_earned_what_and_what_to_change(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "return float(task.answer in str(output))")
    status, said = run(str(recipe))
    assert status == 1
    assert "high many answers in a row earns as much as gold (7 of 7 tasks)" in said
    assert "earned 1, gold 1:" in said
    assert "→ take one answer from a marked place" in said
    ran = CliRunner().invoke(app, ["redteam", str(recipe), "--json", "--only", "nothing", "--only", "many_answers"])
    found = json.loads(ran.stdout)["findings"]
    assert ran.stderr.startswith("rewarding outputs 1/8\n"), "standard output is JSON alone"
    assert (ran.exit_code, {row["mutator"] for row in found}) == (1, {"many_answers"})


def test_a_sound_reward_ends_with_status_0_and_strictness_changes_none(tmp_path: Path) -> None:
    status, said = run(str(write_recipe(tmp_path, "return float(output == task.answer)")))
    assert status == 0
    assert "no attack earned what it should not" in said
    assert "gold with a full stop earns less than half of what gold earns, on 7 of 7 tasks" in said


def test_the_same_seed_takes_the_same_tasks(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "return float(not output)")
    reports = [asyncio.run(attack_recipe(recipe, tasks=3, seed=seed)) for seed in (5, 5)]
    assert reports[0] == reports[1]


def test_gold_of_a_function_is_believed(tmp_path: Path) -> None:
    tasks = 'return [{"id": f"t{n}", "input": {"n": n}} for n in range(2, 9)]'
    recipe = write_recipe(tmp_path, "return float(output == {'sum': task.input['n'] + 4})", tasks)
    blind = asyncio.run(attack_recipe(recipe))
    assert [finding.sentence for finding in blind.findings] == [
        "no task has an answer, so that only outputs without worth could be tried"
    ]
    (tmp_path / "gold.py").write_text("def best(task):\n    return {'sum': task.input['n'] + 4}\n")
    report = asyncio.run(attack_recipe(recipe, gold="gold.py:best"))
    assert (report.findings, report.gold) == ((), {"right": "as it is given"})


def test_gold_that_raises_is_named_with_its_task(tmp_path: Path) -> None:
    def broken(task: Task) -> str:
        raise LookupError("no solution")

    with pytest.raises(ConfigError, match=r"gold of task 't2' raised LookupError: no solution .*; mend it"):
        asyncio.run(attack_recipe(write_recipe(tmp_path, "return 0.0"), gold=broken))


def test_tasks_whose_gold_earns_nothing_are_named(tmp_path: Path) -> None:
    reward = "return float(output == task.answer and task.id != 't4')"
    report = asyncio.run(attack_recipe(write_recipe(tmp_path, reward)))
    (finding,) = (finding for finding in report.findings if finding.severity is not Severity.NOTE)
    assert (finding.sentence, finding.task) == ("gold earns no more than nothing on 1 of 7 tasks", "t4")


def test_time_that_is_over_is_said(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "import time; time.sleep(0.05); return float(output == task.answer)")
    report = asyncio.run(attack_recipe(recipe, seconds=1.0))
    assert report.outputs < report.planned
    assert "outputs were not rewarded: 1 s were over" in report.notes[0]


def test_a_file_that_is_there_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verdict.txt").write_text("0")
    reward = "import pathlib; return max(float(pathlib.Path('verdict.txt').read_text()), float(output == task.answer))"
    report = asyncio.run(attack_recipe(write_recipe(tmp_path, reward)))
    assert (tmp_path / "verdict.txt").read_text() == "0"
    assert not report.is_bad


def test_a_stranger_brings_a_mutator_and_one_that_raises_is_named(tmp_path: Path) -> None:
    class Stranger:
        @hookimpl
        def lightningrl_reward_mutators(self) -> Iterator[Plugin]:
            yield Plugin(name="loud", summary="loud nonsense", factory=lambda: self.shout)

        def shout(self, target: Target) -> Iterator[Attack]:
            yield Attack(output="YES!", what="loud nonsense", worth=Worth.NOTHING, advice="compare with the answer")

    manager = PluginManager()
    manager.register(Stranger())
    (mutator,) = mutators_of(manager).values()
    assert [attack.output for attack in mutator(Target(task=Task(id="t", input="")))] == ["YES!"]


def test_a_mutator_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no reward mutator named 'lies'; installed: claims, form"):
        asyncio.run(attack_recipe(write_recipe(tmp_path, "return 0.0"), only=["lies"]))


def test_a_mutator_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(target: Target) -> Iterator[Attack]:
        raise KeyError(target.task.id)

    monkeypatch.setattr("lightningrl_training.redteam.attack.mutators_of", lambda plugins: {"mine": broken})
    with pytest.raises(PluginError, match=r"reward mutator 'mine' raised KeyError: 't2' .* on task 't2'"):
        asyncio.run(attack_recipe(write_recipe(tmp_path, "return float(output == task.answer)"), tasks=32))


def test_no_policy_is_loaded_without_a_search(tmp_path: Path) -> None:
    write_recipe(tmp_path, "import sys; return float('torch' in sys.modules or 'transformers' in sys.modules)")
    if {"torch", "transformers"} & sys.modules.keys():
        pytest.skip("another test has loaded them")
    report = asyncio.run(attack_recipe(tmp_path, tasks=2))
    assert not report.is_bad


@pytest.mark.long
def test_a_search_samples_the_recipes_own_policy() -> None:
    report = asyncio.run(attack_recipe(ROOT / "examples" / "from_scratch", tasks=2, search=8))
    assert not report.is_bad
    assert all("lacks the answer" in found.sentence for found in report.findings if found.mutator == "search")


def test_a_search_finds_what_the_policy_says_everywhere() -> None:
    def rollout(number: int, output: str, reward: float) -> Trajectory:
        task = Task(id=f"t{number}", input="", answer=f"town {number}")
        return Trajectory(
            rollout_id=f"r{number}", attempt=1, task=task, group_id="g", outcome=Outcome.SUCCEEDED, transitions=(),
            output=output, reward=reward, rewards={"right": reward},
        )  # fmt: skip

    sampled = [
        rollout(1, "it depends", 1.0),
        rollout(2, "it depends", 1.0),
        rollout(3, "Town 3!", 1.0),
        rollout(4, "no", 0.0),
    ]
    findings = suspicious(sampled, {f"t{number}": 1.0 for number in range(5)})
    assert [(finding.severity, finding.tasks) for finding in findings] == [
        (Severity.HIGH, 2), (Severity.NOTE, 1), (Severity.NOTE, 1)
    ]  # fmt: skip


def examined(recipe: Path, outputs: Sequence[Any]) -> Finding:
    """Return the doctor's finding on the rewards of a recipe whose agent has returned these outputs."""
    whole = load_recipe(recipe)
    _, tasks, rewards = build_tasks_and_rewards(whole, load_plugins())
    rollouts = [
        Trajectory(
            rollout_id=f"r{number}", attempt=1, task=tasks.train[0], group_id="g", outcome=Outcome.SUCCEEDED,
            transitions=(), output=output,
        )
        for number, output in enumerate(outputs)
    ]  # fmt: skip
    report = asyncio.run(attack_rewards(whole, RewardSet(rewards), tasks.train, rollouts))
    return rewards_stand(Observation(recipe=whole, tasks=tasks, groups=(), signals=(), attack=report))


def test_the_doctor_warns_of_a_reward_that_pays_for_nonsense(tmp_path: Path) -> None:
    finding = examined(write_recipe(tmp_path, "return float(output['said'] is not None)"), [{"said": "46"}])
    assert finding.verdict is Verdict.WARN
    assert finding.evidence.startswith("every output earns 1, whatever it says on 4 of 4 tasks")
    assert finding.remedy.startswith("`lightningrl redteam RECIPE` shows each of them")


def test_the_doctor_says_how_many_outputs_a_sound_reward_stood(tmp_path: Path) -> None:
    finding = examined(write_recipe(tmp_path, "return float(output['said'] == task.answer)"), [{"said": "46"}])
    assert finding.verdict is Verdict.PASS
    assert finding.evidence.endswith("outputs on 4 tasks earned no more than they should")


def test_the_doctor_asks_no_judge_for_an_attack(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "return 1.0")
    parts = (tmp_path / "parts.py").read_text()
    (tmp_path / "parts.py").write_text(parts.replace("def right", "async def right"))
    finding = examined(recipe, ["46"])
    assert finding.evidence == "not attacked: a reward is async, or there is no output to begin with"
