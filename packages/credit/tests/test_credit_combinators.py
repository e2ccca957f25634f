"""Assigners made of assigners, in Python and from a recipe: needs, evidence, metrics and memory pass through."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightningrl.errors import ConfigError
from lightningrl.loading import load_callable
from lightningrl.plugins import load_plugins
from lightningrl.protocols import CreditAssigner
from lightningrl.recipe import Recipe
from lightningrl.types import Advantages, Evidence, Trajectory, TrajectoryGroup
from lightningrl_credit import Clip, IdenticalAssignment, Part, StateGroups, Sum, TurnReturns, assign_credit
from lightningrl_credit.evidence import check_evidence
from lightningrl_credit.scoring import Scorer
from lightningrl_testing.groups import make_group
from lightningrl_testing.scripted_services import ScriptedServices
from lightningrl_training.build import build_credit
from lightningrl_training.evaluator import Evaluator


def firsts(advantages: Advantages) -> list[list[float | None]]:
    """Each call's advantage (its first token's)."""
    return [[None if tokens is None else float(tokens[0]) for tokens in credit] for credit in advantages]


def all_of(advantages: Advantages) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.concatenate([tokens for credit in advantages for tokens in credit if tokens is not None])


def turned_group() -> TrajectoryGroup:
    return make_group((0.1, None, -0.2), (0.0, 0.3), (0.5,), rewards=(0.0, 1.0, 0.25))


class Grades(CreditAssigner):
    """A = a number that it asks for in `score`, that it remembers the sum of, and that it reports."""

    requires = frozenset({"judge"})

    def __init__(self, grade: float) -> None:
        self.grade, self.steps = grade, 0

    async def score(self, trajectory: Trajectory, ask: Any) -> Evidence:
        return Evidence(calls={"grade": np.full(len(trajectory.transitions), self.grade, np.float32)})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        def credit(one: Trajectory) -> tuple[np.ndarray[Any, Any], ...]:
            assert one.evidence is not None
            grades = one.evidence.calls["grade"]
            return tuple(np.full(len(call.completion_ids), grades[t]) for t, call in enumerate(one.transitions))

        return tuple(map(credit, group.trajectories))

    def finish_step(self, groups: Sequence[TrajectoryGroup], advantages: Sequence[Advantages]) -> dict[str, float]:
        self.steps += 1
        return {"graded": float(np.mean([all_of(found).mean() for found in advantages]))}

    def state(self) -> int:
        return self.steps

    def load(self, state: int) -> None:
        self.steps = state


class FirstCallOnly(CreditAssigner):
    """Scores the first call alone."""

    requires: frozenset[str] = frozenset()

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return tuple(
            tuple(
                np.full(len(call.completion_ids), 1.0, np.float32) if t == 0 else None
                for t, call in enumerate(one.transitions)
            )
            for one in group.trajectories
        )


# ------------------------------------------------------------------ what they compute


def test_a_sum_adds_weighted_credit() -> None:
    group = turned_group()
    found = Sum((IdenticalAssignment(), 2.0), (TurnReturns(gamma=0.9), -0.5)).assign(group)
    expected = 2.0 * all_of(IdenticalAssignment().assign(group)) - 0.5 * all_of(TurnReturns(gamma=0.9).assign(group))
    np.testing.assert_allclose(all_of(found), expected, rtol=1e-6)


def test_what_one_part_scored_is_scored_and_what_none_did_is_none() -> None:
    group = make_group((0.0, 0.0), (1.0,))
    mixed = firsts(Sum((FirstCallOnly(), 1.0), (IdenticalAssignment(baseline="dr_grpo"), 1.0)).assign(group))
    assert mixed == [[0.5, -0.5], [1.5]]
    assert firsts(Sum((FirstCallOnly(), 1.0), (FirstCallOnly(), 1.0)).assign(group)) == [[2.0, None], [2.0]]


def test_clipping_cuts_both_ends_and_nothing_between() -> None:
    group = make_group((0.0,), (0.4,), (9.0,))
    assert firsts(Clip(IdenticalAssignment(baseline="none"), at=0.5).assign(group)) == [
        [0.0],
        [pytest.approx(0.4)],
        [0.5],
    ]
    assert firsts(Clip(IdenticalAssignment(baseline="dr_grpo"), at=2.0).assign(make_group((-9.0,), (9.0,)))) == [
        [-2.0],
        [2.0],
    ]
    assert firsts(Clip(FirstCallOnly(), at=0.5).assign(make_group((0.0, 0.0)))) == [[0.5, None]]


def test_whitening_makes_parts_of_one_size() -> None:
    found = all_of(Sum(Part(TurnReturns(baseline="none"), whiten=True)).assign(turned_group()))
    assert found.mean() == pytest.approx(0.0, abs=1e-6)
    assert found.std() == pytest.approx(1.0, abs=1e-5)
    assert set(all_of(Sum(Part(IdenticalAssignment(), whiten=True)).assign(make_group((1.0,), (1.0, 1.0))))) == {0.0}


def test_each_role_by_itself_is_what_compare_role_does_also_within_a_sum() -> None:
    group = turned_group()
    for assigner in (IdenticalAssignment(), TurnReturns(gamma=0.9), StateGroups(key="observation")):
        by_role = assign_credit(assigner, group, compare="role")
        assert firsts(Sum(Part(assigner, compare="role")).assign(group)) == firsts(by_role)
        halves = Sum((assigner, 0.5), Part(assigner, 0.5, compare="role"))
        np.testing.assert_allclose(all_of(assign_credit(halves, group, compare="role")), all_of(by_role), rtol=1e-6)
    assert firsts(Sum(Part(IdenticalAssignment(), compare="role")).assign(group)) != firsts(
        IdenticalAssignment().assign(group)
    )


# ------------------------------------------------------------------ what passes through


def test_a_whole_asks_reports_and_remembers_only_where_a_part_does() -> None:
    silent, loud = (
        Sum((IdenticalAssignment(), 1.0)),
        Clip(Sum((IdenticalAssignment(), 1.0), (Grades(1.0), 1.0)), at=9.0),
    )
    for method in ("score", "finish_step", "state"):
        assert not silent.has(method)
        assert loud.has(method)
    assert Clip(StateGroups(), at=1.0).has("finish_step")
    assert loud.requires == {"group", "judge"}
    assert Sum(Part(TurnReturns(), compare="role")).requires == {"group", "turn_rewards", "agents"}


async def test_each_part_finds_the_evidence_that_it_asked_for() -> None:
    whole = Sum(
        (Grades(1.0), 1.0), (IdenticalAssignment(baseline="none"), 0.0), (Clip(Sum((Grades(10.0), 1.0)), at=99.0), 1.0)
    )
    group = make_group((0.0, 0.0), (1.0,))
    heard = []
    for trajectory in group.trajectories:
        evidence = await whole.score(trajectory, ScriptedServices())
        check_evidence(evidence, trajectory)
        heard.append(replace(trajectory, evidence=evidence))
    group = replace(group, trajectories=tuple(heard))
    advantages = whole.assign(group)
    assert firsts(advantages) == [[11.0, 11.0], [11.0]]
    assert whole.finish_step([group], [advantages]) == {"graded": 1.0, "graded_2": 10.0}
    state = json.loads(json.dumps(whole.state()))
    again = Sum(
        (Grades(1.0), 1.0), (IdenticalAssignment(baseline="none"), 0.0), (Clip(Sum((Grades(10.0), 1.0)), at=99.0), 1.0)
    )
    again.load(state)
    assert again.state() == state == [1, None, [[1]]]


# ------------------------------------------------------------------ from a recipe

FILES = """
from lightningrl_credit import IdenticalAssignment

