"""What a run says of its pace before the first step, and the time that it gives a slow engine."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lightningrl.backends import Speed
from lightningrl.recipe import Recipe
from lightningrl_testing.groups import make_group
from lightningrl_training.progress import LineProgress, LiveProgress, forecast_step
from lightningrl_training.serving import give_time

SLOW = Speed(parameters=494_000_000, trained=8_800_000, read=200.0, sampled=20.0, calls=8, learned=100.0)


def make_recipe(folder: Path, **runtime: float) -> Recipe:
    return Recipe.model_validate(
        {
            "agent": "agent.py:answer",
            "tasks": {"train": "data.py:tasks"},
            "policy": {"model": "org/model"},
            "rewards": {"right": {"use": "rewards.py:right"}},
            "sampling": {"max_tokens": 100},
            "loop": {"tasks_per_step": 4, "group_size": 2, "steps": 10},
            "runtime": runtime,
            "folder": folder,
        }
    )


def test_a_rollout_has_time_for_eight_answers_of_a_slow_engine_unless_the_recipe_says(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    assert recipe.runtime.limit_s == 120.0
    assert give_time(recipe, None).runtime.limit_s == 120.0
    assert give_time(recipe, SLOW).runtime.limit_s == 8 * 100 / (20 / 8)
    assert give_time(recipe, replace(SLOW, sampled=2000.0)).runtime.limit_s == 120.0
    assert give_time(make_recipe(tmp_path, timeout_s=30.0), SLOW).runtime.limit_s == 30.0


def test_a_step_is_forecast_from_the_longest_answer_and_then_from_rollouts_that_were_seen(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    before = forecast_step(recipe, SLOW, ())
    assert before[:4] == [
        "494 million parameters",
        "8.8 million learn",
        "20 tokens/s sampled, 8 calls at once",
        "100 learned",
    ]
    # 8 rollouts · (100 / 20 + 100 / 100) s
    assert before[4:] == [
        "a step of 8 rollouts 48 seconds",
        "10 steps 8.0 minutes",
        "if each samples one answer of sampling.max_tokens = 100",
    ]
    seen = make_group([1.0, 0.0], [0.0]).trajectories
    calls = [call for one in seen for call in one.transitions]
    sampled = sum(len(call.completion_ids) for call in calls) / 2
    after = forecast_step(recipe, SLOW, seen)
    assert f"{len(calls) / 2:.1f} calls, {sampled:.0f} tokens sampled" in after[-1]
    assert after[:4] == before[:4]


def test_a_policy_that_learns_as_a_whole_is_named_once(tmp_path: Path) -> None:
    whole = forecast_step(make_recipe(tmp_path), replace(SLOW, parameters=1_540_000_000, trained=1_540_000_000), ())
    assert whole[0] == "1.54 billion parameters"
    assert "tokens/s" in whole[1]


def test_a_person_reads_it_on_80_columns_until_the_first_step_says_it_better(tmp_path: Path) -> None:
    parts = forecast_step(make_recipe(tmp_path), SLOW, ())
    said = io.StringIO()
    LineProgress(Console(file=said, width=80)).forecast(parts)
    assert said.getvalue().startswith("forecast:  494 million parameters")
    assert max(map(len, said.getvalue().splitlines())) <= 80
    screen = Console(file=io.StringIO(), width=120, record=True)
    live = LiveProgress(screen)
    live.forecast(parts)
    screen.print(live)
    assert "10 steps 8.0 minutes" in screen.export_text()


def test_a_forecast_holds_on_a_busy_machine_and_for_answers_that_are_sampled(tmp_path: Path) -> None:
    """Validation takes the likeliest answer, training samples; and a machine that is busy while it is measured is
    slower than it is."""
    busy = replace(SLOW, sampled_cpu=80.0, read_cpu=800.0, learned_cpu=400.0)
    assert forecast_step(make_recipe(tmp_path), busy, ())[4:6] == [
        "a step of 8 rollouts 48 seconds, 12 seconds of CPU",
        "10 steps 8.0 minutes, 2.0 minutes of CPU",
    ]
    said = Recipe.model_validate(
        {**make_recipe(tmp_path).model_dump(), "validation": {"sampling": {"temperature": 0.0}}}
    )
    seen = make_group([1.0, 0.0], [0.0]).trajectories
    step, run, like = forecast_step(said, SLOW, seen)[-3:]
    assert re.fullmatch(r"a step of 8 rollouts [\d.]+ seconds to [\d.]+ seconds", step)
    assert " to " in run
    prompts = sum(len(call.prompt_ids) for one in seen for call in one.transitions) / 2
    assert re.search(
        rf"{prompts:.0f} in prompts, of which \d+ are computed \(what is shared is once\), or samples ", like
    )
    assert "as at temperature 1 it may" in like
