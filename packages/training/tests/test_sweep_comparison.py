"""What a sweep plans and what it concludes, without training."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.figures import welch_interval
from lightningrl_training.sweeps.comparison import SweepResult, compare_sweep
from lightningrl_training.sweeps.curves import draw_sweep
from lightningrl_training.sweeps.plan import SweepPlan, default_sweep, make_plan, open_plan, split_values

RECIPE = """
agent = "agent.py:answer"
[tasks]
train = "data.jsonl"
validation = "data.jsonl"
[policy]
model = "model"
[rewards.right]
use = "exact_match"
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return tmp_path / "recipe.toml"


def record(plan: SweepPlan, folder: Path, scores: Mapping[str, Sequence[float]], *, steps: int = 4) -> SweepResult:
    """The result of a sweep whose runs ended with these held-out rewards, by setting and seed."""
    finished = {}
    for point in plan.points:
        run = folder / point.name
        run.mkdir(parents=True)
        after = scores[point.setting][plan.seeds.index(point.seed)]
        trained = {"reward": after, "rollouts": 8, "completion_tokens": 100, "minutes": 0.5}
        lines = [
            {"step": 0, "validation/reward": 0.0625, "validation/rollouts": 16},
            *({"step": step, **trained} for step in range(1, steps + 1)),
            {"step": steps, "validation/reward": after, "validation/rollouts": 16},
        ]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        finished[point.name] = ""
    (folder / "finished.json").write_text(json.dumps(finished), encoding="utf-8")
    return compare_sweep(plan, folder, plan.read_recipe(plan.points[0]))


def test_values_are_split_at_commas_but_for_those_in_lists_tables_and_texts() -> None:
    assert split_values("1e-5, 1e-4") == ["1e-5", "1e-4"]
    assert split_values('["a", "b"],["c"]') == ['["a", "b"]', '["c"]']
    assert split_values("{a = 1, b = [2, 3]}") == ["{a = 1, b = [2, 3]}"]
    assert split_values("\"x,y\",'z,w'") == ['"x,y"', "'z,w'"]


def test_each_setting_has_a_run_before_any_has_a_second(source: Path) -> None:
    plan = make_plan(source, ["learner.learning_rate=1e-5,1e-4", "loop.seed=7", "loop.steps=3"], seeds=2)
    assert [point.name for point in plan.points] == [
        "learning_rate=1e-5,seed=7",
        "learning_rate=1e-4,seed=7",
        "learning_rate=1e-5,seed=8",
        "learning_rate=1e-4,seed=8",
    ]
    recipe = plan.read_recipe(plan.points[-1])
    assert (recipe.loop.seed, recipe.loop.steps, recipe.learner["learning_rate"]) == (8, 3, 1e-4)
    assert make_plan(source, ["loop.seed=3,5"], seeds=None).seeds == [3, 5]


def test_names_of_runs_are_names_of_folders_whatever_the_values(source: Path) -> None:
    plan = make_plan(source, ["rewards.right.use='a/b.py:x','a/b.py:y'", f"name='{'n' * 90}','m'"], seeds=None)
    names = [point.name for point in plan.points]
    assert len(set(names)) == 4
    assert all("/" not in name and len(name) < 140 for name in names)


