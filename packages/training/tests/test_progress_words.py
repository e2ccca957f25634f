"""What a person reads of a run: what is waited for, what is learned, and never a line broken by the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from lightningrl_testing.groups import make_group
from lightningrl_training.progress import LineProgress, LiveProgress

METRICS = {
    "reward": 0.4531,
    "calls_per_rollout": 1.875,
    "groups_without_signal": 3.0,
    "groups": 8.0,
    "tokens_per_second": 412.4,
    "seconds": 3.14,
    "minutes": 1.0,
    "learn/loss": -0.00213,
    "learn/kl_rollout": 0.00034,
    "learn/entropy": 1.2,
}


def lines(width: int = 80, *, is_resumed: bool = False) -> tuple[LineProgress, io.StringIO]:
    said = io.StringIO()
    return LineProgress(Console(file=said, width=width), is_resumed=is_resumed), said


def test_a_step_is_read_on_80_columns_and_names_loss_and_kl() -> None:
    progress, said = lines()
    progress.step(12, 2000, METRICS, {"succeeded": 60, "agent_error": 4})
    text = said.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80
    for part in (
        "step   12/2000",
        "loss -0.0021",
        "kl 0.00034",
        "groups without signal 3/8",
        "[60 succeeded, 4 agent_error]",
        "412 tok/s",
    ):
        assert part in text


def test_starting_says_what_is_waited_for_and_counted_phases_are_quiet() -> None:
    progress, said = lines()
    progress.phase("starting the server", 0, 0)
    progress.phase("rollouts", 3, 8)
    assert said.getvalue() == "starting the server …\n"


def test_each_policy_that_is_trained_has_its_loss() -> None:
    progress, said = lines(200)
    own = {"learn/writer/loss": 0.5, "learn/critic/loss": 0.25}
    progress.step(1, 2, {**{key: value for key, value in METRICS.items() if "/" not in key}, **own}, {"succeeded": 1})
    assert "writer loss 0.5  critic loss 0.25" in said.getvalue()


def test_a_validation_shows_what_an_agent_answered() -> None:
    progress, said = lines(40)
    (trajectory,) = make_group((0.0,), rewards=(1.0,)).trajectories
    progress.lightningrl_rollout_finished(trajectory)
    progress.validated(0, {"reward": 0.5}, {"succeeded": 1})
    score, outcomes, sample = said.getvalue().splitlines()
    assert (score, outcomes.strip()) == ("validation after step 0: score 0.500", "[1 succeeded]")
    assert sample.endswith("reward 1.000")
    assert trajectory.task.id in sample


def test_rollouts_that_a_resumed_run_finds_in_its_store_have_no_speed() -> None:
    progress, said = lines(200, is_resumed=True)
    progress.phase("rollouts", 0, 8)
    progress.phase("rollouts", 8, 8)
    progress.step(5, 9, METRICS, {"succeeded": 8})
    progress.phase("rollouts", 0, 8)
    progress.phase("rollouts", 5, 8)
    progress.phase("rollouts", 8, 8)
    progress.step(6, 9, METRICS, {"succeeded": 8})
    replayed, sampled = said.getvalue().splitlines()
    assert "replayed" in replayed
    assert "tok/s" not in replayed
    assert "412 tok/s" in sampled


def test_a_phase_has_a_clock_of_its_own_and_learning_is_not_called_rollouts() -> None:
    said = io.StringIO()
    progress = LiveProgress(Console(file=said, width=100, force_terminal=True))
    progress.phase("rollouts", 0, 8)
    rollouts = progress._bars.tasks[1]
    progress.phase("rollouts", 4, 8)
    assert (progress._bars.tasks[1], rollouts.completed) == (rollouts, 4), "while a phase goes on, so does its clock"
    progress.phase("rollouts", 8, 8)
    learning = progress._bars.tasks[1]
    assert (learning.description, learning.total, learning is rollouts) == ("learning", None, False)
    progress.step(1, 2, METRICS, {"succeeded": 8})
    console = Console(file=said, width=100)
    console.print(progress)
    assert "loss -0.0021" in said.getvalue()
