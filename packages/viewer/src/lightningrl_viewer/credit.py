"""Questions of the credit page to a run: X-rays, computed by a process of their own.

    page ─► CreditXRays.ask(Question) ─► stdin │ process: every method, kept by step │ stdout ─► Answer

The process runs the module that an installed package, lightningrl-training, names as an entry point; the server's event
loop and memory stay with the agents.
"""

from __future__ import annotations

import asyncio
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import msgspec

from lightningrl.errors import LightningError
from lightningrl_runs.xray import Answer, Question
from lightningrl_server.store.errors import UnknownRecord

__all__ = ["CreditXRays"]

ENTRY_POINTS: Final = "lightningrl_viewer.xray"
"""Group of entry points; its `process` is a module that, run with a folder, answers each `Question` on a line."""
LONGEST_S: Final = 600.0
"""Seconds of one X-ray; a method of the user's may never end."""


class CreditXRays:
    """Asks for one run's X-rays. Nothing is started before somebody asks."""

    def __init__(self, folder: Path) -> None:
        self._steps = _Process(folder)
        self._run = _Process(folder)
        """A whole run takes longer; a step need not wait for it."""

    async def ask(self, question: Question) -> Answer:
        """Compute an X-ray. Raises UnknownRecord where there is no such rollout, group or step, LightningError where it
        failed."""
        process = self._run if question.whole else self._steps
        line = await asyncio.get_running_loop().run_in_executor(
            process.thread, process.ask, msgspec.json.encode(question)
        )
        answer = msgspec.json.decode(line, type=Answer)
        if answer.xray is None:
            raise (LightningError if answer.is_defect else UnknownRecord)(answer.error)
        return answer

    def close(self) -> None:
        for process in (self._steps, self._run):
            process.close()


class _Process:
    """Process that is started with the first question, and anew where it has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="xray")
        """Waits for it: the event loop's own threads are for the agents' calls."""

    def ask(self, line: bytes) -> bytes:
        """Return the answer; from any thread. Raises LightningError."""
        with self._lock:
            for _ in range(2):  # one that was idle may end just now
                if self._is_closed:
                    break
                process = self._running()
                assert process.stdin is not None and process.stdout is not None
                try:
                    process.stdin.write(line + b"\n")
                    process.stdin.flush()
                except OSError:
                    self._end()
                    continue
                if not select.select([process.stdout], [], [], LONGEST_S)[0]:
                    self._end()
                    raise LightningError(
                        f"the X-ray was stopped after {LONGEST_S:.0f} s; `lightningrl xray` shows what takes so long"
                    )
                if answer := process.stdout.readline():
                    return answer
                self._end()
            raise LightningError("the X-ray's process ended without an answer; `lightningrl xray` says why")

    def close(self) -> None:
        """End the process; whoever waits for an answer gets none."""
        self._is_closed = True
        self.thread.shutdown(wait=False, cancel_futures=True)
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            modules = [found.module for found in entry_points(group=ENTRY_POINTS, name="process")]
            if not modules:
                raise LightningError(
                    "X-rays are computed by lightningrl-training, which is not installed here; "
                    "it comes with: pip install 'lightningrl[torch]'"
                )
            command = [sys.executable, "-m", modules[0], str(self._folder)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
