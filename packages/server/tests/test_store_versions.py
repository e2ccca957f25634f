"""A store of another version is brought up to date or refused with a sentence, and its files are its owner's alone."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from postgresql import PostgreSQL

from lightningrl.errors import StoreError
from lightningrl.records import ToolCallRecord
from lightningrl.types import (
    FinishReason,
    OtherCall,
    OtherCallKind,
    Outcome,
    RolloutMode,
    RolloutState,
    SamplingSettings,
    ToolCall,
    ToolStatus,
)
from lightningrl_credit.rewards import NamedReward, Reported, RewardSet
from lightningrl_server.store import SqlStore
from lightningrl_server.store.migrations import MIGRATIONS
from lightningrl_server.store.schema import SCHEMA_VERSION
from lightningrl_testing.store_conformance import make_call, make_spec
from lightningrl_viewer.reading.queries.rollout_counts import FacetCount, Part
from lightningrl_viewer.reading.queries.run_queries import RunQueries

VERSION_2 = Path(__file__).with_name("data") / "store_of_version_2.sql"
"""As version 2 wrote it: `a` succeeded and is trained, `b` failed, `c` is queued."""


VERSION_3 = VERSION_2.with_name("store_of_version_3.sql")
"""As version 3 wrote it: `a` has reported and computed rewards and is trained, `b` has reported ones and was not scored, `c` is queued."""


def make_store(folder: Path, dump: Path) -> str:
    with closing(sqlite3.connect(folder / "store.db")) as db, db:
        db.executescript(dump.read_text(encoding="utf-8"))
    return f"sqlite:///{folder}/store.db"


def undo_version_10(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE calls DROP COLUMN fits")


def undo_version_9(db: sqlite3.Connection) -> None:
    undo_version_10(db)
    db.execute("ALTER TABLE attempts DROP COLUMN results_refused")
    db.execute("ALTER TABLE tool_calls DROP COLUMN contradicted")


def make_store_of_version_2(folder: Path) -> str:
    return make_store(folder, VERSION_2)


def make_store_of_version_1(folder: Path) -> str:
    """The seed was a part of the interned settings."""
    url = make_store_of_version_2(folder)
    with closing(sqlite3.connect(folder / "store.db")) as db, db:
        db.execute("UPDATE words SET text = replace(text, '\"seed\":null', '\"seed\":7')")
        db.execute("ALTER TABLE calls DROP COLUMN seed")
        db.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
    return url


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def moved(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """From a store's URL to that of the same store in a database of some kind."""
    if request.param == "SQLite":
        return str
    server: PostgreSQL = request.getfixturevalue("postgresql")
    return server.copy


@pytest.mark.parametrize("make", [make_store_of_version_1, make_store_of_version_2])
async def test_a_store_of_an_older_version_is_brought_up_to_date_and_loses_nothing(
    tmp_path: Path, make: Callable[[Path], str], moved: Callable[[str], str]
) -> None:
    url = moved(make(tmp_path))
    for _ in range(2):
        store = await SqlStore.open(url)
        (trajectory,) = await store.trajectories(["a"])
        assert (trajectory.output, trajectory.reward) == ({"sql": "SELECT 1"}, 1.0)
        assert trajectory.rewards == trajectory.reported == {"style": 0.5, "match": 1.0}, "nobody can tell which were computed"
        first, second = trajectory.transitions
        assert (first.prompt_ids.tolist(), second.prompt_ids.tolist()) == ([1, 2, 70_000], [1, 2, 70_000, 3, 4, 5])
        assert (first.sampling, first.tool_call_ids, first.span_id) == (
            SamplingSettings(temperature=0.5, seed=7),
            ("call_1",),
            "00000000000000aa",
        )
        assert (first.agent, second.agent, second.parent_id) == ("planner", "write", "c0")
        assert (second.finish_reason, second.is_break, second.trainable) == (FinishReason.LENGTH, True, False)
        assert second.rewards == second.reported == {"turn": 1.0}
        (tool,) = trajectory.tool_calls
        assert (tool.name, tool.result, tool.status, tool.transition_id) == ("sql", "x" * 300, ToolStatus.OK, "c0")
        assert trajectory.other_calls == (
            OtherCall(
                kind=OtherCallKind.REFUSED,
                path="chat/completions",
                agent="write",
                status=503,
                code="engine_unavailable",
                message="no engine",
                started_at=3.0,
            ),
            OtherCall(
                kind=OtherCallKind.FORWARDED,
                path="chat/completions",
                model="gpt-9",
                status=200,
                request={"model": "gpt-9"},
                answer={"id": "x"},
                started_at=4.0,
                duration_s=0.25,
            ),
        )
        (step,) = await store.steps()
        assert (step.step, step.rollout_ids, step.metrics) == (1, ("a",), {"loss": 0.25})
        (score,) = await store.scores(["a"])
        assert np.array_equal(score.advantages["c0"], [0.5, 0.5]) and score.advantages["c1"] is None  # type: ignore[arg-type]
        assert {role.value for role in await RunQueries(store).part_counts(Part.ROLE)} == {"planner", "write"}, (
            "the planner was named by a span"
        )
        assert await RunQueries(store).part_counts(Part.TOOL) == (FacetCount(value="sql", count=1),)
        failed = await store.rollout("b")
        assert failed.state is RolloutState.FAILED and (failed.attempts[0].error or "").startswith("ValueError: no xxx")
        await store.close()


