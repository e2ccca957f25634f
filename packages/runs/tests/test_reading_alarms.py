"""What a run's page says to look at: each thing that can be wrong is told by what causes it, and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightningrl.types import ToolStatus
from lightningrl_runs.alarms import Alarm, find_alarms
from lightningrl_runs.queries.rollout_counts import ToolCount
from lightningrl_training.run import Run
from lightningrl_viewer.templates import nats

WELL: Mapping[str, Any] = {
    "groups": 8.0,
    "groups_without_signal": 2.0,
    "rollouts": 64.0,
    "calls_per_rollout": 2.0,
    "breaks": 0.0,
    "calls_refused": 0.0,
    "rewards_failed": 0.0,
    "learn/staleness_max": 1.0,
    "learn/kl_rollout": 1e-4,
    "learn/entropy": 1.0,
}
"""A step of a run that is well."""
ENDINGS = {"succeeded": 62, "timeout": 2}
TOOLS = (
    ToolCount(name="search", status=ToolStatus.OK, count=97),
    ToolCount(name="search", status=ToolStatus.ERROR, count=3),
)


def alarms(
    changes: Mapping[str, float],
    *,
    endings: Mapping[str, int] = ENDINGS,
    tools: tuple[ToolCount, ...] = TOOLS,
    cut: int = 0,
) -> dict[str, Alarm]:
    """Of twelve steps, the last five of which have the changes."""
    rows = [{**WELL, "step": step, **(changes if step > 7 else {})} for step in range(1, 13)]
    found = find_alarms(rows, {row["step"]: endings for row in rows}, tools, {row["step"]: cut for row in rows})
    return {alarm.name: alarm for alarm in found}


def test_of_a_run_that_is_well_everything_is_looked_at_and_fine() -> None:
    found = alarms({})
    assert {alarm.level for alarm in found.values()} == {"fine"}
    assert set(found) == {
        *(
            "Groups without signal",
            "Completions cut short",
            "Breaks",
            "Calls refused",
            "Rollouts that failed",
            "Tool errors",
        ),
        *("Rewards that failed", "Staleness", "Probability gap", "Entropy left"),
    }


@pytest.mark.parametrize(
    ("name", "level", "cause"),
    [
        ("Groups without signal", "warn", {"changes": {"groups_without_signal": 5.0}}),
        ("Groups without signal", "bad", {"changes": {"groups_without_signal": 8.0}}),
        ("Completions cut short", "bad", {"cut": 64}),
        ("Breaks", "warn", {"changes": {"breaks": 4.0}}),
        ("Calls refused", "bad", {"changes": {"calls_refused": 13.0}}),
        ("Rollouts that failed", "bad", {"endings": {"succeeded": 30, "agent_error": 34}}),
        ("Tool errors", "bad", {"tools": (ToolCount(name="search", status=ToolStatus.TIMEOUT, count=9),)}),
        ("Rewards that failed", "bad", {"changes": {"rewards_failed": 20.0}}),
        ("Staleness", "warn", {"changes": {"learn/staleness_max": 5.0}}),
        ("Probability gap", "bad", {"changes": {"learn/kl_rollout": 0.2}}),
        ("Probability gap", "bad", {"changes": {"learn/critic/kl_rollout": 0.2}}),
        ("Entropy left", "warn", {"changes": {"learn/entropy": 0.05}}),
    ],
)
def test_each_cause_raises_its_own_alarm_first_and_no_other(name: str, level: str, cause: dict[str, Any]) -> None:
    found = alarms(**{"changes": {}, **cause})
    assert next(iter(found.values())).name == name, "the worst comes first"
    assert {alarm.name: alarm.level for alarm in found.values() if alarm.level != "fine"} == {name: level}


def test_a_gap_that_is_rounding_is_written_as_none() -> None:
    gap = alarms({"learn/kl_rollout": 8.1e-11})["Probability gap"]
    assert (gap.unit, nats(gap.value), nats(0.2)) == ("nats", "0", "0.2")


def test_an_alarm_leads_to_what_shows_it() -> None:
    found = alarms({}, endings={"succeeded": 30, "agent_error": 34})
    assert found["Rollouts that failed"].where == {"from": "8", "to": "12", "mode": "train", "outcome": "agent_error"}
    means = found["Rollouts that failed"].means
    assert (
        means
        == "What the policy breaks earns the lowest reward, what the world breaks is run again; most: agent error."
    )


def test_what_alarms_read_is_what_a_run_writes(recorded_run: Path) -> None:
    written = {key for row in Run(recorded_run).metrics for key in row}
    assert set(WELL) <= written


def test_before_the_first_step_there_is_nothing_to_say() -> None:
    assert find_alarms([], {}, TOOLS, {}) == ()
