"""The reward `check`: what a coding harness's check says of its work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightningrl.errors import ConfigError
from lightningrl.types import Trajectory
from lightningrl_credit.rewards.recorded import Check
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.reward_conformance import RewardConformance


def rollout(output: Any) -> Trajectory:
    return make_trajectory("r", [make_transition("r/0")], output=output)


def checked(status: int | None, passed: int | None = None, failed: int | None = None) -> Any:
    return {"text": "", "diff": "", "check": {"status": status, "passed": passed, "failed": failed, "said": ""}}


class TestCheck(RewardConformance):
    def make_reward(self) -> Check:
        return Check()

    def trajectories(self) -> Sequence[Trajectory]:
        return [rollout(checked(0)), rollout(checked(1, 3, 1))]


@pytest.mark.parametrize(
    ("output", "share", "status"),
    [
        (checked(0), 1.0, 1.0),
        (checked(0, 3, 0), 1.0, 1.0),
        (checked(1, 3, 1), 0.75, 0.0),
        (checked(1, 0, 4), 0.0, 0.0),
        (checked(1), 0.0, 0.0),
        (checked(1, 4, 0), 0.0, 0.0),
        (checked(None, 4, 1), 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
def test_the_exit_status_is_the_reward_or_the_share_of_tests_that_passed(
    output: Any, share: float, status: float
) -> None:
    trajectory = rollout(output)
    assert Check()(trajectory.task, output, trajectory) == share
    assert Check(score="status")(trajectory.task, output, trajectory) == status


def test_an_output_without_a_check_is_a_defect_of_the_recipe() -> None:
    trajectory = rollout({"text": "", "diff": "", "check": None})
    with pytest.raises(ConfigError, match="the output has no check; it is a coding harness's"):
        Check()(trajectory.task, trajectory.output, trajectory)
    with pytest.raises(ConfigError, match="score 'part' is none of 'share', 'status'"):
        Check(score="part")  # type: ignore[arg-type]
