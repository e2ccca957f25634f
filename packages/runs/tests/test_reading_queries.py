"""Queries about many rollouts give what a count by hand gives, in either database."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sizes import sized

from lightningrl.errors import StoreError
from lightningrl.records import Score
from lightningrl.types import (
    FinishReason,
    OtherCall,
    OtherCallKind,
    Outcome,
    RolloutMode,
    RolloutSpec,
    RolloutState,
    Task,
    ToolCall,
    ToolStatus,
)
from lightningrl_runs.queries import rollout_index
from lightningrl_runs.queries.rollout_counts import FacetCount, Part, RewardValues, ToolCount
from lightningrl_runs.queries.rollout_query import Mark, RolloutQuery
from lightningrl_runs.queries.rollout_rows import Sort
from lightningrl_runs.reader import RunQueries
from lightningrl_server.records import DIALOGUE, AttemptEnd, SpanRecord, ToolCallRecord
from lightningrl_server.store import SqlStore
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_testing.store_conformance import leased, make_call, make_spec

REWARDS = {"a0": 0.0, "a1": 1.0, "b0": 1.0, "b1": 1.0, "c0": None, "v0": 0.5}
"""`c0` failed; `v0` is a validation; groups are named by the first letter. `a0` is cut short, breaks and calls a tool
that fails."""


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    is_file = request.param == "SQLite"
    return f"sqlite:///{tmp_path}/store.db" if is_file else str(request.getfixturevalue("postgresql").new_url())


@pytest.fixture
async def store(url: str) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(url)
    for name in REWARDS:
        mode = RolloutMode.VALIDATION if name == "v0" else RolloutMode.TRAIN
        spec = RolloutSpec(id=name, task=Task(id=f"task-{name[0]}", input="?"), group_id=name[0], mode=mode, step=0)
        await store.create_rollouts([spec])
        lease = await store.lease("w", 60.0)
        assert lease is not None
        cut, bad = name == "a0", ("'{' is no tool call",) if name == "b1" else ()
        reason = FinishReason.LENGTH if cut else FinishReason.STOP
        await store.append_call(
            make_call(lease, f"{name}/0", [1], [2], agent="plan", finish_reason=reason, is_break=cut, malformed=bad)
        )
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


@pytest.fixture
def queries(store: SqlStore) -> RunQueries:
    return RunQueries(store)


async def ids(
    queries: RunQueries, query: RolloutQuery | None = None, sort: Sort = Sort.NEWEST, after: str | None = None
) -> list[str]:
    return [row.id for row in await queries.list_rows(query or RolloutQuery(), sort, after, 100)]


async def test_rollouts_are_ordered_and_each_page_goes_on_from_the_last(queries: RunQueries) -> None:
    assert await ids(queries, sort=Sort.DISAGREE) == ["a0", "a1", "b0", "b1", "v0", "q0", "c0"]
    assert await ids(queries) == ["q0", "v0", "c0", "b1", "b0", "a1", "a0"]
    assert (await ids(queries, sort=Sort.WORST))[:2] == ["a0", "v0"]
    assert (await ids(queries, sort=Sort.BEST))[:4] == ["b1", "b0", "a1", "v0"]
    for sort in Sort:
        whole = await ids(queries, sort=sort)
        for place, name in enumerate(whole):
            assert await ids(queries, sort=sort, after=name) == whole[place + 1 :], sort
            for few in (1, 2, 3):
                assert [row.id for row in await queries.list_rows(RolloutQuery(), sort, name, few)] == whole[
                    place + 1 :
                ][:few], sort
                rare = [row.id for row in await queries.list_rows(RolloutQuery(task="task-b"), sort, name, few)]
                assert rare == [one for one in whole[place + 1 :] if one in ("b0", "b1")][:few], sort
    row = (await queries.list_rows(RolloutQuery(text="a0"), Sort.NEWEST, None, 1))[0]
    assert (row.step, row.calls, row.attempts, row.spread, row.reward) == (1, 2, 1, 0.5, 0.0)


async def test_a_row_has_what_came_out_and_an_output_that_is_long_stays_where_it_is(
    store: SqlStore, queries: RunQueries
) -> None:
    long = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=200_000))
    outputs = {"x0": ({"n": 4}, None), "x1": (None, "ValueError: no"), "x2": (long, None), "x3": (None, long)}
    for name, (output, error) in outputs.items():
        await store.create_rollouts([RolloutSpec(id=name, task=Task(id="t", input="?", answer=[4]), group_id="x")])
        while (lease := await store.lease("w", 60.0)) is not None and lease.rollout_id != name:
            pass  # a rollout that was queued before
        await store.finish_attempt(
            name, 1, Outcome.AGENT_ERROR if error else Outcome.SUCCEEDED, output=output, error=error
        )
    rows = {row.id: row for row in await queries.list_rows(RolloutQuery(text="x"), Sort.NEWEST, None, 10)}
    assert {name: (row.output, row.error, row.is_long) for name, row in rows.items()} == {
        "x0": ({"n": 4}, None, False),
        "x1": (None, "ValueError: no", False),
        "x2": (None, None, True),
        "x3": (None, None, True),
    }
    assert rows["x0"].answer == [4]
    (queued,) = await queries.list_rows(RolloutQuery(text="q0"), Sort.NEWEST, None, 1)
    assert (queued.output, queued.error, queued.is_long, queued.answer) == (None, None, False, None)


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
        (RolloutQuery(mark=Mark.MALFORMED), ["b1"]),
        (RolloutQuery(mark=Mark.REFUSED), []),
        (RolloutQuery(mark=Mark.FAILED_REWARD), []),
        (RolloutQuery(mark=Mark.SILENT), ["b1", "b0"]),
    ],
    ids=str,
)
async def test_a_query_finds_what_it_says(queries: RunQueries, query: RolloutQuery, expected: list[str] | None) -> None:
    found = await ids(queries, query)
    assert found == expected if expected is not None else set(found) <= {"b0", "b1"}
    assert sum(cell.count for cell in await queries.cells(query)) == len(found)


async def test_counts_by_step_task_role_and_tool(queries: RunQueries) -> None:
    cells = await queries.cells(RolloutQuery(), [0.5, 1.0])
    assert {
        (cell.step, cell.mode.value, cell.bin): cell.count for cell in cells if cell.outcome is Outcome.SUCCEEDED
    } == {
        (1, "train", 0): 1,
        (1, "train", 2): 3,
        (0, "validation", 1): 1,
    }
    tasks = await queries.task_counts(RolloutQuery(), 3)
    assert [(task.value, task.count, task.reward) for task in tasks] == [
        ("task-a", 2, 0.5),
        ("task-v", 1, 0.5),
        ("task-b", 2, 1.0),
    ]
    assert await queries.part_counts(Part.ROLE) == (
        FacetCount(value="plan", count=6),
        FacetCount(value="write", count=1),
    )
    assert await queries.part_counts(Part.TOOL) == (FacetCount(value="look", count=6),)
    assert set(await queries.tool_counts()) == {
        ToolCount(name="look", status=ToolStatus.OK, count=5),
        ToolCount(name="look", status=ToolStatus.ERROR, count=1),
    }
    assert await queries.reward_values() == RewardValues(values=(0.0, 0.5, 1.0), is_all=True)
    assert await queries.cut_calls() == {1: 1}
    found = {
        (step.step, step.mode.value): (step.count, step.mean, step.groups, step.variance)
        for step in await queries.step_rewards()
    }
    assert found == {(0, "validation"): (1, 0.5, 1, 0.0), (1, "train"): (4, 0.75, 2, 0.0625)}


async def test_roles_and_tools_are_those_of_the_attempt_that_decides_also_where_a_span_names_them(
    store: SqlStore, queries: RunQueries
) -> None:
    spec = RolloutSpec(id="s0", task=Task(id="task-s", input="?"), group_id="s", step=2, max_attempts=2)
    await store.cancel(["q0"])
    await store.create_rollouts([spec])
    assert await store.lease("w", 60.0) is not None
    await store.append_tool_calls(
        "s0", 1, [ToolCallRecord(tool_call=ToolCall(id="t", name="first try", status=ToolStatus.ERROR))]
    )
    await store.finish_attempt("s0", 1, Outcome.INFRASTRUCTURE_ERROR)
    assert await ids(queries, RolloutQuery(tool="first try")) == ["s0"]
    lease = await store.lease("w", 60.0)
    assert lease is not None
    await store.append_call(make_call(lease, "s0/0", [1], [2], agent=None, span_id="00000000000000aa"))
    with pytest.raises(
        StoreError, match="unknown parent"
    ):  # what the writer remembers goes with a transaction that fails
        await store.append_call(make_call(lease, "s0/1", [1], [2], parent_id="unknown parent"))
    spans = (
        SpanRecord(span_id="00000000000000aa", parent_span_id="00000000000000bb"),
        SpanRecord(span_id="00000000000000bb", agent="judge"),
    )
    await store.append_spans("s0", 2, spans)
    assert await ids(queries, RolloutQuery(role="judge")) == [], "a role is told when the attempt has ended"
    await store.finish_attempt("s0", 2, Outcome.SUCCEEDED)
    assert await ids(queries, RolloutQuery(role="judge")) == ["s0"]
    assert (
        await ids(queries, RolloutQuery(tool="first try"))
        == await ids(queries, RolloutQuery(role="nobody at all"))
        == []
    )
    assert FacetCount(value="judge", count=1) in await queries.part_counts(Part.ROLE)
    assert await queries.part_counts(Part.TOOL) == (FacetCount(value="look", count=6),)


async def all_that_is_counted(queries: RunQueries) -> list[object]:
    return [
        *[await queries.list_rows(RolloutQuery(), sort, None, 1000) for sort in Sort],
        await queries.cells(RolloutQuery(), [0.5]),
        await queries.task_counts(RolloutQuery(), 1000),
        set(await queries.part_counts(Part.TOOL)),
        await queries.reward_values(),
        await queries.step_rewards(),
    ]


class Player:
    """Does what a run does, in any order: rollouts asked for, played, scored, scored again, trained, taken back, tried
    again."""

    def __init__(self, store: SqlStore, queries: RunQueries, seed: int) -> None:
        self.store, self.queries, self.random = store, queries, random.Random(seed)
        self.asked, self.step, self.trained = 0, 1, 4
        self.ended: list[str] = []
        """And neither trained nor a validation's."""

    async def ask(self) -> None:
        mode = self.random.choice([RolloutMode.TRAIN, RolloutMode.TRAIN, RolloutMode.VALIDATION])
        self.asked += 1
        task = Task(id=f"task-{self.random.randrange(3)}", input="?")
        spec = RolloutSpec(id=f"n{self.asked}", task=task, group_id=f"n{self.asked // 2}", mode=mode, step=self.step)
        await self.store.create_rollouts([spec])

    async def play(self) -> None:
        lease = await self.store.lease("w", 60.0)
        if lease is None:
            return
        tool = ToolCallRecord(tool_call=ToolCall(id="t", name=self.random.choice("xyz"), status=ToolStatus.OK))
        await self.store.append_tool_calls(lease.rollout_id, lease.attempt, [tool])
        outcome = self.random.choice([Outcome.SUCCEEDED, Outcome.SUCCEEDED, Outcome.AGENT_ERROR])
        await self.store.finish_attempt(lease.rollout_id, lease.attempt, outcome)
        await self._score(lease.rollout_id, lease.attempt)
        if lease.mode is RolloutMode.TRAIN and outcome is Outcome.SUCCEEDED:
            self.ended.append(lease.rollout_id)

    async def score_again(self) -> None:
        if self.ended:
            name = self.random.choice(self.ended)
            await self._score(name, (await self.store.rollout(name)).attempts[-1].attempt)

    async def train(self) -> None:
        self.step += 1
        chosen = [name for name in self.ended if self.random.random() < 0.7]
        self.ended = [name for name in self.ended if name not in chosen]
        await self.store.mark_trained(self.step, chosen, {})

    async def take_back(self) -> None:
        self.step = max(1, self.step - self.random.randrange(3))
        await self.store.rollback_steps(self.step)
        self.ended = [
            row.id
            for row in await self.queries.list_rows(
                RolloutQuery(mode=RolloutMode.TRAIN, outcome=Outcome.SUCCEEDED), Sort.NEWEST, None, 1000
            )
            if (await self.store.rollout(row.id)).trained_step is None
        ]

    async def try_again(self) -> None:
        failed = await self.queries.list_rows(
            RolloutQuery(outcome=Outcome.AGENT_ERROR, mode=RolloutMode.TRAIN), Sort.NEWEST, None, 1000
        )
        if failed:
            await self.store.retry([self.random.choice(failed).id], 60.0)

    async def _score(self, name: str, attempt: int) -> None:
        await self.store.set_scores(
            [Score(rollout_id=name, attempt=attempt, reward=self.random.choice([0.0, 0.5, 1.0, None]))]
        )