async def test_what_version_3_computed_is_kept_as_such_and_has_no_digest_so_that_it_can_be_computed_again(
    tmp_path: Path, moved: Callable[[str], str]
) -> None:
    store = await SqlStore.open(moved(make_store(tmp_path, VERSION_3)))
    scored, unscored = await store.trajectories(["a", "b"])
    assert (scored.rewards, scored.reward, scored.digests, scored.unrewarded) == ({"style": 0.5, "match": 1.0}, 1.0, {}, None)
    assert [call.rewards for call in scored.transitions] == [{"tools": -0.1}, {"turn": 1.0, "tools": None}]
    assert (unscored.rewards, unscored.reported, unscored.reward) == ({}, {"style": 0.25}, None)
    rewards = RewardSet([NamedReward(name="style", function=Reported(name="style"))])
    assert [(await rewards.score(one)).total for one in (scored, unscored)] == [0.5, 0.25]
    await store.close()


async def test_threads_that_version_7_kept_among_the_calls_stand_beside_their_attempt(tmp_path: Path, moved: Callable[[str], str]) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a"), make_spec("b")])
    refused = OtherCall(kind=OtherCallKind.REFUSED, path="models", started_at=1.0)
    for name in "ab":
        await store.lease("w", 60.0)
        await store.append_other_calls(name, 1, [refused])
        await store.finish_attempt(name, 1, Outcome.SUCCEEDED)
    await store.close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        db.execute("ALTER TABLE attempts DROP COLUMN left_threads")
        undo_version_9(db)
        for thread in ("writer", "poller"):
            db.execute(
                "INSERT INTO other_calls (attempt_pk, kind, path, model, started_at, duration_s) VALUES (2, 'left_behind', ?, '', 0, 0)",
                [thread],
            )
        db.execute("UPDATE meta SET value = '7' WHERE key = 'schema'")
    store = await SqlStore.open(moved(url))
    trajectories = await store.trajectories(["a", "b"])
    assert [one.left_threads for one in trajectories] == [(), ("writer", "poller")]
    assert [one.other_calls for one in trajectories] == [(refused,), (refused,)]
    await store.close()


async def test_a_store_that_was_brought_up_to_date_goes_on(tmp_path: Path) -> None:
    store = await SqlStore.open(make_store_of_version_2(tmp_path))
    assert await store.create_rollouts([make_spec("a", sampling=SamplingSettings(temperature=0.5)), make_spec("d")]) == 1
    lease = await store.lease("w", 60.0)
    assert lease is not None and (lease.rollout_id, lease.mode) == ("c", RolloutMode.VALIDATION)
    await store.append_call(make_call(lease, "d0", [1], [2], sampling=SamplingSettings(seed=8)))
    assert (await store.calls("c", 1))[0].transition.sampling.seed == 8
    await store.append_other_calls("c", 1, [OtherCall(kind=OtherCallKind.ELSEWHERE, path="api.example.com")])
    await store.finish_attempt("c", 1, Outcome.SUCCEEDED, "42")
    assert (await store.trajectories(["c"]))[0].other_calls[0].path == "api.example.com"
    await store.close()


