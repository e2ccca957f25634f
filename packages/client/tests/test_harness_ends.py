"""Harnesses and workers that are killed in mid-rollout: nothing is lost, and no folder and no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import pytest
from processes import all_ended, is_alive, written
from sizes import PATIENCE_S, sized
from small_harness import ROW, reply

from lightningrl.types import Outcome, RolloutSpec, SamplingSettings, Task
from lightningrl_client.runtime.harnesses.agent import HarnessAgent
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import running_services

KILLS = sized(4, 20)


@pytest.mark.slow
async def test_a_harness_or_worker_that_is_killed_leaves_no_folder_and_no_process_and_its_rollout_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt of each rollout hangs: every second time its harness is killed, else its worker."""
    rooms, pids = tmp_path / "tmp", tmp_path / "pids"
    rooms.mkdir()
    pids.mkdir()
    monkeypatch.setenv("TMPDIR", str(rooms))
    engine = ScriptedEngine(tiny_tokenizer(), reply=reply, chunk_tokens=32)
    async with running_services(tmp_path, engine=engine) as path:
        async with path.workers({"harness": ROW}, base_dir=tmp_path, workers=1):
            for number in range(KILLS):
                file = pids / str(number)
                hang = f"test -e {file} || {{ setsid sleep 100000 & echo $PPID $$ $! > {file}; sleep 100000; }}"
                task = Task(id=f"t{number}", input=f"do «{hang}»")
                roomy = SamplingSettings(max_tokens=1024)  # a character is a token, and commands have long paths
                spec = RolloutSpec(id=f"r{number}", task=task, group_id="g", max_attempts=3, sampling=roomy)
                await path.client.create_rollouts([spec])
                await written(file, words=3)
                harness = int(file.read_text().split()[0])
                (before,) = rooms.iterdir()
                is_worker = number % 2
                async with all_ended(file):
                    os.kill(os.getsid(harness) if is_worker else harness, signal.SIGKILL)  # a worker leads the session
                    await path.client.wait([spec.id], PATIENCE_S)
                (trajectory,) = await path.client.trajectories([spec.id])
                if is_worker:
                    assert (trajectory.outcome, trajectory.attempt) == (Outcome.SUCCEEDED, 2), trajectory.error
                    await gone(before)
                else:
                    assert trajectory.outcome is Outcome.AGENT_ERROR
                    assert "ended with status -9" in (trajectory.error or "")
        async with asyncio.timeout(PATIENCE_S):
            while list(rooms.iterdir()):
                await asyncio.sleep(0.05)


async def gone(folder: Path) -> None:
    """Returns when the folder is no more."""
    async with asyncio.timeout(PATIENCE_S):
        while folder.exists():
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_harness_that_hears_no_sigterm_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pids = tmp_path / "pids"
    deaf = f"trap '' TERM; sleep 100000 & echo $$ $! > {pids}; while true; do wait; done"
    agent = HarnessAgent({"command": ["/bin/sh", "-c", deaf]})
    running = asyncio.create_task(agent("x"))
    async with all_ended(pids):
        await written(pids, words=2)
        (room,) = tmp_path.glob("lightningrl-harness-*/*")
        running.cancel()
        await asyncio.sleep(0.5)
        running.cancel()  # one who is cancelled again ends no sooner
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not room.exists()
    assert not any(is_alive(int(pid)) for pid in pids.read_text().split())