def tasks(): return [{"id": "t", "input": 1}]
def answer(number): return number
def right(task, output, trajectory): return output
def board(trajectory): return [0 for call in trajectory.transitions]

class Mine(IdenticalAssignment):
    def __init__(self, scale: float = 1.0):
        super().__init__(baseline="dr_grpo")
        self.scale = scale
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mixed_credit.py").write_text(FILES)
    return tmp_path


def recipe_of(folder: Path, use: str, options: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(
        {
            "agent": "mixed_credit.py:answer",
            "tasks": {"train": "mixed_credit.py:tasks"},
            "policy": {"model": "org/model"},
            "rewards": {"right": {"use": "mixed_credit.py:right"}},
            "intermediate_rewards": {"tools": {"use": "tool_status"}},
            "credit": {"use": use, "options": options},
            "folder": folder,
        }
    )


def built(folder: Path, use: str, options: dict[str, Any]) -> tuple[Evaluator, Scorer]:
    return build_credit(recipe_of(folder, use, options), load_plugins())


def credit_of(folder: Path, use: str, options: dict[str, Any]) -> CreditAssigner:
    return built(folder, use, options)[1]._credit


def test_a_recipe_names_parts_as_it_names_an_assigner(folder: Path) -> None:
    made = credit_of(
        folder,
        "sum",
        {
            "parts": [
                {
                    "use": "clip",
                    "options": {
                        "of": {"use": "states", "options": {"key": "mixed_credit.py:board", "omega": 0.5}},
                        "at": 5.0,
                    },
                },
                {"use": "turns", "options": {"gamma": 0.9}, "weight": 0.25},
                {"use": "mixed_credit.py:Mine", "options": {"scale": 3.0}},
            ]
        },
    )
    assert isinstance(made, Sum)
    clipped, turns, mine = made.parts
    assert isinstance(clipped, Clip)
    assert isinstance(clipped.parts[0], StateGroups)
    assert isinstance(turns, TurnReturns)
    assert (clipped.at, clipped.parts[0].omega, turns.gamma) == (5.0, 0.5, 0.9)
    assert made.weights == (1.0, 0.25, 1.0)
    assert mine.scale == 3.0  # type: ignore[attr-defined]
    assert made.requires == {"group", "turn_rewards", "state_key"}
    assert made.assign(make_group((0.0,), (1.0,)))[0][0] is not None


@pytest.mark.parametrize(
    ("use", "options", "says"),
    [
        ("sum", {}, "'sum' needs the setting 'parts'"),
        ("sum", {"parts": []}, "has no parts; set options.parts"),
        ("sum", {"parts": [{"use": "grop"}]}, "no credit assigner named 'grop'.*did you mean 'grpo'"),
        (
            "sum",
            {"parts": [{"use": "turns", "options": {"gama": 1}}]},
            "'turns' has no setting 'gama'; did you mean 'gamma'",
        ),
        (
            "sum",
            {"parts": [{"gamma": 1}]},
            r"'sum' is made of others, each as \{ use = …, options = … \}; one is \{'gamma': 1\}",
        ),
        (
            "sum",
            {"parts": [{"use": "grpo", "weight": "much"}]},
            "weight of a credit assigner's part is 'much'; give a number",
        ),
        ("clip", {"of": {"use": "grpo"}}, "'clip' needs the setting 'at'"),
        ("clip", {"of": {"use": "grpo"}, "at": 0}, "clipped at 0, which is not above 0"),
        ("clip", {"of": {"use": "grpo"}, "at": 1, "build": 1}, "'clip' has no setting 'build'"),
        (
            "sum",
            {"parts": [{"use": "grpo", "compare": "role", "counted": "steps"}]},
            "counts 'rollouts' or 'calls'; counted is 'steps'",
        ),
        (
            "sum",
            {"parts": [{"use": "states", "compare": "role", "counted": "calls"}]},
            "cannot count calls for 'StateGroups'",
        ),
        ("sum", {"parts": [{"use": "grpo", "compare": "role"}]}, "credit assigner 'sum' needs 'agents'"),
        (
            "sum",
            {"parts": [{"use": "grpo", "compare": "agent"}]},
            "within the 'group' or each 'role'; compare is 'agent'",
        ),
        ("sum", {"parts": [{"use": "grpo", "counted": "calls"}]}, "set compare = 'role' beside it, or leave it out"),
        ("sum", {"parts": [{"use": "grpo", "whiten": "yes"}]}, "whiten is 'yes', set it to true or false"),
        ("gae", {}, "no credit assigner named 'gae'; installed: branches, clip, .*turn_gae"),
        ("states", {"key": "mixed_credit.py:nothing"}, "has no 'nothing'"),
        ("states", {"key": "tools"}, "no state key named 'tools'"),
        ("states", {"folder": "x"}, "'states' has no setting 'folder'"),
        ("turns", {"compared": "some"}, "compared is 'some'"),
        ("turns", {"outcome_gamma": 2}, "outcome_gamma 2 is not between 0 and 1"),
    ],
)
def test_what_cannot_be_built_is_one_sentence(folder: Path, use: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says) as refused:
        credit_of(folder, use, options)
    assert "\n" not in str(refused.value)


def test_objects_within_the_options_of_a_python_recipe_are_in_its_frozen_copy_by_their_files(folder: Path) -> None:
    board, mine = (load_callable(f"mixed_credit.py:{name}", folder) for name in ("board", "Mine"))
    recipe = recipe_of(folder, "sum", {"parts": [{"use": "states", "options": {"key": board}}, {"use": mine}]})
    made = build_credit(recipe, load_plugins())[1]._credit
    assert isinstance(made, Sum)
    frozen = Recipe.model_validate_json(recipe.frozen_text()).model_copy(update={"folder": folder})
    again = build_credit(frozen, load_plugins())[1]._credit
    assert isinstance(again, Sum)
    assert [type(part) for part in again.parts] == [type(part) for part in made.parts] == [StateGroups, mine]
    assert again.parts[0].key is board  # type: ignore[attr-defined]


def test_evidence_is_asked_for_again_where_a_part_or_its_file_has_changed(folder: Path) -> None:
    def digest(scale: float) -> str:
        part = {"use": "mixed_credit.py:Mine", "options": {"scale": scale}}
        return built(folder, "sum", {"parts": ["grpo", {"use": "clip", "options": {"of": part, "at": 1.0}}]})[
            0
        ].digests["credit"]

    before = digest(1.0)
    assert digest(1.0) == before
    assert digest(2.0) != before
    (folder / "mixed_credit.py").write_text(FILES + "# another\n")
    assert digest(1.0) != before


def test_maxrl_refuses_a_return_below_zero_in_one_sentence() -> None:
    with pytest.raises(
        ConfigError, match="'maxrl' divides by the mean return, and one is -1; reward with 0 or more, or take 'grpo'"
    ):
        IdenticalAssignment(baseline="maxrl").assign(make_group((-1.0,), (1.0,)))
