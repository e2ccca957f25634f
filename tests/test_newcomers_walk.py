"""A newcomer's walk: an empty folder, their own data in a file and in numpy, math-verify as the reward, LangChain with
its cache on. Each line is typed as they would type it, and what it prints is read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from warm import WarmCommand

AGENT = """
from openai import OpenAI


def answer(date):
    messages = [{"role": "user", "content": f"Write this date in words: {date}"}]
    reply = OpenAI().chat.completions.create(model="gpt-4o-mini", messages=messages)
    return reply.choices[0].message.content.partition(" ")[0]
"""
CACHING_AGENT = """
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from langchain_openai import ChatOpenAI

set_llm_cache(InMemoryCache())
model = ChatOpenAI(model="gpt-4o-mini")


def answer(date):
    reply = model.invoke(f"Write this date in words: {date}")
    return reply.text.partition(" ")[0]
"""
REWARD = """
from math_verify import parse, verify


def right(task, output, trajectory):
    return float(verify(parse(task.answer), parse(output)))
"""
HELD_OUT = """
import numpy as np

DATES = np.array([[3, 4, 2007], [21, 11, 2012]])
DAYS = np.array(["3", "21"])


def load():
    for number, (date, day) in enumerate(zip(DATES, DAYS)):
        yield {"id": np.int64(number), "input": " / ".join(map(str, date)), "answer": day, "metadata": {"date": date, "year": date[2]}}


def with_dates():
    yield {"id": 1, "input": "3 / 4 / 2007", "answer": np.datetime64("2007-04-03T00:00:00.000000000")}
"""
RECIPE = """
agent = "agent.py:answer"

[tasks]
train = "dates.jsonl"
validation = "held_out.py:load"

[policy]
model = "first/starter"

[rewards.right]
use = "reward.py:right"

[sampling]
max_tokens = 12

[runtime]
workers = 1

[loop]
steps = 1
tasks_per_step = 4
group_size = 4

[validation]
every = 1
"""
ROWS = [{"prompt": f"{day} / 6 / 2011", "answer": str(day), "source": "calendar"} for day in range(1, 9)]
Type: TypeAlias = Callable[..., str]


@pytest.fixture(scope="module")
def folder(first_agent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After `lightningrl init first`, with files of the newcomer's own."""
    folder = tmp_path_factory.mktemp("newcomer")
    shutil.copytree(first_agent, folder / "first")
    (folder / "dates.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    for name, text in {
        "agent.py": AGENT,
        "caching.py": CACHING_AGENT,
        "reward.py": REWARD,
        "held_out.py": HELD_OUT,
        "recipe.toml": RECIPE,
    }.items():
        (folder / name).write_text(text.lstrip(), encoding="utf-8")
    return folder


@pytest.fixture
def typed(folder: Path, warm: WarmCommand) -> Type:
    def run(line: str, status: int = 0) -> str:
        ran = warm.run(*line.split(), cwd=folder, environment={"COLUMNS": "170"})
        said = ran.stdout + ran.stderr
        assert ran.returncode == status and "Traceback" not in said, said
        return said

    return run


def test_data_that_cannot_be_read_is_a_sentence_before_anything_starts(typed: Type, folder: Path) -> None:
    assert typed("lightningrl train recipe.toml --set tasks.train=dats.jsonl", status=2).startswith(
        f"error: tasks.train: '{folder}/dats.jsonl' is not there; tasks are a .jsonl file, one a line"
    )
    assert typed("lightningrl try recipe.toml --set tasks.input=date", status=2) == (
        "error: tasks.train 'dates.jsonl': line 1 has no 'date'; it has: 'prompt', 'answer', 'source'\n"
        "error: tasks.validation 'held_out.py:load': task 0 has no 'date'; it has: 'id', 'input', 'answer', 'metadata'\n"
    )
    checked = typed(
        "lightningrl doctor recipe.toml --brief --set tasks.train=held_out.py:with_dates", status=1
    ).splitlines()
    assert checked[1] == (
        "recipe  fail  tasks.train 'held_out.py:with_dates': task 0 (id '1'): answer is a numpy.datetime64, which is not JSON; give text: "
        "value.astype(str)"
    )
    assert sorted(path.name for path in folder.iterdir() if path.name != "__pycache__") == sorted(
        ["agent.py", "caching.py", "dates.jsonl", "first", "held_out.py", "recipe.toml", "reward.py"]
    ), "nothing was begun"


def test_a_file_and_numpy_are_trained_on_with_math_verify_and_the_list_says_what_came_out(typed: Type) -> None:
    said = typed("lightningrl train recipe.toml --run runs/mine")
    assert "on 8 tasks, 2 held out; " in said and "rewards failed" not in said and "done: 1 step" in said, said
    listed = typed("lightningrl rollouts list --run runs/mine --limit 2").splitlines()
    assert re.split(r" +", listed[1].strip()) == [
        "rollout",
        "task",
        "mode",
        "outcome",
        "reward",
        "calls",
        "input",
        "answer",
        "output",
    ]
    for line, day in zip(sorted(listed[2:]), ("3", "21"), strict=True):
        cells = re.fullmatch(
            r"v000001-000\d +\d +validation +succeeded +(\d\.000) +1 +\d+ / \d+ / \d+ +(\d+) +(\S+) *", line
        )
        assert cells and cells[2] == day and float(cells[1]) == float(cells[3] == day), line
    shown = typed("lightningrl rollouts show g000000-000 --run runs/mine")
    assert re.search(r"^task +train-\d · \d / 6 / 2011", shown, re.MULTILINE)
    assert re.search(r"^answer +\d *$", shown, re.MULTILINE)
    assert re.search(r"^reward +\d\.\d\d\d · right \d\.000 *$", shown, re.MULTILINE), shown


def test_a_client_that_caches_is_named_by_what_it_is(typed: Type) -> None:
    line = "lightningrl train recipe.toml --run runs/cached --set agent=caching.py:answer --set validation.every=0"
    said = " ".join(typed(line, status=1).split())
    sentence = (
        "12 of 16 rollouts made no model call although others of their group did: the agent's client answers from a cache (LangChain's "
        "`set_llm_cache`, DSPy's on disk, litellm's, one of its own), so they repeat what was sampled once, and teach nothing"
    )
    assert f"error: nothing was learned in 1 steps: {sentence}; switch it off for training (run 'runs/cached')" in said
    assert "calls 0.25" in said