@pytest.mark.parametrize("seed", range(sized(2, 10)))
async def test_what_is_counted_as_the_store_grows_is_what_is_counted_of_it_anew(
    store: SqlStore, queries: RunQueries, url: str, seed: int
) -> None:
    player = Player(store, queries, seed)
    dos = [player.ask] * 4 + [player.play] * 4 + [player.score_again, player.train, player.take_back, player.try_again]
    for turn in range(sized(60, 200)):
        await player.random.choice(dos)()
        if turn % 3 == 0:
            anew = await SqlStore.open(url, read_only=True)
            assert await all_that_is_counted(queries) == await all_that_is_counted(RunQueries(anew)), turn
            await anew.close()


async def test_memory_has_an_end_and_the_newest_are_counted(
    store: SqlStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_index, "MOST", 3)
    reader = await SqlStore.open(url, read_only=True)
    few = RunQueries(reader)
    assert await ids(few) == ["q0", "v0", "c0"]
    await store.create_rollouts([RolloutSpec(id="q1", task=Task(id="task-q", input="?"), group_id="q", step=1)])
    assert await ids(few) == ["q1", "q0", "v0"]
    with pytest.raises(UnknownRecord, match="go on from"):
        await ids(few, after="a0")
    await reader.close()


# ------------------------------------------------------------------ of a store of one's own


