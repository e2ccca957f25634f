"""Curves, intervals, hints and progress on a run's page, from metrics as a run writes them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightningrl.figures import smooth, wilson
from lightningrl.types import Outcome, RolloutMode, RolloutState
from lightningrl_runs.metrics import HIDDEN, METRICS, find_metric
from lightningrl_runs.progress import measure_progress
from lightningrl_runs.queries.rollout_counts import Cell, StepReward
from lightningrl_runs.summary import Point, effective_count
from lightningrl_viewer.charts import SMALL, Series, draw_chart, make_curves
from lightningrl_viewer.templates import ends

RECIPE = {"loop.steps": 10, "loop.tasks_per_step": 4, "loop.group_size": 8}


def step(number: int, **metrics: float) -> dict[str, Any]:
    """A step as `metrics.jsonl` has it."""
    whole = {"step": number, "time": 1000.0 + 60 * number, "rollouts": 32, "groups": 4.0, "minutes": float(number)}
    return {**whole, "reward": 0.5, "reward/right": 0.5, "seconds": 60.0, **metrics}


def cell(number: int, count: int, *, mode: RolloutMode = RolloutMode.TRAIN, has_ended: bool = True) -> Cell:
    outcome, state = (Outcome.SUCCEEDED, RolloutState.SUCCEEDED) if has_ended else (None, RolloutState.RUNNING)
    return Cell(step=number, mode=mode, state=state, outcome=outcome, bin=None, count=count, total=0.0)


def titles(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {group.name: [curve.title for curve in group.curves] for group in make_curves(rows)}


def test_every_metric_is_drawn_once_in_its_group_and_the_reward_above() -> None:
    learned = {f"learn/{name}": 0.1 for name in ("loss", "kl_rollout", "entropy", "grad_norm", "lr")}
    memory = {f"memory/{name}": 1e9 for name in ("trainer", "server", "workers")}
    lengths = {"completion_tokens": 640.0, "tokens_per_second": 90.0}
    rows = [step(number, **learned, **memory, **lengths, mine=3.0) for number in range(1, 4)]
    assert titles(rows) == {
        "Learning": ["Loss", "KL to the sampler", "Gradient norm", "Learning rate"],
        "Exploration": ["Entropy"],
        "Lengths": ["Tokens of a rollout"],
        "Speed": ["Tokens a second", "Seconds of a step"],
        "Memory": ["Memory"],
        "Others": ["mine"],
    }
    curves = {curve.title: curve for group in make_curves(rows) for curve in group.curves}
    assert curves["Tokens of a rollout"].last == "20", "640 tokens of 32 rollouts"
    assert [line.name for line in curves["Memory"].chart.curves] == ["trainer", "server", "workers"]


def test_policies_and_rewards_are_lines_of_one_chart() -> None:
    rows = [step(1, **{"learn/writer/loss": 0.1, "learn/critic/loss": 0.2, "reward/short": 0.3})]
    charts = {curve.title: curve.chart for group in make_curves(rows) for curve in group.curves}
    assert [line.name for line in charts["Loss"].curves] == ["writer", "critic"]
    assert [line.name for line in charts["Reward"].curves] == ["right", "short"]


def test_a_step_without_a_metric_leaves_a_gap_and_many_steps_share_points() -> None:
    rows = [step(number, **({"learn/loss": float(number)} if number != 500 else {})) for number in range(1, 1001)]
    (learning,) = (group for group in make_curves(rows) if group.name == "Learning")
    (line,) = learning.curves[0].chart.curves
    assert 100 < line.line.count(" ") // 2 + 1 <= 125
    assert learning.curves[0].chart.last == 1000


def test_smoothing_keeps_the_line_before_it_and_is_unbiased_at_its_start() -> None:
    assert smooth([1.0, 1.0, 1.0], 0.9) == pytest.approx([1.0, 1.0, 1.0])
    assert smooth([0.0, 3.0], 0.5) == pytest.approx([0.0, 2.0])
    points = [Point(step=number, mean=float(number % 2)) for number in range(9)]
    plain, much = (draw_chart([Series(name="", colour=1, points=points)], smoothing=by) for by in (0.0, 0.9))
    assert plain is not None and much is not None
    assert plain.curves[0].raw == "" and much.curves[0].raw == plain.curves[0].line != much.curves[0].line


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.0, 0.0], ("0.0", "1.0")),
        ([1e-11, 3e-11], ("0.0", "1.0")),
        ([2e-5, 2e-5], ("0", "4e-05")),
        ([0.999994, 0.999998], ("0", "2")),
        ([12_000.0, 48_000.0], ("0", "60k")),
        ([-0.5, 0.5], ("−0.5", "0.5")),
    ],
)
def test_a_small_chart_says_numbers_that_fit_beside_it(values: list[float], labels: tuple[str, str]) -> None:
    points = [Point(step=number, mean=value) for number, value in enumerate(values)]
    chart = draw_chart([Series(name="", colour=1, points=points)], frame=SMALL)
    assert chart is not None
    said = [tick.label for tick in chart.y_ticks]
    assert all(len(label) <= 7 for label in said), said
    assert (said[0], said[-1]) == labels


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [(0.0, 10, 0.0, 0.2775), (1.0, 100, 0.9630, 1.0), (0.5, 20, 0.2993, 0.7007), (15 / 148, 148, 0.0624, 0.1605)],
)
def test_a_shares_interval_is_wilsons(share: float, count: int, low: float, high: float) -> None:
    """15 of 148 is an example of Newcombe (1998), table I."""
    assert wilson(share, count) == pytest.approx((low, high), abs=1e-3)


@pytest.mark.parametrize(
    ("mean", "variance", "draws"), [(0.5, 0.0625, 12.0), (0.5, 0.0, 32.0), (0.5, 0.25, 4.0), (1.0, 0.0, 4.0)]
)
def test_rollouts_that_share_tasks_count_as_fewer_draws(mean: float, variance: float, draws: float) -> None:
    """Rollouts of a group share a task: counted one by one they would promise too much."""
    reward = StepReward(step=1, mode=RolloutMode.TRAIN, count=32, mean=mean, groups=4, variance=variance)
    assert effective_count(reward) == pytest.approx(draws)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0.0054, 0.1637, "0.01 – 0.16"),
        (0.0, 1.0, "0.00 – 1.00"),
        (-0.001, 0.4, "0.00 – 0.40"),
        (0.0004, 0.0016, "0.0004 – 0.0016"),
        (None, None, ""),
    ],
)
def test_an_interval_is_written_in_numbers_of_one_kind(low: float | None, high: float | None, text: str) -> None:
    assert ends(low, high) == text


def test_each_metric_has_a_meaning_and_one_entry() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names) and not HIDDEN & set(names)
    for metric in METRICS:
        assert metric.means.endswith(".") and (not metric.healthy or metric.healthy.endswith(".")), metric.name
        assert metric.over is None or metric.over in HIDDEN
    assert find_metric("learn/writer/entropy") is find_metric("learn/entropy") is not None
    assert find_metric("reward/right") is not None and find_metric("nobody") is None


def test_a_live_run_says_how_far_it_is_and_what_is_left() -> None:
    rows = [step(number) for number in range(1, 5)]
    cells = [cell(number, 32) for number in range(1, 5)] + [cell(5, 8), cell(5, 24, has_ended=False)]
    progress = measure_progress(rows, cells, RECIPE, is_live=True, now=rows[-1]["time"] + 15)
    assert (progress.steps, progress.total, progress.phase) == (4, 10, "step 5")
    assert (progress.ended, progress.wanted) == (8, 32)
    assert progress.share == pytest.approx((4 + 0.5 * 8 / 32) / 10), "rollouts are the first half of a step"
    assert progress.seconds_left == pytest.approx(6 * 60 - 15) and not progress.is_bound
    late = measure_progress(rows, cells, {**RECIPE, "loop.minutes": 5.0}, is_live=True, now=rows[-1]["time"])
    assert late.seconds_left == pytest.approx(60)


def test_before_and_after_the_first_step_the_forecast_says_what_it_rests_on() -> None:
    begun = measure_progress([], [cell(1, 3)], RECIPE, is_live=True)
    assert (begun.steps, begun.ended, begun.seconds_left) == (0, 3, None)
    forecast = [{"step": 0, "time": 1000.0, "forecast_step_seconds": 30.0}]
    assert measure_progress(forecast, [], RECIPE, is_live=True, now=1010.0).seconds_left == pytest.approx(290)
    first = measure_progress([step(1, seconds=90.0)], [], RECIPE, is_live=True, now=1060.0)
    assert first.seconds_left == pytest.approx(9 * 90) and first.is_bound
    dead = measure_progress([step(1)], [], RECIPE, is_live=False)
    assert dead.seconds_left is None and (dead.steps, dead.total) == (1, 10)


def test_a_step_whose_rollouts_have_all_ended_is_not_done_before_it_is_learned() -> None:
    rows, cells = [step(9, seconds_collect=15.0)], [cell(10, 32)]
    assert measure_progress(rows, cells, RECIPE, is_live=True).share == pytest.approx(0.925)
    assert measure_progress(rows, cells, RECIPE, is_live=False).share == pytest.approx(0.9), "it died: 9 of 10"


def test_a_validation_that_runs_is_what_is_under_way() -> None:
    checks = [cell(4, 60, mode=RolloutMode.VALIDATION), cell(4, 40, mode=RolloutMode.VALIDATION, has_ended=False)]
    progress = measure_progress([step(number) for number in range(1, 5)], checks, RECIPE, is_live=True)
    assert (progress.phase, progress.ended, progress.wanted) == ("validation after step 4", 60, 100)
    assert progress.share == pytest.approx(0.4)
    assert re.fullmatch(r"validation after step \d+", progress.phase)
