"""`lightningrl rollouts` says what a person looks for, on a terminal of 80 columns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightningrl.commands import app
from lightningrl.records import Score
from lightningrl.types import Outcome, RolloutMode, RolloutSpec, Task
from lightningrl_client.runtime.report import describe
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import make_spec

LONG = "s000039-0001-006"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")

    async def fill() -> None:
        store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
        await store.create_rollouts([make_spec(LONG), make_spec("v000040-0159", mode=RolloutMode.VALIDATION)])
        await store.lease("w", 60.0)
        await store.finish_attempt(LONG, 1, Outcome.AGENT_ERROR, error=_failure())
        await store.close()

    asyncio.run(fill())
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    return tmp_path


def _failure() -> str:
    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        raise RuntimeError("the search engine is closed on Sundays")

    with pytest.raises(RuntimeError) as raised:
        deep(40)
    return describe(raised.value)


def ask(*words: str) -> str:
    answer = CliRunner().invoke(app, ["rollouts", *words])
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_a_list_fits_80_columns_with_ids_and_outcomes_whole(run: Path) -> None:
    lines = ask("list", "--run", str(run)).splitlines()
    failed = next(line for line in lines if line.startswith(LONG))
    assert failed.split()[:7] == [LONG, "t", "train", "agent_error", "-", "0", "RuntimeError:"]
    assert failed.endswith("…") and max(map(len, lines)) <= 80
    assert any(line.split()[:4] == ["v000040-0159", "t", "validation", "queued"] for line in lines)


def test_a_failed_rollout_is_shown_with_what_was_raised_and_the_end_of_its_traceback(run: Path) -> None:
    said = ask("show", LONG, "--run", str(run))
    lines = [line.rstrip() for line in said.splitlines()]
    (error,) = (line for line in lines if line.startswith("error"))
    assert error.split(maxsplit=1)[1] == "RuntimeError: the search engine is closed on Sundays"
    assert '    raise RuntimeError("the search engine is closed on Sundays")' in lines[-3:], (
        "as Python writes it, over the whole width"
    )
    frame = next(number for number, line in enumerate(lines) if line.startswith('  File "'))
    said = " ".join(" ".join(lines[frame:]).split())  # a line is broken where the folder of this file is long
    assert frame > lines.index(error) and said.count("in deep") >= 3
    assert not any(line.startswith("output") for line in lines)


def test_a_long_task_id_leaves_the_rollouts_ids_and_rewards_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    task = "a-data-set/train/which-names-its-tasks-at-length-00012345"

    async def fill() -> None:
        store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
        await store.create_rollouts([RolloutSpec(id=LONG, task=Task(id=task, input="q"), group_id="g")])
        await store.lease("w", 60.0)
        await store.finish_attempt(LONG, 1, Outcome.CONTEXT_OVERFLOW)
        await store.set_scores([Score(rollout_id=LONG, attempt=1, rewards={"right": 0.5}, reward=0.5, advantages={})])
        await store.close()

    asyncio.run(fill())
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    said = ask("list", "--run", str(tmp_path))
    line = next(line for line in said.splitlines() if line.startswith(LONG))
    assert line.split()[2:] == ["train", "context_overflow", "0.500", "0"], "as before a task's id was long"
    assert "…" not in said


def test_a_task_id_with_line_breaks_stays_on_its_line(tmp_path: Path) -> None:
    async def fill() -> None:
        store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
        await store.create_rollouts([RolloutSpec(id="r0", task=Task(id="a\r\n b", input="q"), group_id="g")])
        await store.close()

    asyncio.run(fill())
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    assert ask("list", "--run", str(tmp_path)).splitlines()[-1].split()[:3] == ["r0", "a", "b"]


@pytest.fixture
def answered(tmp_path: Path) -> Path:
    """Three rollouts of a task: one that is right at its second try, one that writes what a terminal obeys, one that
    runs."""

    async def fill() -> None:
        store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
        task = Task(id="sum", input={"question": "2 + 3"}, answer="5")
        await store.create_rollouts(
            [RolloutSpec(id=name, task=task, group_id="g", max_attempts=2) for name in ("r0", "r1", "r2")]
        )
        first = await store.lease("w", 60.0)
        await store.finish_attempt("r0", 1, Outcome.INFRASTRUCTURE_ERROR, error="the server was away")
        for name, output in (("r0", "It is 5"), ("r1", {"said": "\x1b[2J\u202e[bold]6\n\n" + "x" * 500})):
            lease = first if first and name != first.rollout_id else await store.lease("w", 60.0)
            lease = lease if lease and lease.rollout_id == name else await store.lease("w", 60.0)
            assert lease is not None
            await store.finish_attempt(lease.rollout_id, lease.attempt, Outcome.SUCCEEDED, output=output)
        await store.set_scores([Score(rollout_id="r1", attempt=1, reward=0.25)])
        await store.mark_trained(3, ["r1"], {})
        await store.close()

    asyncio.run(fill())
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("width", [80, 125, 160])
def test_a_list_says_what_came_out_and_nothing_of_it_is_obeyed(
    answered: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    said = ask("list", "--run", str(answered))
    head, *rows = (line for line in said.splitlines() if line[:2] in ("ro", "r0", "r1", "r2"))
    columns = head.split()
    assert columns[:8] == ["rollout", "task", "mode", "outcome", "reward", "calls", "attempts", "trained"]
    assert columns[8:] == ["input"] * (width >= 150) + ["answer"] * (width >= 120) + ["output"]
    by_id = {row.split()[0]: row for row in rows}
    assert "It is 5" in by_id["r0"] and by_id["r0"].split()[6] == "2"
    assert "\x1b" not in said and "\u202e" not in said and max(map(len, said.splitlines())) <= width
    assert by_id["r1"].rstrip().endswith("…") and ("[bold]6" in by_id["r1"] or width < 160)
    assert by_id["r2"].split()[3] == "queued"
    assert ('"question"' in by_id["r0"]) == (width >= 150)


def test_a_list_as_json_has_outputs_whole(answered: Path) -> None:
    rows = {row["rollout"]: row for row in map(json.loads, ask("list", "--run", str(answered), "--json").splitlines())}
    assert [rows["r0"][name] for name in ("input", "answer", "output", "error")] == [
        {"question": "2 + 3"},
        "5",
        "It is 5",
        None,
    ]
    assert rows["r1"]["output"]["said"].endswith("x" * 500) and rows["r2"]["output"] is None
