"""Reward by running a command of yours on what the agent returned, in a process of its own with bounded time and output.

text ─► FOLDER/output.txt, task ─► FOLDER/task.json ─► command {output} {task}, text on stdin ─► exit status | stdout ─► reward

It is no sandbox: what a model wrote runs with your rights. Put one into the command (`docker run --network none …`, `bwrap …`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from lightningrl.clean import clean_text
from lightningrl.errors import ConfigError
from lightningrl.rewards.fields import Extract, answers_of, pick, text_of
from lightningrl.types import Task, Trajectory

__all__ = ["Execution", "Score"]

Score = Literal["status", "answer", "number"]
MOST_OUTPUT = 64 * 1024
"""Bytes of stdout; a command that writes more is stopped."""
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT", "VIRTUAL_ENV")
"""Of the environment: no key of a provider reaches what a model wrote."""
_INTERPRETERS = ("python", "bash", "sh", "node")
_PROGRAMS = (".py", ".sh", ".js")
_CODE = ("-c", "-e", "-m")
"""What follows is no file."""


class Execution:
    """A command's verdict on the output.

    score = "status"    1.0 for exit status 0, else 0.0
    score = "answer"    1.0 for exit status 0 and the task's answer on stdout, else 0.0
    score = "number"    the number on the last line of stdout; 0.0 for another exit status than 0

    Too late, too much output: 0.0. A command that cannot be started, or that says no number: the reward fails.
    """

    def __init__(
        self,
        *,
        command: Sequence[str],
        score: Score = "status",
        field: str | None = None,
        extract: str | None = None,
        answer_field: str | None = None,
        seconds: float = 10.0,
        folder: str | None = None,
        recipe_folder: Path | str = ".",
    ) -> None:
        """`command`: `{output}` and `{task}` stand for files with the text and with the task as JSON, `{recipe}` for the recipe's folder.
        It runs in `folder` (relative to the recipe's), or in an empty one that is removed afterwards. `seconds` it may take."""
        if isinstance(command, str) or not command:
            raise ConfigError(f'reward \'execution\': command {command!r} is no list of words; write ["python", "{{output}}"]')
        if score not in get_args(Score):
            raise ConfigError(f"reward 'execution': score {score!r} is none of {', '.join(map(repr, get_args(Score)))}")
        if not seconds > 0:
            raise ConfigError(f"reward 'execution': seconds {seconds!r} is not positive")
        base = Path(recipe_folder).resolve()
        where = None if folder is None else base / folder
        if where is not None and not where.is_dir():
            raise ConfigError(f"reward 'execution': no folder {str(where)!r}; make it, or leave it out")
        self.command = tuple(str(word).replace("{recipe}", str(base)) for word in command)
        if (program := _missing_program(self.command, where)) is not None:
            place = "the empty folder where it runs" if where is None else repr(str(where))
            name = "{recipe}/" + Path(program).name
            raise ConfigError(f"reward 'execution': no program {program!r} in {place}; beside the recipe it is {name!r}")
        self.score: Score = score
        self.field = field
        self.answer_field = answer_field
        self.seconds = seconds
        self.folder = where
        self._extract = Extract(extract)

    async def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        right = [text_of(answer).strip() for answer in answers_of(task, self.answer_field)] if self.score == "answer" else []
        with tempfile.TemporaryDirectory(prefix="lightningrl-", ignore_cleanup_errors=True) as scratch:
            status, said = await self._run(task, self._extract(text_of(pick(output, self.field))), Path(scratch))
        if status != 0:
            return 0.0
        if self.score == "status":
            return 1.0
        if self.score == "answer":
            return float(said.strip() in right)
        last = said.strip().rpartition("\n")[2]
        try:
            return float(last)
        except ValueError:
            raise ValueError(f"the command's last line is {last[:80]!r}, no number; print one, or set score = 'status'") from None

    async def _run(self, task: Task, text: str, scratch: Path) -> tuple[int | None, str]:
        """Exit status, None where it was stopped, and stdout."""
        files = {"{output}": scratch / "output.txt", "{task}": scratch / "task.json"}
        text = clean_text(text)
        files["{output}"].write_text(text, encoding="utf-8")
        told = {"id": task.id, "input": task.input, "answer": task.answer, "metadata": dict(task.metadata)}
        files["{task}"].write_text(json.dumps(told, default=str), encoding="utf-8")
        command = [_fill(word, files) for word in self.command]
        (scratch / "work").mkdir()
        reading, writing = os.pipe()
        try:
            with files["{output}"].open("rb") as given:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=given,
                    stdout=writing,
                    stderr=asyncio.subprocess.DEVNULL,
                    cwd=self.folder or scratch / "work",
                    env={name: os.environ[name] for name in _KEPT if name in os.environ},
                    start_new_session=True,
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        status, said = None, None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.seconds):
                    said = await _read(reading)
                    status = None if said is None else await process.wait()
        finally:
            _kill(process)  # and whatever it started
            await process.wait()
        return status, (said or b"").decode("utf-8", "replace")


def _missing_program(command: Sequence[str], folder: Path | None) -> str | None:
    """A program that an interpreter is to run and that is not where it will look: each output would earn 0."""
    if not Path(command[0]).name.startswith(_INTERPRETERS):
        return None
    for word in command[1:]:
        if word in _CODE:
            return None
        if not word.startswith("-"):
            can_be_there = folder is not None or Path(word).is_absolute()
            is_there = can_be_there and ((folder or Path()) / word).is_file()
            return word if word.endswith(_PROGRAMS) and "{" not in word and not is_there else None
    return None


def _fill(word: str, files: dict[str, Path]) -> str:
    for name, path in files.items():
        word = word.replace(name, str(path))
    return word


async def _read(pipe: int) -> bytes | None:
    """All that is written to a pipe, which is closed then; None where it is too much."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb"))
    said = b""
    try:
        while len(said) <= MOST_OUTPUT and (chunk := await reader.read(16 * 1024)):
            said += chunk
    finally:
        transport.close()
    return said if len(said) <= MOST_OUTPUT else None


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
