"""Rollouts in the field's formats and back: a branched run of two roles, and a rollout of two policies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import make_recipe, record_run

from lightningrl.errors import ConfigError
from lightningrl.records import Score
from lightningrl.types import (
    BranchPoint,
    FinishReason,
    Outcome,
    RolloutMode,
    RolloutSpec,
    SamplingSettings,
    Task,
    ToolCall,
    ToolStatus,
    Trajectory,
    Transition,
)
from lightningrl_credit.trained_calls import trained_calls_of
from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.reader import open_run
from lightningrl_runs.rollout_files import FORMATS, StoredRollout, export_command, list_stored, read_rollouts
from lightningrl_server.records import CallRecord, ToolCallRecord
from lightningrl_server.store import SqlStore

OFFERED = '{"look_up": {"type": "object"}, "bell": null}'


def call(number: int, policy: str, **changes: Any) -> Transition:
    made = Transition(
        id=f"two/1/{number}",
        index=number,
        policy=policy,
        policy_version=3,
        prompt_ids=np.array([7, 8, 9 + number], np.int32),
        completion_ids=np.array([11, 12, 2**31 - 1], np.int32),
        logprobs=np.array([-0.1, -1e-7, -30.123457], np.float32),
        finish_reason=FinishReason.LENGTH,
        started_at=1.7e9 + number / 7,
        duration_s=0.1,
    )
    return replace(made, **changes)


async def add_two_policies(folder: Path) -> None:
    """A rollout whose first call a trained policy made, the second another one; a tool; a role; a forced token."""
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    try:
        task = Task(id="odd", input={"question": "Wie heißt ‘it’?\u2028"}, answer=[1, None], metadata={"level": 2.5})
        silent = RolloutSpec(id="silent", task=task, group_id="g-silent")
        await store.create_rollouts([RolloutSpec(id="two", task=task, group_id="g-two", step=1), silent])
        assert (await store.lease("hand", 3600.0)) is not None
        sampling = SamplingSettings(temperature=0.7, grammar="json")
        calls = [
            call(0, "policy", agent="planner", tool_call_ids=("t1",), offered=OFFERED),
            call(1, "critic", trainable=False, agent="critic", sampling=replace(sampling, grammar="")),
            call(2, "policy", sampling=sampling, logprobs=np.array([0.0, -0.5, -0.25], np.float32), offered=OFFERED),
        ]
        await store.append_calls(
            [CallRecord(rollout_id="two", attempt=1, call_key=made.id, transition=made) for made in calls]
        )
        asked = ToolCall(
            id="t1",
            name="look_up",
            arguments="[not a table",
            result="‘3’",
            status=ToolStatus.ERROR,
            transition_id="two/1/0",
        )
        loose = ToolCall(id="t2", name="bell", arguments='{"n": 1}', status=ToolStatus.OK)
        await store.append_tool_calls("two", 1, [ToolCallRecord(tool_call=tool) for tool in (asked, loose)])
        await store.finish_attempt("two", 1, Outcome.SUCCEEDED, {"said": "ok"}, duration_s=1.5)
        advantages = {"two/1/0": np.array([0.1, -0.2, 0.3], np.float32), "two/1/1": None}
        rewards = {"right": 0.1, "judge": None}
        await store.set_scores([Score(rollout_id="two", attempt=1, rewards=rewards, reward=0.1, advantages=advantages)])
        assert (await store.lease("hand", 3600.0)) is not None
        await store.finish_attempt("silent", 1, Outcome.AGENT_ERROR, None, "ValueError: no")
        await add_branch(store, task, calls)
    finally:
        await store.close()


async def add_branch(store: SqlStore, task: Task, recorded: Sequence[Transition]) -> None:
    """A branch of that rollout after its first call, whose other calls two trained policies made as two agents."""
    point = BranchPoint(rollout_id="two", attempt=1, calls=1)
    group = "two.after-1"
    branch = RolloutSpec(id=f"{group}-00", task=task, group_id=group, mode=RolloutMode.BRANCH, step=1, branch=point)
    await store.create_rollouts([branch])
    assert (await store.lease("hand", 3600.0)) is not None
    calls = [
        replace(recorded[0], id=f"{group}/0", replayed_from=recorded[0].id, trainable=False),
        call(1, "critic", id=f"{group}/1", agent="critic", policy_version=5),
        call(2, "policy", id=f"{group}/2", agent="planner", fits=("plan",)),
    ]
    await store.append_calls(
        [CallRecord(rollout_id=branch.id, attempt=1, call_key=made.id, transition=made) for made in calls]
    )
    await store.finish_attempt(branch.id, 1, Outcome.SUCCEEDED, [2])
    advantages = {made.id: np.array([0.5, -0.5, made.index], np.float32) for made in calls[1:]}
    rewards = {"right": 1.0, "judge": -0.25}
    await store.set_scores(
        [Score(rollout_id=branch.id, attempt=1, rewards=rewards, reward=0.75, advantages=advantages)]
    )


@pytest.fixture(scope="module")
def branched_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "run"
    settings = {
        "credit.use": "branches",
        "credit.options.samples": 2,
        "loop.group_size": 2,
        "policies.critic.model": "org/critic",
    }
    asyncio.run(record_run(folder, make_recipe(folder.parent, settings), steps=2))
    asyncio.run(add_two_policies(folder))
    return folder


async def stored(folder: Path) -> AsyncIterator[StoredRollout]:
    async with open_run(folder) as run:
        records = await run.list_rollouts()
        ids = [record.id for record in reversed(records) if record.outcome is not None]
        async for rollout in list_stored(run, ids, trained_calls_of(RunOrigin.read(folder).recipe)):
            yield rollout


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return one == other


def assert_same(one: Trajectory, other: Trajectory) -> None:
    for name in (field.name for field in fields(Trajectory) if field.name not in {"transitions", "evidence"}):
        assert getattr(one, name) == getattr(other, name), name
    for made, read in zip(one.transitions, other.transitions, strict=True):
        for field in fields(Transition):
            assert same(getattr(made, field.name), getattr(read, field.name)), (made.id, field.name)


@pytest.mark.parametrize("form", FORMATS)
async def test_a_branched_run_of_several_agents_and_policies_comes_back_as_it_was(
    branched_run: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rollouts.jsonl"
    await asyncio.to_thread(export_command, branched_run, form=form, to=path, runs=tmp_path, mode=None)
    kept = [rollout async for rollout in stored(branched_run) if form == "atif" or rollout.trajectory.transitions]
    read = list(read_rollouts(path))
    assert [one.trajectory.rollout_id for one in read] == [one.trajectory.rollout_id for one in kept]
    for before, after in zip(kept, read, strict=True):
        assert_same(before.trajectory, after.trajectory)
        assert before.masks.keys() == after.masks.keys() and before.advantages.keys() == after.advantages.keys()
        assert all(np.array_equal(mask, after.masks[name]) for name, mask in before.masks.items())
        assert all(same(values, after.advantages[name]) for name, values in before.advantages.items())
    assert any(one.trajectory.branch is not None for one in read), "branches"
    assert any(call.replayed_from for one in read for call in one.trajectory.transitions)
    two = next(one for one in read if one.trajectory.rollout_id == "two")
    masks = [two.masks[call.id].tolist() for call in two.trajectory.transitions]
    assert masks == [[True] * 3, [False] * 3, [False, True, True]], "trained; another policy's; a forced token"
    branch = next(one for one in read if one.trajectory.rollout_id == "two.after-1-00")
    made = branch.trajectory.transitions
    assert [(one.policy, one.agent, one.policy_version) for one in made[1:]] == [
        ("critic", "critic", 5),
        ("policy", "planner", 3),
    ]
    assert [branch.masks[one.id].tolist() for one in made] == [[False] * 3, [True] * 3, [True] * 3], "of both policies"
    assert branch.trajectory.rewards == {"right": 1.0, "judge": -0.25} and branch.trajectory.reward == 0.75
    assert len({one.trajectory.branch for one in read}) > 2, "branches of several points"
    said = capsys.readouterr().out
    assert f"{len(kept)} rollouts" in said
    assert ("1 that called no policy" in said) == (form == "openenv"), "nothing is left out in silence"


async def test_documents_keep_the_rules_of_their_format(branched_run: Path, tmp_path: Path) -> None:
    files = {form: tmp_path / f"{form}.jsonl" for form in FORMATS}
    for form, path in files.items():
        await asyncio.to_thread(export_command, branched_run, form=form, to=path, runs=tmp_path, mode=None)
    for document in map(json.loads, files["atif"].read_text().splitlines()):
        assert document["schema_version"] == "ATIF-v1.7" and document["steps"]
        assert [step["step_id"] for step in document["steps"]] == list(range(1, len(document["steps"]) + 1))
        for step in document["steps"]:
            asked = {tool["tool_call_id"] for tool in step.get("tool_calls", ())}
            answered = {result["source_call_id"] for result in step.get("observation", {"results": ()})["results"]}
            assert answered <= asked
            assert all(isinstance(tool["arguments"], dict) for tool in step.get("tool_calls", ()))
            if step["source"] != "agent":
                assert not {"metrics", "tool_calls", "model_name"} & step.keys()
            elif step.get("is_copied_context") and "metrics" in step:
                assert not any(step["metrics"]["extra"]["completion_loss_mask"]), "what is repeated is not trained"
    for document in map(json.loads, files["openenv"].read_text().splitlines()):
        assert document.keys() == {"schema_version", "turns"} and document["schema_version"] == 1
        assert len({turn["node_id"] for turn in document["turns"]}) == len(document["turns"])
        for turn in document["turns"]:
            prompt, completion = turn["prompt_token_ids"], turn["completion_token_ids"]
            assert len(turn["loss_mask"]) == len(prompt) + len(completion) and not any(turn["loss_mask"][: len(prompt)])
            assert len(turn["per_token_logps"]) == len(completion) and max(turn["per_token_logps"]) <= 0.0


async def test_what_cannot_be_written_or_read_is_a_sentence(branched_run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("{}\n")
    for changes, sentence in (
        ({"form": "csv"}, "no format 'csv'; choose of: atif, openenv"),
        ({"mode": "both"}, "no mode 'both'; choose of: train, validation"),
        ({"to": tmp_path / "mine.txt"}, "is there already; name another file: --to"),
        ({"to": tmp_path / "none" / "x"}, "No such file or directory; name another file: --to"),
    ):
        options: dict[str, Any] = {
            "form": "atif",
            "to": tmp_path / "x.jsonl",
            "runs": tmp_path,
            "mode": None,
            **changes,
        }
        with pytest.raises(Exception, match=sentence):
            await asyncio.to_thread(export_command, branched_run, **options)
    assert (tmp_path / "mine.txt").read_text() == "{}\n"
    with pytest.raises(ConfigError, match=r"line 1 of .*mine.txt' is no rollout of atif or openenv"):
        list(read_rollouts(tmp_path / "mine.txt"))