@pytest.fixture
async def empty(url: str) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(url)
    yield store
    await store.close()


async def test_it_says_how_far_a_run_has_come_and_how_it_stands(empty: SqlStore) -> None:
    queries = RunQueries(empty)
    assert (await queries.position()).later_steps == () and (await queries.health()).workers == ()
    await empty.create_rollouts([make_spec(name) for name in "abcd"])
    refusal = OtherCall(
        kind=OtherCallKind.REFUSED, path="chat/completions", code="no", message="n is 0", status=400, started_at=1.0
    )
    for outcome in (Outcome.SUCCEEDED, Outcome.AGENT_ERROR):
        lease = await leased(empty)
        await empty.append_call(make_call(lease, "c0", [1], [2]))
        await empty.append_other_calls(lease.rollout_id, 1, [refusal])
        end = AttemptEnd(
            outcome=outcome, error="why", left_threads=["writer", "\ud800"] if lease.rollout_id == "a" else []
        )
        await empty.finish_and_lease(lease.rollout_id, 1, end, None)
    await leased(empty)
    await empty.mark_trained(1, ["a"], {})
    await empty.mark_trained(2, ["b"], {})
    position, found = await queries.position(after=1), await queries.health()
    assert (position.step, position.later_steps, position.running) == (2, (2,), 1)
    assert found.states == {
        RolloutState.SUCCEEDED: 1,
        RolloutState.FAILED: 1,
        RolloutState.RUNNING: 1,
        RolloutState.QUEUED: 1,
    }
    assert [(version.policy, version.calls, version.trainable) for version in found.versions] == [("main", 2, True)]
    assert [(worker.attempts, worker.running, worker.failed) for worker in found.workers] == [(3, 1, 1)]
    assert [lease.rollout_id for lease in found.leases] == ["c"]
    failures = [(failure.name, failure.count, failure.rollout_id, failure.text) for failure in found.failures]
    assert failures == [(Outcome.AGENT_ERROR, 1, "b", "why")]
    assert [(refusal.name, refusal.count, refusal.rollout_id, refusal.text) for refusal in found.refusals] == [
        ("no", 2, "b", "n is 0")
    ]
    threads = [(thread.name, thread.count, thread.rollout_id) for thread in found.left_threads]
    assert threads == [("writer", 1, "a"), ("\ufffd", 1, "a")]
    around = await queries.neighbours("c")
    assert (around.before, around.after, around.failed_before, around.failed_after) == ("b", "d", "b", None)


