"""The process beside us: asked by lines, started again after it died, ended with us; one sentence for what it lacks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import ConfigError
from lightningrl_tasks_verifiers import BridgeFailure, VerifiersTasks

HERE = Path(__file__).parent


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter, as far as the source knows: `line_server.py`."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "line_server.py"}" "{tmp_path}"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def source(python: str) -> Iterator[VerifiersTasks]:
    source = VerifiersTasks(python=python, taskset="any", timeout_s=60)
    yield source
    source.close()


def score(source: VerifiersTasks, reply: str, index: int = 1) -> dict[str, Any]:
    return source._bridge.ask(do="score", split="train", index=index, key="1", reply=reply)


def test_tasks_come_in_pages_in_the_seeds_order(source: VerifiersTasks) -> None:
    tasks = list(source.tasks("train", seed=1, count=200))
    assert tasks == list(source.tasks("train", seed=1, count=200)) != list(source.tasks("train", seed=2, count=200))
    assert len({task.id for task in source.tasks("train", seed=1, count=None)}) == 1200
    assert list(source.tasks("train", seed=1, count=2000))[:200] == tasks
    with pytest.raises(ConfigError, match="no split 'test', but train, validation"):
        list(source.tasks("test", seed=1, count=1))


def test_a_killed_process_is_started_again_and_the_request_asked_again(source: VerifiersTasks, tmp_path: Path) -> None:
    assert score(source, "die once")["reward"] == 0.0
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_request_that_ends_the_process_twice_says_which_and_the_next_one_is_answered(source: VerifiersTasks) -> None:
    with pytest.raises(BridgeFailure, match="its process ended 2 times under 'score' of task 1; it wrote: started"):
        score(source, "die")
    with pytest.raises(BridgeFailure, match="ended 2 times"):
        score(source, "babble")
    assert score(source, "1")["reward"] == 1.0


def test_many_threads_ask_at_once_and_each_has_its_own_answer(source: VerifiersTasks) -> None:
    async def ask_all() -> list[dict[str, Any]]:
        return await asyncio.gather(*(asyncio.to_thread(score, source, str(n % 7), n % 5) for n in range(200)))

    answers = asyncio.run(ask_all())
    assert [answer["reward"] for answer in answers] == [float(n % 7 == n % 5) for n in range(200)]


def test_an_answer_that_does_not_come_ends_the_process_and_names_the_setting(python: str) -> None:
    source = VerifiersTasks(python=python, taskset="any", timeout_s=0.5)
    with pytest.raises(BridgeFailure, match=r"no answer to 'score' within 0\.5 s; raise timeout_s"):
        score(source, "hang")
    source.close()


def test_the_process_ends_with_us_also_when_we_are_killed(python: str) -> None:
    program = (
        "from lightningrl_tasks_verifiers import VerifiersTasks\n"
        f"source = VerifiersTasks(python={python!r}, taskset='any')\n"
        "source._bridge.start()\n"
        "print(source._bridge.opened[0]['pid'], flush=True)\n"
        "input()\n"
    )
    ours = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert ours.stdout is not None and ours.stdin is not None
    theirs = int(ours.stdout.readline())
    os.kill(ours.pid, signal.SIGKILL)
    ours.wait()
    ours.stdout.close()
    ours.stdin.close()
    ends = time.monotonic() + 60
    while is_running(theirs):
        assert time.monotonic() < ends, "it still runs"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"taskset": "any"}, "runs in an environment of its own; make an environment that has verifiers"),
        ({"taskset": "any", "python": "/no/python"}, r"'/no/python' cannot be run .*; make an environment"),
        ({"taskset": "any", "python": sys.executable}, r"has no verifiers 0\.4 .*; make an environment"),
        ({"taskset": "any", "python": "x", "splits": {"train": {"rows": 3}}}, "there are skip, take and config"),
    ],
)
def test_an_environment_that_cannot_be_is_one_sentence_with_the_commands(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        list(VerifiersTasks(**options).tasks("train", seed=0, count=1))
