"""Reward by running a command of yours on the agent's output, in a process of its own with bounded time and output.

text ─► FOLDER/output.txt ─► command {output} {task}, text on stdin ─► exit status | stdout ─► reward
task ─► a folder of its own, where the command has `{task}` alone; with `answer`, unless stdout is compared with it

It is no sandbox: a model's program runs with your rights. It can read your files, the environment of your processes in
/proc (and the keys of providers there), and reach the network. Put a sandbox into the command
(`docker run --network none …`, `bwrap …`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from lightningrl.errors import ConfigError
from lightningrl.processes import MARK, ROUNDS, kill, list_living
from lightningrl.sanitize import clean_text
from lightningrl.types import Task, Trajectory
from lightningrl_credit.rewards.matching import Extract, answers_of, pick, spellings, text_of
from lightningrl_credit.rewards.processes import is_function_process, scratch_prefix
from lightningrl_credit.rewards.value import Range, is_allowed

__all__ = ["Execution", "Score"]

Score = Literal["status", "answer", "number"]
MOST_OUTPUT = 64 * 1024
"""Bytes of stdout; a command that writes more is stopped."""
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "SYSTEMROOT", "VIRTUAL_ENV", MARK)
"""Variables that the command is given: no key of a provider is among them."""
_PR_SET_CHILD_SUBREAPER = 36
_INTERPRETERS = ("python", "bash", "sh", "node")
_PROGRAMS = (".py", ".sh", ".js")
_CODE = ("-c", "-e", "-m")
"""Options that are followed by no file."""


class Execution:
    """A command's verdict on the output.

    score = "status"    1.0 for exit status 0, else 0.0
    score = "answer"    1.0 for exit status 0 and the task's answer on stdout, else 0.0
    score = "number"    the number on the last line of stdout

    No trick pays: killed, too late, too much output, another exit status for a number, no number, one that is not
    finite or out of range is 0.0, or the least of a declared range. The reward fails if the command cannot start.
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
        range: Range | None = None,  # noqa: A002
    ) -> None:
        """`command`: `{output}` and `{task}` stand for files with the text and with the task as JSON, `{recipe}` for
        the recipe's folder. It runs in `folder` (relative to the recipe's), or in an empty one that is removed
        afterwards, for `seconds` at most. `range`: the reward's.
        """
        if isinstance(command, str) or not command:
            raise ConfigError(
                f'reward \'execution\': command {command!r} is no list of words; write ["python", "{{output}}"]'
            )
        if score not in get_args(Score):
            raise ConfigError(f"reward 'execution': score {score!r} is none of {', '.join(map(repr, get_args(Score)))}")
        if not seconds > 0:
            raise ConfigError(f"reward 'execution': seconds {seconds!r} is not positive")
        if range is not None and score != "number" and not range[0] <= 0.0 < 1.0 <= range[1]:
            raise ConfigError(
                f"reward 'execution': score {score!r} gives 0 or 1, and range {list(range)!r} lacks one; "
                "write range = [0, 1]"
            )
        base = Path(recipe_folder).resolve()
        where = None if folder is None else base / folder
        if where is not None and not where.is_dir():
            raise ConfigError(f"reward 'execution': no folder {str(where)!r}; make it, or leave it out")
        self.command = tuple(str(word).replace("{recipe}", str(base)) for word in command)
        if (program := _missing_program(self.command, where)) is not None:
            place = "the empty folder where it runs" if where is None else repr(str(where))
            name = "{recipe}/" + Path(program).name
            raise ConfigError(
                f"reward 'execution': no program {program!r} in {place}; beside the recipe it is {name!r}"
            )
        self.score: Score = score
        self.field = field
        self.answer_field = answer_field
        self.seconds = seconds
        self.folder = where
        self.range = range
        self.worst = 0.0 if range is None or score != "number" else range[0]
        """Reward of a program that fails, also one that kills the process that waits for it."""
        self._extract = Extract(extract)

    def __call__(self, task: Task, output: Any, trajectory: Trajectory, /) -> float:
        answers = answers_of(task, self.answer_field) if self.score == "answer" else []
        right = [text.strip() for answer in answers for text in spellings(answer)]
        with tempfile.TemporaryDirectory(prefix=scratch_prefix(), ignore_cleanup_errors=True) as scratch:
            status, stdout = self._run(task, self._extract(text_of(pick(output, self.field))), Path(scratch))
        if status != 0:
            return self.worst
        if self.score == "status":
            return 1.0
        if self.score == "answer":
            return float(stdout.strip() in right)
        try:
            number = float(stdout.strip().rpartition("\n")[2])
        except ValueError:
            return self.worst
        return number if is_allowed(number, self.range) else self.worst

    def _run(self, task: Task, text: str, scratch: Path) -> tuple[int | None, str]:
        """Run the command: exit status, None where it was stopped, and stdout."""
        files = {"{output}": scratch / "output.txt"}
        files["{output}"].write_text(clean_text(text), encoding="utf-8")
        (scratch / "work").mkdir()
        with contextlib.ExitStack() as stack:
            if any("{task}" in word for word in self.command):
                folder = tempfile.TemporaryDirectory(prefix=scratch_prefix(), ignore_cleanup_errors=True)
                files["{task}"] = Path(stack.enter_context(folder)) / "task.json"
                shown = {"id": task.id, "input": task.input, "metadata": dict(task.metadata)}
                if self.score != "answer":
                    shown["answer"] = task.answer
                files["{task}"].write_text(json.dumps(shown, default=str), encoding="utf-8")
            if is_function_process():  # what leaves the command's session becomes a child of this process
                ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            earlier = _list_children()
            process = subprocess.Popen(
                [_fill(word, files) for word in self.command],
                stdin=stack.enter_context(files["{output}"].open("rb")),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=self.folder or scratch / "work",
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                start_new_session=True,
            )
            until = time.monotonic() + self.seconds
            try:
                stdout = _read(process, until)
                status = None if stdout is None else process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                status, stdout = None, None
            finally:
                _kill(process, earlier)
            return status, (stdout or b"").decode("utf-8", "replace")


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


def _read(process: subprocess.Popen[bytes], until: float) -> bytes | None:
    """Read all that it writes; None where that is too much. Raises TimeoutExpired."""
    assert process.stdout is not None
    stdout = b""
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            raise subprocess.TimeoutExpired(process.args, left)
        chunk = os.read(process.stdout.fileno(), 16 * 1024)
        stdout += chunk
        if len(stdout) > MOST_OUTPUT:
            return None
        if not chunk:
            return stdout


def _kill(process: subprocess.Popen[bytes], earlier: frozenset[int]) -> None:
    """Kill it with its session, and in a reward's own process also what left the session, but `earlier` children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    if is_function_process():
        _kill_children(earlier)


def _list_children() -> frozenset[int]:
    """List the children of this process that live."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # as a rule: nobody has to be looked for
        return frozenset()
    return frozenset(list_living(os.getpid()))


def _kill_children(spared: frozenset[int]) -> None:
    """Kill all children of this process but `spared`, and those that it adopts where it is a subreaper (Linux)."""
    for _ in range(ROUNDS):
        children = _list_children() - spared
        kill(children)
        with contextlib.suppress(ChildProcessError):
            for pid in children:
                os.waitpid(pid, 0)
            while not spared and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not children:
            return