async def test_a_tool_that_failed_by_the_dialogue_or_by_a_report_marks_its_rollout(empty: SqlStore) -> None:
    def shown(call_id: str, status: ToolStatus) -> ToolCallRecord:
        call = ToolCall(id=call_id, name=f"tool_{call_id}", result="of the dialogue", status=status, transition_id="c0")
        return ToolCallRecord(tool_call=call, span_id=f"{DIALOGUE}{call_id}", parent_span_id="c0")

    def told(call_id: str, status: ToolStatus) -> ToolCallRecord:
        return ToolCallRecord(
            tool_call=ToolCall(id=call_id, name=f"tool_{call_id}", status=status), span_id=f"s-{call_id}"
        )

    await empty.create_rollouts([make_spec("a")])
    lease = await leased(empty)
    await empty.append_tool_calls("a", 1, [told("y", ToolStatus.OK), told("v", ToolStatus.UNKNOWN)])
    results = [shown("y", ToolStatus.UNKNOWN), *(shown(name, ToolStatus.ERROR) for name in "xzvw")]
    await empty.append_calls([make_call(lease, "c0", [1, 2, 3], [4])], results)
    await empty.append_tool_calls("a", 1, [told("x", ToolStatus.OK), told("w", ToolStatus.UNKNOWN)])
    await empty.finish_attempt("a", 1, Outcome.SUCCEEDED)
    queries = RunQueries(empty)
    failed = [
        name for name in "xyzvw" if await queries.list_rows(RolloutQuery(tool=f"tool_{name}", mark=Mark.TOOL_ERROR))
    ]
    assert failed == ["x", "z", "v", "w"], "that x was told to be ok does not hide that it failed"
    assert await queries.list_rows(RolloutQuery(tool="tool_x"))


async def test_forgotten_rollouts_are_not_counted(empty: SqlStore) -> None:
    queries = RunQueries(empty)
    await empty.create_rollouts([make_spec("a"), make_spec("b", step=1)])
    for name in "ab":
        await leased(empty)
        await empty.finish_attempt(name, 1, Outcome.SUCCEEDED)
    await empty.mark_trained(1, ["a"], {})
    assert await ids(queries) == ["b", "a"]
    assert await empty.forget_rollouts(through=1) == 1
    assert await ids(queries) == ["b"]