async def test_a_migrated_store_has_the_tables_of_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "third").mkdir()
    for url in (make_store_of_version_1(tmp_path), make_store(tmp_path / "third", VERSION_3), f"sqlite:///{tmp_path}/new/store.db"):
        await (await SqlStore.open(url)).close()
    tables = []
    for path in (tmp_path / "store.db", tmp_path / "third" / "store.db", tmp_path / "new" / "store.db"):
        with closing(sqlite3.connect(path)) as db:
            names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            tables.append({name: {column[1] for column in db.execute(f"PRAGMA table_info({name})")} for name in names})
    assert tables[0] == tables[1] == tables[2]


async def test_a_store_of_an_older_version_is_not_read_without_a_word(tmp_path: Path) -> None:
    url = make_store_of_version_1(tmp_path)
    says = rf"schema version 1, older than {SCHEMA_VERSION}; resume or serve its run once, which brings it up to date"
    with pytest.raises(StoreError, match=says):
        await SqlStore.open(url, read_only=True)
    await (await SqlStore.open(url)).close()
    reader = await SqlStore.open(url, read_only=True)
    assert (await reader.rollout("a")).outcome is Outcome.SUCCEEDED
    await reader.close()


async def test_a_store_of_a_version_that_nothing_brings_up_to_date_is_refused(tmp_path: Path) -> None:
    url = make_store_of_version_2(tmp_path)
    with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        db.execute("UPDATE meta SET value = '0' WHERE key = 'schema'")
    with pytest.raises(StoreError, match="schema version 0, which nothing brings up to date; start in a new folder"):
        await SqlStore.open(url)


def test_every_older_version_has_its_migration() -> None:
    assert sorted(MIGRATIONS) == list(range(1, SCHEMA_VERSION))


@pytest.mark.skipif(os.name != "posix", reason="rights of files are POSIX's")
async def test_a_store_is_its_owners_alone_when_it_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = os.umask(0)
    try:
        store = await SqlStore.open(f"sqlite:///{folder}/store.db")
        await store.create_rollouts([make_spec("a")])
        rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        await store.close()
    finally:
        os.umask(before)
    assert {"store.db", "store.db-wal", "store.db-shm", "store.db-lock"} == set(rights) and set(rights.values()) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_of_what_version_9_kept_no_pattern_is_known_to_fit(tmp_path: Path, moved: Callable[[str], str]) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a")])
    lease = await store.lease("w", 60.0)
    assert lease is not None
    await store.append_call(make_call(lease, "c0", [1], [2]))
    await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
    await store.close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        undo_version_10(db)
        db.execute("UPDATE meta SET value = '9' WHERE key = 'schema'")
    store = await SqlStore.open(moved(url))
    (trajectory,) = await store.trajectories(["a"])
    assert [call.fits for call in trajectory.transitions] == [()]
    await store.close()


async def test_of_what_version_8_kept_nothing_is_known_to_have_been_contradicted(tmp_path: Path, moved: Callable[[str], str]) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a")])
    await store.lease("w", 60.0)
    tool = ToolCallRecord(tool_call=ToolCall(id="t", name="sql", status=ToolStatus.OK), span_id="s")
    await store.append_tool_calls("a", 1, [tool])
    await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
    await store.close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as db, db:
        undo_version_9(db)
        db.execute("UPDATE meta SET value = '8' WHERE key = 'schema'")
    store = await SqlStore.open(moved(url))
    (trajectory,) = await store.trajectories(["a"])
    assert (trajectory.results_refused, [tool.contradicted for tool in trajectory.tool_calls]) == (0, [0])
    await store.close()
