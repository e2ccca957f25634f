"""A taskset of the real verifiers, in an environment of its own (`make test-openenv`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import ConfigError
from lightningrl.types import Outcome, Task, Trajectory
from lightningrl_tasks_verifiers import BridgeFailure, VerifiersTasks

HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv-verifiers" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make test-openenv")
SPLITS = {"train": {"take": 250}, "validation": {"skip": 250}}


def make_source(**options: Any) -> VerifiersTasks:
    return VerifiersTasks(
        **{"python": str(PYTHON), "taskset": "vf_sums", "folder": str(HERE), "splits": SPLITS, **options}
    )


@pytest.fixture(scope="module")
def source() -> Iterator[VerifiersTasks]:
    source = make_source()
    yield source
    source.close()


async def score(source: VerifiersTasks, task: Task, output: Any) -> float | None:
    trajectory = Trajectory(
        rollout_id="r", attempt=1, task=task, group_id="g", outcome=Outcome.SUCCEEDED, transitions=(), output=output
    )
    return await source.reward(task, output, trajectory)


async def test_two_hundred_tasks_twice_are_the_same_gold_earns_the_most_and_nothing_the_least(
    source: VerifiersTasks,
) -> None:
    tasks, again = ([*source.tasks("train", seed=1, count=200)] for _ in range(2))
    assert tasks == again
    assert {task.input for task in tasks}.isdisjoint(
        task.input for task in source.tasks("validation", seed=1, count=50)
    )
    for _ in range(2):
        assert {await score(source, task, source.gold(task)) for task in tasks} == {1.0}
        assert {await score(source, task, "") for task in tasks} == {0.0}


async def test_a_dialogue_is_scored_as_a_trace_with_its_tool_calls(source: VerifiersTasks) -> None:
    (task,) = source.tasks("train", seed=3, count=1)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    dialogue = [
        {"role": "user", "content": task.input},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "?"},
        {"role": "assistant", "content": f"It is {task.answer}"},
    ]
    assert await score(source, task, {"messages": dialogue}) == 1.0
    assert await score(source, task, {"messages": dialogue[:3]}) == 0.0
    assert await score(source, task, {"other": 1}) is None


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [("raise", "gold"), ("nan", "each has to be a finite number"), ("kill", "its process ended 2 times under 'score'")],
)
async def test_a_score_that_fails_is_an_error_and_no_number(source: VerifiersTasks, reply: str, sentence: str) -> None:
    (task,) = source.tasks("train", seed=3, count=1)
    with pytest.raises(BridgeFailure, match=sentence):
        await score(source, task, reply)
    assert await score(source, task, str(task.answer)) == 1.0


async def test_a_taskset_in_no_fixed_order_is_refused_once_its_process_is_another() -> None:
    source = make_source(config={"kind": "unsteady"})
    (task,) = source.tasks("train", seed=3, count=1)
    source.close()
    with pytest.raises(
        BridgeFailure, match=r"is another one than before; the taskset loads its tasks in no fixed order"
    ):
        await score(source, task, "1")
    source.close()


async def test_a_taskset_without_end_goes_on_and_one_with_a_runtime_or_container_is_refused() -> None:
    endless = make_source(config={"kind": "infinite"}, splits={"train": {}, "validation": {"config": {"seed": 5}}})
    some, stream = list(endless.tasks("train", seed=0, count=700)), endless.tasks("train", seed=0, count=None)
    assert some == list(itertools.islice(stream, 700))
    assert len({task.input for task in some}) > 690
    endless.close()
    sandboxed = make_source(config={"kind": "sandboxed"})
    (task,) = sandboxed.tasks("train", seed=0, count=1)
    with pytest.raises(BridgeFailure, match="the rewards tests need the runtime of a harness"):
        await score(sandboxed, task, "1")
    sandboxed.close()
    contained = make_source(config={"kind": "contained"})
    with pytest.raises(ConfigError, match="need a container"):
        list(contained.tasks("train", seed=0, count=1))
    contained.close()


def test_a_system_prompt_makes_the_input_a_list_of_messages() -> None:
    source = make_source(config={"kind": "system"})
    (task,) = source.tasks("train", seed=0, count=1)
    assert [message["role"] for message in task.input] == ["system", "user"]
    source.close()
