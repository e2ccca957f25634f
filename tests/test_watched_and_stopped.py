"""A run that somebody sits beside: its curve is drawn while it goes on, and Ctrl-C ends all of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from processes import TrainRun
from warm import WarmCommand

SMALL = (
    "validation.every=1",
    "validation.tasks=2",
    "loop.tasks_per_step=1",
    "loop.group_size=2",
    "runtime.workers=1",
    "loop.steps=60",
)


@pytest.mark.slow
def test_the_curve_is_drawn_while_the_run_goes_on_and_ctrl_c_says_so_and_ends_every_process(
    first_agent: Path, warm: WarmCommand, tmp_path: Path
) -> None:
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    curve = run.folder / "curve.png"
    try:
        run.start(str(first_agent), *(word for setting in SMALL for word in ("--set", setting)))
        run.wait_for(curve.is_file)
        before = curve.read_bytes()
        run.wait_for(
            lambda: curve.read_bytes() != before and bool(run.children("server")) and bool(run.children("worker"))
        )
        os.killpg(run.trainer.pid, signal.SIGINT)  # as a terminal does: all of its group are told
        assert run.wait() == 130, run.describe()
        assert "stopping: what runs is ended, which takes some seconds" in run.said()
        assert "stopped; nothing is lost: go on with `lightningrl train --resume --run" in run.said()
        assert "Traceback" not in run.said()
        run.wait_for_orphans()
        assert {process.role for process in run.seen} == {"server", "worker"}
        assert b"IEND" in curve.read_bytes()[-12:], "the picture is whole"
    finally:
        run.close()
