"""learner.learning_rate = "auto": rates are tried before the first update, and undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightningrl_torch import rates
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.learner import Learner
from lightningrl_torch.settings import Settings
from lightningrl_torch.testing import make_model, make_sample

MakeBackend = Callable[..., TorchBackend]
ROWS = [make_sample([1, 2, 3], [4 + token, 5, 6], 1.0 - token, rollout=str(token)) for token in range(3)]


def make_learner(rate: Any, **settings: Any) -> Learner:
    return Learner(make_model(), Settings(policy="tiny", learning_rate=rate, **settings))


def test_a_step_after_the_probe_is_the_step_that_the_chosen_rate_takes() -> None:
    probed = make_learner("auto")
    report = probed.learn(ROWS)
    assert probed.probe is not None
    said = make_learner(probed.rate)
    said.learn(ROWS)
    for name, parameter in probed.parameters.items():
        assert torch.equal(parameter, said.parameters[name]), "what was tried is undone to the bit"
    assert report.metrics["lr"] == probed.rate
    assert report.notes == (str(probed.probe),)
    assert probed.learn(ROWS).notes == (), "once"


@pytest.mark.parametrize(("usual", "is_moved"), [(1e-1, -1), (1e-3, 0), (1e-7, 1)])
def test_a_rate_that_moves_a_row_too_far_is_lowered_and_one_that_moves_nothing_is_raised(
    usual: float, is_moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightningrl_torch.learner.usual_rate", lambda parameters, **_: usual)
    learner = make_learner("auto")
    learner.learn(ROWS)
    assert (learner.rate > usual) - (learner.rate < usual) == is_moved
    assert learner.probe is not None
    taken = next(one.kl for one in learner.probe.trials if one.rate == learner.rate)
    most = rates.BOUND if is_moved > 0 else rates.MOST_NATS / learner.probe.length
    assert taken <= most
    if is_moved < 0:
        assert max(one.kl for one in learner.probe.trials) > most


def test_a_resumed_run_has_the_rate_that_it_chose(make_backend: MakeBackend, tmp_path: Path) -> None:
    first, again = (make_backend(learning_rate="auto") for _ in range(2))
    first.learn(ROWS)
    first.save(tmp_path / "saved")
    again.load(tmp_path / "saved")
    assert again.learner.rate == first.learner.rate
    assert first.learn(ROWS).metrics["lr"] == again.learn(ROWS).metrics["lr"]


def test_a_rate_of_zero_is_left_alone() -> None:
    learner = make_learner(0.0)
    before = {name: parameter.clone() for name, parameter in learner.parameters.items()}
    assert learner.learn(ROWS).notes == ()
    assert all(torch.equal(before[name], parameter) for name, parameter in learner.parameters.items())
