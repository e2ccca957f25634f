"""The experiment with a pretrained policy: arms that are compared know the same, and the agent goes on after an error."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "credit"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "credit" / "desk"))

from desk_rewards import ToolOk, TurnRight, all_right, share, valid
from desk_tasks import train, validation
from pretrained import ARMS, PAIRS, STAGES, Run, Validation, compare, read_kept, report

from lightningrl.plugins import load_plugins
from lightningrl.types import Task, Trajectory
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.whole_path import whole_path
from lightningrl_training.build import build_credit
from lightningrl_training.start import read_source

DESK = Path(__file__).resolve().parents[1] / "benchmarks" / "credit" / "desk"
ANSWER = "43,112,61,30,77,31"
OUTPUTS = (ANSWER, "43,x,61,x,77,31", "x,x,x,x,x,x", "43,112,0,0,0,0")


def rollout(output: str | None, name: str = "r") -> Trajectory:
    calls = [make_transition(f"{name}/{t}", index=t, parent=f"{name}/{t - 1}" if t else None) for t in range(6)]
    return make_trajectory(name, calls, output=output, answer=ANSWER, reward=None)


def credit(arm: str, outputs: tuple[str, ...] = OUTPUTS) -> np.ndarray[Any, Any]:
    """Advantage of each call of a group, `[rollout][call]`, by the arm's own recipe."""
    settings = next(one for one in ARMS if one.name == arm).settings
    recipe, wrong = read_source(DESK, settings)
    assert not wrong
    evaluator, scorer = build_credit(recipe, load_plugins())
    rollouts = [rollout(output, f"r{number}") for number, output in enumerate(outputs)]
    (group,) = scorer.credit(asyncio.run(evaluator.evaluate(rollouts)))
    return np.array([[float(tokens[0]) for tokens in calls if tokens is not None] for calls in group.advantages])


@pytest.mark.parametrize("output", [*OUTPUTS, "43,112", None])
def test_rewards_by_call_sum_to_the_rewards_that_are_broadcast(output: str | None) -> None:
    one = rollout(output)
    assert sum(value or 0.0 for value in TurnRight()(one)) == pytest.approx(share(one.task, output, one))
    if len(str(output).split(",")) == 6:
        assert sum(value or 0.0 for value in ToolOk()(one)) == pytest.approx(1.2 * valid(one.task, output, one) - 0.6)


def test_a_first_call_is_credited_alike_where_all_that_comes_of_it_is_its_own() -> None:
    """Broadcast and to go differ from the second call on: what is compared is the credit, not what is known."""
    for by_call, broadcast in (("T1", "D"), ("A", "B")):
        assert credit(by_call)[:, 0] == pytest.approx(credit(broadcast)[:, 0])
        assert credit(by_call)[:, 5] != pytest.approx(credit(broadcast)[:, 5])


def test_a_call_of_its_own_is_paid_what_it_earned() -> None:
    """The second call: right in two of four, 1/6 each, and one rollout of four is all right."""
    of_all = np.array([0.75, -0.25, -0.25, -0.25])
    assert credit("T0")[:, 1] == pytest.approx(of_all + (np.array([1.0, 0.0, 0.0, 1.0]) - 0.5) / 6)


def test_air_keeps_its_size_beside_the_outcome() -> None:
    assert credit("A", ("x,x,x,x,x,x", "0,0,0,0,0,0"))[:, 5] == pytest.approx([-0.1, 0.1])


def test_a_sparse_outcome_says_nothing_where_nobody_is_all_right() -> None:
    assert not credit("S", OUTPUTS[1:]).any()


def test_no_held_out_conversation_is_trained_and_each_has_a_right_answer() -> None:
    taught, held_out = ({task["id"] for task in tasks()} for tasks in (train, validation))
    assert (len(taught), len(held_out)) == (400, 32) and not taught & held_out
    for task in validation():
        one = rollout(task["answer"])
        assert all_right(Task(id="t", input="", answer=task["answer"]), task["answer"], one) == 1.0


async def test_the_agent_goes_on_after_an_error_and_counts_it(tmp_path: Path) -> None:
    async with whole_path(tmp_path, "desk.py:answer", base_dir=DESK) as path:
        for text in ('{"calculate": "31 + 12"}', "31 + 12", '{"calculate": "14 * 8"}'):
            path.engine.enqueue(text)
        (one,) = await path.run({"r": "What?|How?|Why?"})
    assert one.output == "43,x,112"
    assert len(one.transitions) == 3


def made(arm: str, seed: int, share: float) -> Run:
    def at(step: int, share: float) -> Validation:
        of_tasks = (share, share / 2)
        return Validation(step=step, rollouts=24 * step, share=of_tasks, all=(0.0, 0.0), valid=of_tasks)

    return Run(arm=arm, seed=seed, validations=(at(0, 0.2), at(5, share), at(10, share)), trained=(0.2,), minutes=1.0)


def test_pairs_are_compared_that_have_all_seeds_and_the_report_is_written(tmp_path: Path) -> None:
    runs = [made(arm, seed, 1.0 if arm == "T0" else 0.4) for arm in ("D", "T0") for seed in (0, 1, 2)]
    assert compare(runs[:-1], "share") == []
    (pair,) = compare([*runs, made("T1", 2, 0.1)], "share")
    assert (pair.first, pair.second, pair.seeds) == ("T0", "D", (0, 1, 2))
    assert pair.by_seed.mean == pytest.approx(0.45)
    report([replace(one, minutes=2.0) for one in runs], tmp_path)
    assert "T0 - D | 0.450" in (tmp_path / "pretrained.md").read_text(encoding="utf-8")
    numbers = json.loads((tmp_path / "pretrained.json").read_text(encoding="utf-8"))
    assert {run["rollouts_to_target"] for run in numbers["runs"]} == {120, None}
    assert (tmp_path / "pretrained.svg").read_text(encoding="utf-8").startswith("<?xml")
    kept = read_kept(tmp_path / "pretrained.json")
    assert kept == {(one.arm, one.seed): replace(one, minutes=2.0) for one in runs}, "another machine goes on from it"
    assert read_kept(tmp_path / "none.json") == {}


def test_each_arm_is_run_once_and_each_planned_pair_is_of_arms_that_are_there() -> None:
    arms = [arm.name for arm in ARMS]
    assert sorted(name for stage in STAGES for name in stage) == sorted(arms)
    assert {name for pair in PAIRS for name in pair} <= set(arms)
