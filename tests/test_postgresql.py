"""A run whose store is in PostgreSQL: two servers, killed with their workers, their trainer and their database; one
folder, one schema."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from crashes import (
    RECIPE,
    Victim,
    begin,
    check_run,
    draw,
    finish,
    kill,
    kill_trainer_and_resume,
    last_step,
    tell_kills,
    wait_for_answers,
)
from postgresql import PostgreSQL
from processes import TrainRun
from sizes import sized
from warm import WarmCommand

from lightningrl import Run
from lightningrl.errors import ConfigError, RunFolderError, StoreError
from lightningrl_client.recipe_file import load_recipe
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import make_spec
from lightningrl_training.run import problems
from lightningrl_training.run_folder import RunFolder

SEED = 13


@pytest.fixture
def run(tmp_path: Path, warm: WarmCommand) -> Iterator[TrainRun]:
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    yield run
    run.close()


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_kills_of_two_servers_their_workers_and_their_database_lose_nothing_and_double_nothing(
    run: TrainRun, tiny_policy: Path, postgresql: PostgreSQL
) -> None:
    """At full size 100 moments, and trainers among the victims; prints the figures of docs/how-to/postgresql.md (`pytest
    --long -s`)."""
    began = time.monotonic()
    chance = random.Random(SEED)
    counts: dict[Literal["database"] | Victim, int] = {
        "server": sized(1, 35),
        "database": sized(1, 30),
        "worker": sized(0, 20),
        "trainer": sized(0, 10),
        "all": sized(0, 5),
    }
    victims = draw(counts, chance)
    steps = 3
    begin(
        run,
        tiny_policy,
        "--set",
        f'store_url="{postgresql.database}"',
        "--set",
        "runtime.servers=2",
        steps=sized(steps, 100_000),
    )
    for victim in victims:
        wait_for_answers(run, chance.randint(1, 12))
        time.sleep(chance.uniform(0.0, 0.3))  # perhaps in a weight update or a checkpoint
        if victim == "database":
            postgresql.restart()
        else:
            kill(run, victim, chance)
    if sized(False, True):
        steps = last_step(run) + 4
        kill_trainer_and_resume(run, "--steps", str(steps))
    finish(run)
    found = check_run(run, steps=steps)
    tell_kills(victims, found, began)


# ------------------------------------------------------------------ one folder, one schema


def new_run(path: Path, database: str | None, *, overwrite: bool = False) -> RunFolder:
    settings = {"policy.model": "none", **({} if database is None else {"store_url": database})}
    folder = RunFolder.create(
        path, load_recipe(RECIPE, settings), str(RECIPE), settings, models={}, overwrite=overwrite
    )
    folder.close()
    return folder


async def order(store_url: str, *names: str) -> None:
    store = await SqlStore.open(store_url)
    await store.create_rollouts([make_spec(name) for name in names])
    await store.close()


def schemas(postgresql: PostgreSQL) -> set[str]:
    return {row[0] for row in postgresql.ask("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'lightningrl%'")}


def test_each_run_has_a_schema_of_its_own_which_its_folder_names_and_which_goes_with_it(
    postgresql: PostgreSQL, tmp_path: Path
) -> None:
    before = schemas(postgresql)
    first, second = (
        new_run(tmp_path / "it's 100% mine", postgresql.database),
        new_run(tmp_path / "second", postgresql.database),
    )
    assert first.store_url != second.store_url
    assert len(schemas(postgresql) - before) == 2
    asyncio.run(order(first.store_url, "a", "b"))
    asyncio.run(order(second.store_url, "a"))
    assert [rollout.spec.id for rollout in Run(first.path).rollouts()] == ["b", "a"]
    assert [rollout.spec.id for rollout in Run(second.path).rollouts()] == ["a"]
    assert not (first.path / "store.sqlite").exists()
    again = new_run(first.path, postgresql.database, overwrite=True)
    assert not again.has_rollouts()
    assert second.has_rollouts()
    assert len(schemas(postgresql) - before) == 2, "what is written over goes from the database, too"
    for folder in (again, second):
        folder.discard()
    assert schemas(postgresql) == before


def test_a_moved_run_goes_on_and_a_copied_one_is_only_looked_at(postgresql: PostgreSQL, tmp_path: Path) -> None:
    folder = new_run(tmp_path / "run", postgresql.database)
    asyncio.run(order(folder.store_url, "a"))
    shutil.copytree(folder.path, tmp_path / "copy")
    assert len(Run(tmp_path / "copy").rollouts()) == 1
    with pytest.raises(
        StoreError, match=r"are those of '.*run', of which this is a copy: look at it, and go on with that one"
    ):
        RunFolder.resume(tmp_path / "copy", {})
    new_run(tmp_path / "copy", postgresql.database, overwrite=True).discard()
    assert folder.has_rollouts(), "a copy drops nothing"
    folder.path.rename(tmp_path / "moved")
    moved, _ = RunFolder.resume(tmp_path / "moved", {})
    assert moved.has_rollouts()
    moved.close()
    with pytest.raises(
        RunFolderError,
        match=r"'store_url' was 'postgresql://.*', is None; restore it \(`--set .*`\), or start a new run",
    ):
        RunFolder.resume(tmp_path / "moved", {"store_url": None})
    moved.discard()


def test_a_database_that_cannot_be_used_is_told_before_anything_is_written(
    postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(database: str) -> str:
        with pytest.raises(StoreError) as refused:
            new_run(tmp_path / "run", database)
        assert not (tmp_path / "run").exists()
        (sentence,) = [
            one for one in problems(RECIPE, settings={"store_url": database}) if one.startswith("store_url: ")
        ]
        assert not sentence.endswith(".") and "\n" not in sentence
        return f"{refused.value} | {sentence}"

    assert (
        "PostgreSQL" not in (said := told("postgresql://me@127.0.0.1:9/none"))
        and said.count("check that its server runs") == 2
    )
    monkeypatch.setenv("PGPASSWORD", "not this")
    assert told(postgresql.guarded).count("set PGPASSWORD or write it to ~/.pgpass") == 2
    monkeypatch.setenv("PGPASSWORD", "open sesame")
    assert told(postgresql.guarded).count("GRANT CREATE ON DATABASE") == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"store_url": "postgresql://me:sesame@host/name"},
            "it names no password; set PGPASSWORD or write it to ~/.pgpass",
        ),
        ({"store_url": "postgresql://me@host/name?password=sesame"}, "it names no password"),
        ({"store_url": "sqlite:///runs/store.sqlite"}, "write 'postgresql://user@host/name', or leave it out"),
        ({"store_url": "postgresql://host"}, "write 'postgresql://user@host/name', or leave it out"),
        ({"store_url": "postgresql://me@host/name?options=-csearch_path%3Dx"}, "each run makes a schema of its own"),
        ({"runtime.servers": 2}, "SQLite has one; set store_url to a PostgreSQL database"),
    ],
)
def test_a_recipe_that_cannot_mean_a_database_is_refused(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(RECIPE, {"policy.model": "none", **settings})
    assert sentence in str(refused.value)
    assert "sesame" not in str(refused.value)