@pytest.mark.parametrize(
    ("settings", "seeds", "sentence"),
    [
        (["loop.stepz=1,2"], 3, r"unknown key 'loop.stepz'"),
        (["loop.steps=1,many"], 3, r"'loop.steps'"),
        (["loop.steps"], 3, r"setting 'loop.steps' is not KEY=VALUE"),
        (["loop.steps=1,"], 3, r"has an empty value"),
        (["learner.learning_rate=1e-3,0.001"], 3, r"has '0.001' twice; more runs of one setting are --seeds"),
        (["loop.seed=1,2"], 3, r"both say which seeds"),
        (["loop.seed=a,b"], None, r"a seed is a whole number"),
        (["learner.seed=4"], 3, r"a seed of its own, 4, which each run of the sweep would have; remove it"),
        ([f"loop.steps={','.join(map(str, range(200)))}"], 10, r"a sweep of 2,000 runs is too large"),
    ],
)
def test_bad_values_are_a_sentence_before_anything_is_written(
    source: Path, settings: list[str], seeds: int | None, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_plan(source, settings, seeds=seeds)
    assert [file.name for file in source.parent.iterdir()] == ["recipe.toml"]


def test_the_same_command_finds_its_plan_and_another_recipe_is_refused(source: Path, tmp_path: Path) -> None:
    plan = make_plan(source, ["loop.group_size=2,4"], seeds=2)
    folder = default_sweep(tmp_path / "runs", plan, "mine")
    assert folder == default_sweep(tmp_path / "runs", make_plan(source, ["loop.group_size=2,4"], seeds=2), "mine")
    assert (open_plan(plan, folder), open_plan(plan, folder)) == (False, True)
    with pytest.raises(RunFolderError, match="has another seeds: "):
        open_plan(make_plan(source, ["loop.group_size=2,4"], seeds=3), folder)
    source.write_text(RECIPE.replace('"exact_match"', '"exact_match"\nweight = 2.0'), encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"the recipe has changed since sweep .* started"):
        open_plan(make_plan(source, ["loop.group_size=2,4"], seeds=2), folder)
    with pytest.raises(RunFolderError, match=r"holds .runs. and no sweep; .* give another --sweep"):
        open_plan(plan, tmp_path)


def test_welchs_interval_is_that_of_the_textbook() -> None:
    """Against scipy 1.16: `ttest_ind(a, b, equal_var=False).confidence_interval()`."""
    interval = welch_interval([0.9, 0.8, 1.0], [0.5, 0.7, 0.3, 0.5])
    assert interval.mean == pytest.approx(0.4)
    half = 2.5747 * math.sqrt(0.01 / 3 + 0.08 / 3 / 4)  # t of 4.94 degrees of freedom
    assert interval.low == pytest.approx(0.4 - half, abs=2e-3)
    assert interval.high == pytest.approx(0.4 + half, abs=2e-3)
    assert welch_interval([1.0], [0.5, 0.5]).low is None


def test_seeds_that_agree_are_no_more_certain_than_their_rounding() -> None:
    alike = welch_interval([0.5, 0.5, 0.5], [0.5625, 0.5625, 0.5625], grain=1 / 16)
    assert alike.low is not None
    assert alike.high is not None
    assert alike.low < -0.09
    assert alike.high < 0.0, "one answer of 16, by each of three seeds"
    assert welch_interval([0.5] * 3, [0.51] * 3, grain=1 / 16).high > 0.0  # type: ignore[operator]


def test_the_better_setting_is_named_with_the_interval_of_the_difference(source: Path, tmp_path: Path) -> None:
    plan = make_plan(source, ["learner.learning_rate=0,1e-3"], seeds=3)
    result = record(
        plan, tmp_path / "s", {"learner.learning_rate=0": [0.0625] * 3, "learner.learning_rate=1e-3": [0.9, 1.0, 0.95]}
    )
    assert result.verdict.startswith(
        "learner.learning_rate=1e-3 is better than learner.learning_rate=0 by +0.888 (95 %: +0.7"
    )
    assert result.verdict.endswith("(held-out reward, 3 seeds)")
    assert [setting.before for setting in result.settings] == [0.0625, 0.0625]
    assert (result.settings[0].tokens, result.settings[0].minutes) == (400.0, 0.5)
    assert json.loads(json.dumps(result.numbers()))["differences"][0]["shown"] is True
    picture = draw_sweep(result, tmp_path / "s", title="a test")
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_settings_that_are_alike_show_no_difference(source: Path, tmp_path: Path) -> None:
    plan = make_plan(source, ["loop.checkpoint_every=5,10"], seeds=3)
    scores = {"loop.checkpoint_every=5": [0.5, 0.75, 0.25], "loop.checkpoint_every=10": [0.5, 0.75, 0.25]}
    result = record(plan, tmp_path / "s", scores)
    assert result.verdict.startswith("no difference shown by 3 seeds in held-out reward: ")
    assert not result.differences[0].interval.is_shown


def test_of_several_settings_each_is_held_against_the_best_and_intervals_are_wider(
    source: Path, tmp_path: Path
) -> None:
    plan = make_plan(source, ["learner.learning_rate=0,1e-4,1e-3"], seeds=3)
    names = plan.settings
    result = record(
        plan, tmp_path / "s", {names[0]: [0.1, 0.0, 0.1], names[1]: [0.8, 0.9, 1.0], names[2]: [0.9, 0.9, 1.0]}
    )
    assert f"{names[2]} is better than {names[0]} by " in result.verdict
    assert f"no difference shown from {names[1]}" in result.verdict
    alone = welch_interval([0.9, 0.9, 1.0], [0.1, 0.0, 0.1], grain=1 / 16)
    three = next(each for each in result.differences if each.other == names[0] and each.setting == names[2]).interval
    assert alone.low is not None
    assert three.low is not None
    assert three.low < alone.low


def test_one_seed_shows_nothing_and_one_setting_says_whether_it_learned(source: Path, tmp_path: Path) -> None:
    plan = make_plan(source, ["loop.group_size=2,4"], seeds=None)
    result = record(plan, tmp_path / "one", {"loop.group_size=2": [0.1], "loop.group_size=4": [0.9]})
    assert result.verdict.startswith("one seed of a setting shows no difference")
    seeds = make_plan(source, [], seeds=3)
    assert record(seeds, tmp_path / "s", {"": [0.9, 1.0, 0.9]}).verdict.startswith("held-out reward rose: +0.871 (95 %")
    assert "did not change that 3 seeds show" in record(seeds, tmp_path / "t", {"": [0.0, 0.1, 0.2]}).verdict


def test_runs_that_all_stopped_at_a_target_are_compared_by_their_steps(source: Path, tmp_path: Path) -> None:
    plan = make_plan(source, ["loop.group_size=2,4", "loop.stop_at=0.9", "validation.every=1"], seeds=3)
    result = record(plan, tmp_path / "s", {"loop.group_size=2": [0.9, 0.95, 1.0], "loop.group_size=4": [1.0, 0.9, 0.9]})
    assert result.measure == "steps saved until a held-out reward of 0.9"
    assert result.verdict.startswith("no difference shown by 3 seeds in steps saved")
