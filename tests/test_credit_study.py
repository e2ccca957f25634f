"""The study of credit: what its games count out is what happens, and the study itself runs."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks" / "credit"))

from games import GAMES, Game
from harness import Player
from starter import build_starter
from tasks import held_out_tasks, states, train_tasks, true_values

from lightningrl_torch.backend import TorchBackend

PLAYS = 1500


@pytest.fixture(scope="module", params=GAMES.values(), ids=GAMES)
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
            assert sum(share * values.advantage(state, word) for word, share in policy.items()) == pytest.approx(0.0, abs=1e-12)


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
        state, outcome = game.start(case), 0.0
        while state is not None:
            step = game.act(case, state, game.best(case, state))
            state, outcome = step.state, step.outcome
        assert outcome == 1.0, case
