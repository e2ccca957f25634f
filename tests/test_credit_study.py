"""The study of credit: what its games count out is what happens, and the study itself runs."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sizes import sized

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "credit"))

from agreement import agree, kendall
from branched import measure
from games import GAMES, Game, State
from harness import Player, Study
from learning import GROUP_SIZE
from methods import BROADCAST, METHODS, Method
from report import needs, questions
from starter import build_starter
from study import _parse, _plan, main, read_lines
from tasks import held_out_tasks, states, train_tasks, true_values

from lightningrl import Advantages, CreditAssigner, Plugin, TrajectoryGroup, hookimpl
from lightningrl.plugins import load_plugins
from lightningrl_credit.rewards.tools import ToolStatusReward
from lightningrl_torch.backend import TorchBackend

PLAYS = 1500


@pytest.fixture(scope="module", params=list(GAMES.values()), ids=list(GAMES))
def game(request: pytest.FixtureRequest) -> Game:
    found: Game = request.param
    return found


@pytest.fixture(scope="module")
def backend(game: Game, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchBackend]:
    """A policy that plays badly."""
    folder = tmp_path_factory.mktemp(game.name)
    build_starter(folder, game, skill=0.3, shown=1500, width=32, layers=1)
    backend = TorchBackend(policy=str(folder), threads=1)
    yield backend
    backend.close()


def test_a_value_is_the_mean_of_its_words_and_advantages_sum_to_zero(game: Game, backend: TorchBackend) -> None:
    for task in train_tasks(game.name):
        values = true_values(backend, task)
        for state, v in values.v.items():
            policy = values.policy[state]
            assert sum(policy.values()) == pytest.approx(1.0, abs=1e-12)
            assert v == sum(share * values.q[state][word] for word, share in policy.items())
            assert sum(share * values.advantage(state, word) for word, share in policy.items()) == pytest.approx(
                0.0, abs=1e-12
            )


def test_what_is_counted_out_is_what_the_engine_plays(game: Game, backend: TorchBackend) -> None:
    """From the start, and from a state in the middle: within 3 standard errors of the mean of many continuations."""
    player, task = Player(backend), list(train_tasks(game.name))[4]
    values = true_values(backend, task)
    start = game.start(task.input["case"])
    middle = max(values.v, key=lambda state: values.v[state] * (1 - values.v[state]))
    for state in (start, middle):
        ended = asyncio.run(player.outcomes(task, state, count=PLAYS if state == middle else PLAYS // 2))
        error = math.sqrt(values.v[state] * (1 - values.v[state]) / len(ended))
        assert abs(np.mean(ended) - values.v[state]) <= 3 * error, (state, np.mean(ended), values.v[state])


def test_a_rollouts_calls_are_found_among_the_states(game: Game, backend: TorchBackend) -> None:
    """With the probabilities that the engine sampled them with."""
    task = next(train_tasks(game.name))
    values = true_values(backend, task)
    for trajectory in asyncio.run(Player(backend).sample([task], group_size=8)):
        words = trajectory.output["words"]
        for state, word, call in zip(states(task, trajectory.output), words, trajectory.transitions, strict=True):
            if word is not None:
                assert math.log(values.policy[state][word]) == pytest.approx(call.logprobs[0], abs=1e-4)


def test_held_out_cases_are_no_training_cases(game: Game) -> None:
    train, held_out = ({task.id for task in tasks(game.name)} for tasks in (train_tasks, held_out_tasks))
    assert train and held_out and not train & held_out
    assert len(train | held_out) == len(game.cases())


def test_playing_well_wins_every_case(game: Game) -> None:
    for case in game.cases():
        state: State | None = game.start(case)
        outcome = 0.0
        while state is not None:
            step = game.act(case, state, game.best(case, state))
            state, outcome = step.state, step.outcome
        assert outcome == 1.0, case


def test_agreement_is_1_for_the_truth_whatever_its_scale_and_0_for_one_number_for_all() -> None:
    rng = np.random.default_rng(0)
    true, groups = rng.normal(size=120).tolist(), np.repeat(np.arange(12), 10).tolist()
    right = agree([10 * value for value in true], true, groups)
    assert right.tau == pytest.approx(1.0) and (right.right, right.silent) == (1.0, 0.0)
    assert agree([-value for value in true], true, groups).tau == pytest.approx(-1.0)
    nothing = agree([0.0] * 120, true, groups)
    assert nothing.tau == 0.0 and nothing.silent == 1.0 and math.isnan(nothing.right)
    noise = agree(rng.normal(size=120).tolist(), true, groups)
    assert noise.tau_low < 0.0 < noise.tau_high


def test_agreement_of_pairs_is_kendalls_tau_b_with_ties() -> None:
    """Worked by hand: pairs (1,2) and (1,3) agree, (2,3) is tied in the credit: 2 / √(2 · 3)."""
    assert agree([0.0, 1.0, 1.0], [0.0, 1.0, 2.0], [0, 0, 1]).tau == pytest.approx(2 / math.sqrt(6))
    assert kendall([0.0, 1.0, 1.0], [0.0, 1.0, 2.0]) == pytest.approx(2 / math.sqrt(6))


def test_an_oracle_is_wrong_as_often_as_it_is_told_to(game: Game, backend: TorchBackend) -> None:
    plugins = load_plugins()
    method = Method(name="verdicts", family="turn", use="verdicts", judge_error=0.25)
    plugins.register(Verdicts(), distribution="the test")
    study = Study(backend, method, plugins, group_size=GROUP_SIZE, seed=0)
    scored = asyncio.run(study.credit(list(train_tasks(game.name))[:6]))
    wrong = total = 0
    for group in scored.groups:
        for trajectory in group.trajectories:
            assert trajectory.evidence is not None
            true, said = np.round(study.advantages(trajectory), 9), trajectory.evidence.calls["grade"]
            assert set(said.tolist()) <= {0.0, 0.5, 1.0}
            decided = true != 0.0
            wrong, total = (
                wrong + int((np.sign(true) != np.sign(said - 0.5))[decided].sum()),
                total + int(decided.sum()),
            )
    assert abs(wrong / total - 0.25) < 4 * math.sqrt(0.25 * 0.75 / total)


class Verdicts:
    """A plugin whose assigner pays each call its verdict."""

    @hookimpl
    def lightningrl_credit_assigners(self) -> Iterator[Plugin]:
        yield Plugin(name="verdicts", summary="for the test", factory=Verdict)


class Verdict(CreditAssigner):
    requires = frozenset({"judge"})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        return tuple(
            tuple(one.evidence.calls["grade"][[t]] for t in range(len(one.transitions)))
            for one in group.trajectories
            if one.evidence
        )


def test_branches_come_from_the_state_they_left_and_count_as_rollouts(game: Game, backend: TorchBackend) -> None:
    """With what they sampled themselves, and no more, in the tokens."""
    method = Method(name="all", family="turn", use="branches", options={"samples": 1, "equal": True})
    study = Study(backend, method, load_plugins(), group_size=2, seed=0)
    scored = asyncio.run(study.credit(list(train_tasks(game.name))[:2]))
    branches = [branch for group in scored.groups for branch in group.branches]
    rollouts = [one for group in scored.groups for one in group.trajectories]
    assert branches
    assert study.player.rollouts == len(branches) + len(rollouts)
    calls = [call for one in (*rollouts, *branches) for call in one.transitions]
    assert study.player.calls == sum(call.replayed_from is None for call in calls)
    sources = {one.rollout_id: one for one in rollouts}
    for branch in branches:
        assert branch.branch is not None
        source, point = sources[branch.branch.rollout_id], branch.branch.calls
        assert states(branch.task, branch.output)[: point + 1] == states(source.task, source.output)[: point + 1]
        assert [call.replayed_from for call in branch.transitions[:point]] == [
            call.id for call in source.transitions[:point]
        ]


def test_the_command_makes_the_runs_that_are_published(tmp_path: Path) -> None:
    """It made others: other seeds, and a second learning rate."""
    plan = _plan(_parse(["--runs", str(tmp_path)]), METHODS)
    made = {
        (game, method.name, rate, seed)
        for game in plan.games
        for method in plan.of(game)
        if method.learns
        for rate in plan.rates
        for seed in plan.seeds
    }
    published = json.loads(
        (Path(__file__).resolve().parents[1] / "docs" / "explanation" / "credit" / "study.json").read_text(
            encoding="utf-8"
        )
    )["runs"]
    assert {(run["game"], run["method"], run["rate"], run["seed"]) for run in published if run["rate"]} == made


@pytest.mark.slow
def test_the_quick_study_runs_and_is_not_made_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "docs" / "study.md"
    page.parent.mkdir()
    page.write_text(
        "# Study\n\n<!-- tau: made -->\n<!-- end -->\n\n<!-- learn: made -->\n<!-- end -->\n\n<!-- control: made -->\n<!-- end -->\n"
    )
    command = ["--quick", "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs")]
    main(["all", *command])
    first = capsys.readouterr().out
    assert "sql, grpo, rate 0.002, seed 301:" in first
    text = page.read_text()
    assert "| grpo | " in text and "| branches: 4 | " in text
    numbers = json.loads((page.parent / "study.json").read_text())
    assert {run["seed"] for run in numbers["runs"]} == {300, 301}
    (control,) = (line for line in read_lines(tmp_path / "runs" / "learn.jsonl") if line["rate"] == 0.0)
    assert len({point[2] for point in control["curve"]}) == 1, "with learning rate 0 nothing changes"
    assert (page.parent / "study.png").stat().st_size > 10_000
    main(["all", *command])
    assert "rate 0.002" not in capsys.readouterr().out
    assert page.read_text() == text


def _runs(method: str, *rollouts: int, game: str = "sql", never: int = 0) -> list[dict[str, object]]:
    arrivals = [(count, True) for count in rollouts] + [(4096, False)] * never
    return [
        {
            "game": game,
            "method": method,
            "rate": 2e-3,
            "seed": seed,
            "rollouts": count,
            "reached": reached,
            "tokens": 1,
            "cpu_s": 1.0,
        }
        for seed, (count, reached) in enumerate(arrivals)
    ]


def test_the_table_says_how_many_runs_arrived_and_tests_each_method_against_all_identical_ones() -> None:
    runs = _runs("grpo", 500, 700, 900, never=2) + _runs("rloo", 600, 800, never=3)
    runs += _runs("turn_gae", 100, 200, 300, 400, 450) + _runs("states: GiGPO", 500, 700, 900, never=2)
    found = needs(runs)["sql"]
    assert (found["grpo"].text, found["rloo"].text) == ("900, 3/5", "none, 2/5"), "the median, where half arrived"
    assert found["turn_gae"].p == pytest.approx(2 * 2 / math.comb(15, 5)), "the least of all hands, two methods"
    assert found["turn_gae"].text == "**300, 5/5, 0.001 quicker**"
    assert found["states: GiGPO"].text.startswith("900, 3/5, 0.78")


def test_credit_by_call_is_held_against_the_same_pay_broadcast() -> None:
    runs = _runs("air: tool_status", 100, 200, 300, 400, 500) + _runs(BROADCAST, 600, never=4)
    (asked,) = questions(runs)
    assert (asked.game, asked.median, asked.median_against) == ("sql", 300, math.inf)
    assert asked.p == pytest.approx(2 / math.comb(10, 5))
    assert asked.low <= asked.ratio <= asked.high < 0.2
    assert asked.ratio == pytest.approx(1500 / (600 + 4 * 4096)), "a run that never arrived counts with all it had"


def test_the_pay_that_is_broadcast_is_that_of_the_tools_at_every_call(game: Game, backend: TorchBackend) -> None:
    """Both arms have the same rewards in sum, and the same baselines: where they stand differs, and nothing else."""
    by_call, broadcast = (next(m for m in METHODS if m.name == name) for name in ("air: tool_status", BROADCAST))
    assert (by_call.use, by_call.options) == (broadcast.use, broadcast.options)
    study = Study(backend, broadcast, load_plugins(), group_size=4, seed=0)
    scored = asyncio.run(study.credit(list(train_tasks(game.name))[:4]))
    paid = []
    for group in scored.groups:
        for rollout in group.trajectories:
            paid += [sum(value or 0.0 for value in ToolStatusReward()(rollout))]
            assert sum(call.rewards["tools"] or 0.0 for call in rollout.transitions) == pytest.approx(paid[-1])
            assert not any(call.rewards["tools"] for call in rollout.transitions[:-1])
    assert any(paid)


@pytest.mark.slow
def test_what_branching_measures_is_what_is_counted_out(tmp_path: Path) -> None:
    """The real way, through server and workers; docs/explanation/credit/study.md says how near at full size."""
    build_starter(tmp_path / "policy", GAMES["guess"], skill=0.6, shown=4000, width=32, layers=1)
    found = measure("guess", tmp_path / "policy", tmp_path / "run", samples=sized(8, 64), groups=sized(8, 20))
    assert found.branches > 0 and found.diverged == 0
    assert found.rare + len(found.deviations) >= 4
    assert all(abs(deviation) < 4.5 for deviation in found.deviations), (
        found
    )  # of 4.5 standard errors one state in 100,000
    assert found.rare_within >= found.rare - 2, found
