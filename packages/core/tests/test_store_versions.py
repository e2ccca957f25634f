"""A store of another version is brought up to date or refused with a sentence, and its files are its owner's alone."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from lightningrl.errors import StoreError
from lightningrl.store import SqlStore
from lightningrl.store.schema import MIGRATIONS, SCHEMA_VERSION
from lightningrl.testing.store_conformance import leased, make_call, make_spec
from lightningrl.types import Outcome, SamplingSettings

SETTINGS = SamplingSettings(temperature=0.5, seed=7)


async def make_store_of_version_1(folder: Path) -> str:
    """With one finished rollout `a` whose call has a seed, and a queued one, `b`."""
    url = f"sqlite:///{folder}/store.db"
    store = await SqlStore.open(url)
    await store.create_rollouts([make_spec("a"), make_spec("b")])
    await store.append_call(make_call(await leased(store), "c0", [1], [2], sampling=SETTINGS))
    await store.finish_attempt("a", 1, Outcome.SUCCEEDED, "42")
    await store.close()
    with closing(sqlite3.connect(folder / "store.db")) as db, db:
        db.execute("UPDATE words SET text = replace(text, '\"seed\":null', '\"seed\":7')")
        db.execute("ALTER TABLE calls DROP COLUMN seed")
        db.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
    return url


async def test_a_store_of_an_older_version_is_brought_up_to_date_and_loses_nothing(tmp_path: Path) -> None:
    url = await make_store_of_version_1(tmp_path)
    for _ in range(2):
        store = await SqlStore.open(url)
        (trajectory,) = await store.trajectories(["a"])
        assert (trajectory.output, trajectory.transitions[0].sampling) == ("42", SETTINGS)
        await store.close()
    store = await SqlStore.open(url)
    lease = await leased(store)
    await store.append_call(make_call(lease, "d0", [1], [2], sampling=SamplingSettings(seed=8)))
    assert (await store.calls("b", 1))[0].transition.sampling.seed == 8
    await store.close()


async def test_a_store_of_an_older_version_is_not_read_without_a_word(tmp_path: Path) -> None:
    url = await make_store_of_version_1(tmp_path)
    with pytest.raises(StoreError, match=r"schema version 1, older than 2; resume or serve its run once, which brings it up to date"):
        await SqlStore.open(url, read_only=True)
    await (await SqlStore.open(url)).close()
    reader = await SqlStore.open(url, read_only=True)
    assert (await reader.rollout("a")).outcome is Outcome.SUCCEEDED
    await reader.close()


async def test_a_store_of_a_version_that_nothing_brings_up_to_date_is_refused(tmp_path: Path) -> None:
    url = await make_store_of_version_1(tmp_path)
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
