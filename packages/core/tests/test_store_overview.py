"""What is asked of many rollouts at once is what a count by hand gives, in either database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from lightningrl.errors import StoreError
from lightningrl.store import SqlStore
from lightningrl.store.overview import FacetCount, Mark, Part, RolloutQuery, Sort, ToolCount
from lightningrl.store.protocol import Score, SpanRecord, ToolCallRecord
from lightningrl.testing.store_conformance import make_call
from lightningrl.types import FinishReason, Outcome, RolloutMode, RolloutSpec, RolloutState, Task, ToolCall, ToolStatus

REWARDS = {"a0": 0.0, "a1": 1.0, "b0": 1.0, "b1": 1.0, "c0": None, "v0": 0.5}
"""`c0` failed; `v0` is a validation; groups are named by the first letter. `a0` is cut short, breaks and calls a tool that fails."""


@pytest.fixture(params=["SQLite", "PostgreSQL"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqlStore]:
    is_file = request.param == "SQLite"
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db" if is_file else request.getfixturevalue("postgresql").new_url())
    for name in REWARDS:
        mode = RolloutMode.VALIDATION if name == "v0" else RolloutMode.TRAIN
        spec = RolloutSpec(id=name, task=Task(id=f"task-{name[0]}", input="?"), group_id=name[0], mode=mode, step=0)
        await store.create_rollouts([spec])
        lease = await store.lease("w", 60.0)
        assert lease is not None
        cut = name == "a0"
        reason = FinishReason.LENGTH if cut else FinishReason.STOP
        await store.append_call(make_call(lease, f"{name}/0", [1], [2], agent="plan", finish_reason=reason, is_break=cut))
        await store.append_call(make_call(lease, f"{name}/1", [3], [4], agent="write" if cut else "plan"))
        tool = ToolCall(id="t", name="look", status=ToolStatus.ERROR if cut else ToolStatus.OK)
        await store.append_tool_calls(name, 1, [ToolCallRecord(tool_call=tool)])
        await store.finish_attempt(name, 1, Outcome.TIMEOUT if name == "c0" else Outcome.SUCCEEDED)
        if REWARDS[name] is not None:
            await store.set_scores([Score(rollout_id=name, attempt=1, reward=REWARDS[name])])
    await store.create_rollouts([RolloutSpec(id="q0", task=Task(id="task-q", input="?"), group_id="q", step=1)])
    await store.mark_trained(1, ["a0", "a1", "b0", "b1"], {})
    yield store
    await store.close()


async def ids(store: SqlStore, query: RolloutQuery = RolloutQuery(), sort: Sort = Sort.NEWEST, after: str | None = None) -> list[str]:  # noqa: B008
    return [row.id for row in await store.list_rows(query, sort, after, 100)]


async def test_rollouts_are_ordered_and_each_page_goes_on_from_the_last(store: SqlStore) -> None:
    assert await ids(store, sort=Sort.DISAGREE) == ["a0", "a1", "b0", "b1", "v0", "q0", "c0"]
    assert await ids(store) == ["q0", "v0", "c0", "b1", "b0", "a1", "a0"]
    assert (await ids(store, sort=Sort.WORST))[:2] == ["a0", "v0"]
    assert (await ids(store, sort=Sort.BEST))[:4] == ["b1", "b0", "a1", "v0"]
    for sort in Sort:
        whole = await ids(store, sort=sort)
        for place, name in enumerate(whole):
            assert await ids(store, sort=sort, after=name) == whole[place + 1 :], sort
            for few in (1, 2, 3):
                assert [row.id for row in await store.list_rows(RolloutQuery(), sort, name, few)] == whole[place + 1 :][:few], sort
                rare = [row.id for row in await store.list_rows(RolloutQuery(task="task-b"), sort, name, few)]
                assert rare == [one for one in whole[place + 1 :] if one in ("b0", "b1")][:few], sort
    row = (await store.list_rows(RolloutQuery(text="a0"), Sort.NEWEST, None, 1))[0]
    assert (row.step, row.calls, row.attempts, row.spread, row.reward) == (1, 2, 1, 0.5, 0.0)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (RolloutQuery(first_step=2), ["q0"]),
        (RolloutQuery(last_step=0), ["v0"]),
        (RolloutQuery(outcome=Outcome.TIMEOUT), ["c0"]),
        (RolloutQuery(state=RolloutState.QUEUED), ["q0"]),
        (RolloutQuery(low=0.5, high=0.5), ["v0"]),
        (RolloutQuery(is_unrewarded=True), ["q0", "c0"]),
        (RolloutQuery(task="task-b"), ["b1", "b0"]),
        (RolloutQuery(role="write"), ["a0"]),
        (RolloutQuery(tool="look", mode=RolloutMode.VALIDATION), ["v0"]),
        (RolloutQuery(text="SK-B"), None),
        (RolloutQuery(text="_"), []),
        (RolloutQuery(mark=Mark.CUT), ["a0"]),
        (RolloutQuery(mark=Mark.BREAK), ["a0"]),
        (RolloutQuery(mark=Mark.TOOL_ERROR, tool="look"), ["a0"]),
        (RolloutQuery(mark=Mark.REFUSED), []),
        (RolloutQuery(mark=Mark.FAILED_REWARD), []),
        (RolloutQuery(mark=Mark.SILENT), ["b1", "b0"]),
    ],
    ids=str,
)
async def test_a_query_finds_what_it_says(store: SqlStore, query: RolloutQuery, expected: list[str] | None) -> None:
    found = await ids(store, query)
    assert found == expected if expected is not None else set(found) <= {"b0", "b1"}
    assert sum(cell.count for cell in await store.cells(query)) == len(found)


async def test_counts_by_step_task_role_and_tool(store: SqlStore) -> None:
    cells = await store.cells(RolloutQuery(), [0.5, 1.0])
    assert {(cell.step, cell.mode.value, cell.bin): cell.count for cell in cells if cell.outcome is Outcome.SUCCEEDED} == {
        (1, "train", 0): 1,
        (1, "train", 2): 3,
        (0, "validation", 1): 1,
    }
    tasks = await store.task_counts(RolloutQuery(), 3)
    assert [(task.value, task.count, task.reward) for task in tasks] == [("task-a", 2, 0.5), ("task-v", 1, 0.5), ("task-b", 2, 1.0)]
    assert await store.part_counts(Part.ROLE) == (FacetCount(value="plan", count=6), FacetCount(value="write", count=1))
    assert await store.part_counts(Part.TOOL) == (FacetCount(value="look", count=6),)
    assert set(await store.tool_counts()) == {
        ToolCount(name="look", status=ToolStatus.OK, count=5),
        ToolCount(name="look", status=ToolStatus.ERROR, count=1),
    }
    assert await store.reward_values() == (0.0, 0.5, 1.0)
    assert await store.cut_calls() == {1: 1}
    found = {(step.step, step.mode.value): (step.count, step.mean, step.groups, step.variance) for step in await store.step_rewards()}
    assert found == {(0, "validation"): (1, 0.5, 1, 0.0), (1, "train"): (4, 0.75, 2, 0.0625)}


async def test_roles_and_tools_are_those_of_the_attempt_that_decides_also_where_a_span_names_them(store: SqlStore) -> None:
    spec = RolloutSpec(id="s0", task=Task(id="task-s", input="?"), group_id="s", step=2, max_attempts=2)
    await store.cancel(["q0"])
    await store.create_rollouts([spec])
    assert await store.lease("w", 60.0) is not None
    await store.append_tool_calls("s0", 1, [ToolCallRecord(tool_call=ToolCall(id="t", name="first try", status=ToolStatus.ERROR))])
    await store.finish_attempt("s0", 1, Outcome.INFRASTRUCTURE_ERROR)
    assert await ids(store, RolloutQuery(tool="first try")) == ["s0"]
    lease = await store.lease("w", 60.0)
    assert lease is not None
    await store.append_call(make_call(lease, "s0/0", [1], [2], agent=None, span_id="00000000000000aa"))
    with pytest.raises(StoreError, match="unknown parent"):  # what the writer remembers goes with a transaction that fails
        await store.append_call(make_call(lease, "s0/1", [1], [2], parent_id="unknown parent"))
    spans = SpanRecord(span_id="00000000000000aa", parent_span_id="00000000000000bb"), SpanRecord(span_id="00000000000000bb", agent="judge")
    await store.append_spans("s0", 2, spans)
    assert await ids(store, RolloutQuery(role="judge")) == [], "a role is told when the attempt has ended"
    await store.finish_attempt("s0", 2, Outcome.SUCCEEDED)
    assert await ids(store, RolloutQuery(role="judge")) == ["s0"]
    assert await ids(store, RolloutQuery(tool="first try")) == await ids(store, RolloutQuery(role="nobody at all")) == []
    assert FacetCount(value="judge", count=1) in await store.part_counts(Part.ROLE)
    assert await store.part_counts(Part.TOOL) == (FacetCount(value="look", count=6),)
