"""`lightningrl view` and `report`, and the link that `train` prints: what is wrong is one sentence."""

from __future__ import annotations

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from sizes import PATIENCE_S
from sqlalchemy import Connection
from typer.testing import CliRunner

from lightningrl.commands import app
from lightningrl.errors import LightningError, RunFolderError, ServerError
from lightningrl_runs.queries.rollout_index import RolloutIndex
from lightningrl_viewer.app import viewer_of


def refused(*words: str) -> LightningError:
    answer = CliRunner().invoke(app, [*words])
    assert isinstance(answer.exception, LightningError), answer.output
    assert "\n" not in str(answer.exception)
    return answer.exception


def test_what_is_no_run_is_refused_with_what_to_name(tmp_path: Path) -> None:
    error = refused("view", str(tmp_path), "--no-browser")
    assert isinstance(error, RunFolderError)
    assert str(error) == f"no run in {str(tmp_path)!r}, nor below it; name a run folder, or a folder of runs"
    assert "no run below" in str(refused("view", "--runs", str(tmp_path)))
    assert "no store in" in str(refused("report", str(tmp_path)))


@pytest.mark.parametrize("other", ["{}", "no JSON", '{"models": 3}'])
def test_a_file_of_another_program_called_run_json_makes_no_run(tmp_path: Path, other: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.json").write_text(other)
    assert "no run in" in str(refused("view", str(tmp_path), "--no-browser"))
    assert "no run in" in str(refused("view", str(tmp_path / "elsewhere"), "--no-browser"))


def test_a_database_of_something_else_is_refused(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "store.sqlite")) as db, db:
        db.execute("CREATE TABLE mine (x)")
    assert "is a database of something else" in str(refused("view", str(tmp_path), "--no-browser"))


def test_a_store_of_another_version_is_refused_by_name(recorded_run: Path, tmp_path: Path) -> None:
    with (
        closing(sqlite3.connect(recorded_run / "store.sqlite")) as db,
        closing(sqlite3.connect(tmp_path / "store.sqlite")) as copy,
    ):
        db.backup(copy)
        copy.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
        copy.commit()
    assert "has schema version 99, and this lightningrl reads version" in str(
        refused("view", str(tmp_path), "--no-browser")
    )


def test_a_port_in_use_is_named(recorded_run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        error = refused("view", str(recorded_run), "--no-browser", "--port", str(port))
    assert isinstance(error, ServerError) and f"cannot listen on 127.0.0.1:{port}" in str(error)


def test_a_report_that_cannot_be_written_is_a_sentence(recorded_run: Path, tmp_path: Path) -> None:
    assert "the report cannot be written to" in str(
        refused("report", str(recorded_run), "--html", str(tmp_path / "no" / "a.html"))
    )


def test_a_report_is_its_owners_and_replaces_only_a_report(recorded_run: Path, tmp_path: Path) -> None:
    report, mine = tmp_path / "report.html", tmp_path / "mine.html"
    for _ in range(2):
        assert CliRunner().invoke(app, ["report", str(recorded_run), "--html", str(report)]).exit_code == 0
        assert report.stat().st_mode & 0o777 == 0o600
    mine.write_text("<!doctype html>mine")
    assert "mine.html' is there already, and no report; give another file: --html" in str(
        refused("report", str(recorded_run), "--html", str(mine))
    )
    assert mine.read_text() == "<!doctype html>mine"


async def test_every_rollout_is_read_before_the_link_is_printed(
    recorded_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for the first page."""
    counts: list[int] = []

    def update(index: RolloutIndex, db: Connection) -> None:
        read(index, db)
        counts.append(len(index.rows))

    read = RolloutIndex.update
    monkeypatch.setattr(RolloutIndex, "update", update)
    async with viewer_of(recorded_run, "a-key", is_run=True):
        assert len(counts) == 1 and counts[0] > 0


def test_the_command_shows_a_run_and_goes_with_ctrl_c(recorded_run: Path) -> None:
    command = [sys.executable, "-m", "lightningrl", "view", str(recorded_run), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        try:
            assert viewer.stdout is not None
            link = re.search(r"http://\S+", viewer.stdout.readline())
            assert link is not None
            with httpx.Client(follow_redirects=True, timeout=PATIENCE_S) as browser:
                page = browser.get(link[0])
            assert page.status_code == 200 and "Reward by step" in page.text and "key=" not in str(page.url)
            os.kill(viewer.pid, signal.SIGINT)
            assert viewer.wait(PATIENCE_S) == 0
        finally:
            viewer.kill()


def test_train_prints_where_to_look(recorded_run: Path) -> None:
    said = (recorded_run.parents[1] / "said.txt").read_text()
    assert re.search(r"^look on: http://127\.0\.0\.1:\d+/view/\?key=[0-9a-f]{64}$", said, re.MULTILINE)
    assert "lightningrl view runs/first" in said


@pytest.mark.parametrize("command", ["view", "report"])
def test_help_teaches_by_example(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120"}).output
    assert f"lightningrl {command} runs/mine" in said
