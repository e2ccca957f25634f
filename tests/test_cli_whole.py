"""Commands that need more than one process: workers that join from elsewhere, an endpoint tried by hand, Spider's own
format."""

import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from certified import certified
from openai import OpenAI
from sizes import PATIENCE_S
from warm import WarmCommand, fresh_starts

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "text_to_sql"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "PYTHONUNBUFFERED": "1"}


@contextmanager
def running(warm: WarmCommand, *arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = warm.start("lightningrl", *arguments, output=out, errors=out, cwd=ROOT, environment=ENVIRONMENT)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(timeout=PATIENCE_S)


def wait_for(pattern: str, log: Path, process: subprocess.Popen[bytes]) -> re.Match[str]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text()):
            return found
        assert process.poll() is None, log.read_text()
        time.sleep(0.2)
    raise AssertionError(f"no {pattern!r} in {log.read_text()}")


def has_learned_nothing(said: str) -> int:
    """The exit status of a run that came to its end: 1 where one step of a few rollouts earned equal rewards."""
    return int("nothing was learned in 1 steps" in said)


@pytest.mark.slow
def test_workers_join_a_run_from_elsewhere(tmp_path: Path, warm: WarmCommand) -> None:
    small = [
        "--steps",
        "1",
        "--set",
        "loop.tasks_per_step=2",
        "--set",
        "loop.group_size=2",
        "--set",
        "validation.tasks=2",
    ]
    log = tmp_path / "train.log"
    command = ("train", str(EXAMPLE), "--workers", "0", "--run", str(tmp_path / "run"), *small)
    with fresh_starts(), running(warm, *command, log=log) as trainer:
        join = wait_for(r"LIGHTNINGRL_KEY=(\S+) lightningrl work RECIPE --server (\S+)", log, trainer)
        with running(
            warm,
            "work",
            str(EXAMPLE),
            "--server",
            join[2],
            "--key",
            join[1],
            "--workers",
            "1",
            log=tmp_path / "work.log",
        ):
            status = trainer.wait(timeout=PATIENCE_S)
            said = log.read_text()
            assert status == has_learned_nothing(said), said + (tmp_path / "work.log").read_text()
    assert "validation after step 1" in log.read_text()
    certified(tmp_path / "run", warm)


@pytest.mark.slow
def test_serve_gives_an_endpoint_for_any_openai_client(tmp_path: Path, warm: WarmCommand) -> None:
    log = tmp_path / "serve.log"
    with running(warm, "serve", str(EXAMPLE), "--port", "0", log=log) as server:
        url = wait_for(r"OPENAI_BASE_URL=(\S+)", log, server)[1]
        key = wait_for(r"OPENAI_API_KEY=(\S+)", log, server)[1]
        reply = OpenAI(base_url=url, api_key=key).chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hello"}], max_tokens=4
        )
        assert reply.usage is not None
        assert 1 <= reply.usage.completion_tokens <= 4
        asked: Any = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12}
        client = OpenAI(base_url=url, api_key=key)
        answers = [client.chat.completions.create(**asked, temperature=0).choices[0].message.content for _ in range(4)]
        assert len(set(answers)) == 1, "nobody who asks for the likeliest answer gets the run's temperature"


@pytest.mark.slow
def test_the_spider_recipe_trains_on_a_folder_in_spiders_own_format(tmp_path: Path, warm: WarmCommand) -> None:
    spider = write_spider(tmp_path / "spider")
    settings = [
        "loop.steps=1",
        "loop.tasks_per_step=1",
        "loop.group_size=2",
        "runtime.workers=1",
        "sampling.max_tokens=16",
    ]
    settings += ["learner.dtype=float32", "learner.gradient_checkpointing=false"]
    command = [str(EXAMPLE / "train_spider.py"), "--spider", str(spider), "--policy", str(EXAMPLE / "starter")]
    command += ["--run", str(tmp_path / "run"), *(word for setting in settings for word in ("--set", setting))]
    ran = warm.run(*command, cwd=ROOT, environment=ENVIRONMENT)
    assert ran.returncode == has_learned_nothing(ran.stdout + ran.stderr), ran.stdout + ran.stderr
    assert "on 1 tasks, 1 held out" in ran.stdout
    assert "step 1/1" in ran.stdout


def write_spider(root: Path) -> Path:
    """Two databases, a training and a dev question, as Spider's archive has them."""
    tables = []
    for name in ("pets", "shops"):
        (root / "database" / name).mkdir(parents=True)
        with sqlite3.connect(root / "database" / name / f"{name}.sqlite") as database:
            database.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, name TEXT, age INTEGER)")
            database.execute(f"INSERT INTO {name} VALUES (1, 'Rex', 3)")
        database.close()
        tables.append(
            {
                "db_id": name,
                "table_names_original": [name],
                "table_names": [name],
                "column_names_original": [[-1, "*"], [0, "id"], [0, "name"], [0, "age"]],
                "column_names": [[-1, "*"], [0, "id"], [0, "name"], [0, "age"]],
                "column_types": ["text", "number", "text", "number"],
                "primary_keys": [1],
                "foreign_keys": [],
            }
        )
    (root / "tables.json").write_text(json.dumps(tables))
    for file, name in (("train_spider.json", "pets"), ("dev.json", "shops")):
        question = {"db_id": name, "question": f"How many {name} are there?", "query": f"SELECT count(*) FROM {name}"}
        (root / file).write_text(json.dumps([question]))
    return root


@pytest.mark.slow
def test_the_commands_that_a_run_ends_with_can_be_typed(first_agent: Path, tmp_path: Path, warm: WarmCommand) -> None:
    settings = ["--set", "validation.every=0", "--set", "name=a name of several words that is wider than the terminal"]
    ran = warm.run(
        "lightningrl", "train", str(first_agent), "--steps", "0", *settings, cwd=tmp_path, environment={"COLUMNS": "40"}
    )
    assert ran.returncode == 0, ran.stderr
    (run,) = (tmp_path / "runs").iterdir()
    typed = [
        shlex.split(line.partition("lightningrl ")[2]) for line in ran.stdout.splitlines() if "lightningrl " in line
    ]
    assert [words[0] for words in typed] == ["view", "rollouts", "export"]
    assert {words[-1] for words in typed} == {f"runs/{run.name}"}
