"""1,000 planted traces over all sources: every grade is right, tokens come back as they were, no secret is left."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from planted_traces import Planted, plant, write_sources

from lightningrl.plugins import load_plugins
from lightningrl.types import Trajectory
from lightningrl_runs.reader import open_run
from lightningrl_traces.importing import import_traces
from lightningrl_traces.run_store import read_calls

COUNT = 1_000


@pytest.fixture(scope="module")
def planted() -> list[Planted]:
    return list(plant(COUNT, seed=3))


@pytest.fixture(scope="module")
def imported(planted: list[Planted], tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    write_sources(source, planted, random.Random(3))
    folder = tmp_path_factory.mktemp("runs") / "imported"
    import_traces(source, folder, None, load_plugins())
    return folder


@pytest.fixture(scope="module")
def trajectories(imported: Path) -> list[Trajectory]:
    async def read() -> list[Trajectory]:
        async with open_run(imported) as run:
            ids = list(dict.fromkeys(str(row["rollout_id"]) for row in read_grades(imported)))
            return list(await run.look.trajectories(ids))

    return asyncio.run(read())


def read_grades(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "grades.jsonl").read_text("utf-8").splitlines()]


def test_no_grade_of_a_thousand_planted_traces_is_wrong(planted: list[Planted], imported: Path) -> None:
    expected = {call: grade for trace in planted for call, grade in trace.expected.items()}
    graded = {str(row["call_id"]): row for row in read_grades(imported)}
    assert graded.keys() == expected.keys(), "each call is there once"
    wrong = [
        (call, grade, graded[call])
        for call, (grade, reasons) in expected.items()
        if graded[call]["grade"] != grade or not reasons <= set(graded[call]["reasons"])  # type: ignore[call-overload]
    ]
    assert wrong == []
    assert set(Counter(grade for grade, _ in expected.values())) == {"rl-safe", "sft-safe", "judge-only", "unusable"}


def test_tokens_of_rl_safe_calls_come_back_as_they_were(planted: list[Planted], trajectories: list[Trajectory]) -> None:
    expected = {call: tokens for trace in planted for call, tokens in trace.tokens.items()}
    stored = {call.id: call for trajectory in trajectories for call in trajectory.transitions}
    assert stored.keys() == expected.keys(), "calls without tokens are no transitions"
    for name, call in stored.items():
        tokens = expected[name]
        assert call.prompt_ids.tolist() == tokens["prompt_ids"]
        assert call.completion_ids.tolist() == tokens["completion_ids"]
        assert np.array_equal(call.logprobs, np.asarray(tokens["logprobs"], np.float32))
        assert (call.sampling.temperature, call.policy_version) == (tokens["temperature"], tokens["version"])
        assert (call.policy, call.trainable) == ("foreign", False)


def test_no_planted_secret_is_left_in_the_run(planted: list[Planted], trajectories: list[Trajectory]) -> None:
    secrets = [secret for trace in planted for secret in trace.secrets]
    text = "\n".join(
        json.dumps([trajectory.task.input, trajectory.output, [other.request for other in trajectory.other_calls]])
        for trajectory in trajectories
    )
    assert len(secrets) > 40
    assert [secret for secret in secrets if json.dumps(secret)[1:-1] in text] == []


def test_calls_of_one_conversation_are_one_rollout_with_roles_tools_and_messages(
    trajectories: list[Trajectory],
) -> None:
    by_size = Counter(len(list(read_calls(trajectory))) for trajectory in trajectories)
    assert set(by_size) == {1, 2}
    agents = Counter(call.agent for trajectory in trajectories for call in read_calls(trajectory))
    assert agents["finder"] > 100
    for trajectory in trajectories:
        calls = list(read_calls(trajectory))
        if len(calls) == 2 and all(call.answer for call in calls) and calls[0].answer is not None:
            asked = [tool["id"] for tool in calls[0].answer.get("tool_calls") or ()]
            assert [tool.id for tool in trajectory.tool_calls] == asked
            if len(calls[1].messages) > 2:
                assert calls[1].messages[-1]["content"] == trajectory.tool_calls[0].result
