"""`lightningrl rollouts` says what a person looks for, on a terminal of 80 columns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightningrl.cli.app import app
from lightningrl.runtime.report import describe
from lightningrl.store import SqlStore
from lightningrl.store.protocol import Score
from lightningrl.testing.store_conformance import make_spec
from lightningrl.types import Outcome, RolloutMode, RolloutSpec, Task

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
    assert failed.split() == [LONG, "t", "train", "agent_error", "-", "0", "1", "-"]
    assert any(line.split()[:4] == ["v000040-0159", "t", "validation", "queued"] for line in lines)


def test_a_failed_rollout_is_shown_with_what_was_raised(run: Path) -> None:
    assert "RuntimeError: the search engine is closed on Sundays" in ask("show", LONG, "--run", str(run))


def test_a_long_task_id_leaves_the_rollouts_ids_and_rewards_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert line.split()[2:] == ["train", "context_overflow", "0.500", "0", "1", "-"], "as before a task's id was long"
    assert "…" not in said
