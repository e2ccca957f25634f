"""Runs a program in a rollout's folder: output and disk bounded, SIGTERM before SIGKILL for all that it started.

started ─┬─ ends by itself ───────► what it left behind is killed
         ├─ writes too much ──────► ended, CommandFailed
         └─ time over, cancelled ─► SIGTERM, GRACE_S, SIGKILL
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from lightningrl_client.runtime.command import CommandFailed, kept_program
from lightningrl_client.runtime.harnesses import guard
from lightningrl_client.runtime.harnesses.folder import Room, in_thread
from lightningrl_client.runtime.worker_process import bound_log

__all__ = ["ProgramOutput", "run_program"]

GRACE_S: Final = 3.0
"""Seconds between SIGTERM and SIGKILL; a worker whose attempt is over is killed after five."""
LOOK_S: Final = 0.5
"""Between two looks at its files."""
MOST_OUTPUT: Final = 8 * 2**20
"""Bytes of stdout or stderr before it is cut to its end."""
KEPT_OUTPUT: Final = 64 * 1024
"""Bytes of the end that is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramOutput:
    """A program that has ended."""

    status: int
    output: str
    """The end of its stdout."""
    errors: str
    """The end of its stderr."""


async def run_program(
    command: Sequence[str],
    room: Room,
    environment: Mapping[str, str],
    *,
    most_bytes: int,
    stdin: str = "",
    one_output: bool = False,
) -> ProgramOutput:
    """Run a command in the room's working folder. `one_output`: stderr goes where stdout goes. Raises CommandFailed
    where it cannot start, or writes more than `most_bytes` into the room; FolderError."""
    room.refuse_links()
    with contextlib.ExitStack() as files:
        output = files.enter_context(_log(room.log / "stdout"))
        errors = output if one_output else files.enter_context(_log(room.log / "stderr"))
        given = files.enter_context(_log(room.log / "stdin"))
        given.write(stdin.encode())
        given.seek(0)
        streams = {"stdin": given, "stdout": output, "stderr": errors}
        try:
            async with kept_program(
                command, grace_s=GRACE_S, most_bytes=most_bytes, cwd=room.work, env=environment, **streams
            ) as process:
                await _watch(process, room, (output, errors), most_bytes, command[0])
        finally:  # what killed its keeper, and still names a folder of the room
            await in_thread(guard.end_inhabitants, str(room.place))
        assert process.returncode is not None
        return ProgramOutput(
            status=process.returncode, output=_read_end(output), errors="" if one_output else _read_end(errors)
        )


async def _watch(
    process: asyncio.subprocess.Process, room: Room, logs: Sequence[IO[bytes]], most_bytes: int, name: str
) -> None:
    """Wait for its end. Raises CommandFailed once the room holds more than `most_bytes`."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=LOOK_S)
            for log in logs:
                bound_log(log, MOST_OUTPUT)
            if (used := await in_thread(room.used_bytes, process.pid)) > most_bytes:
                raise CommandFailed(
                    f"{name!r} had {used / 2**20:.0f} MiB in its folders, more than agent.disk_mb = "
                    f"{most_bytes / 2**20:g}; it was ended: raise the limit, or look at what it writes"
                )
    finally:
        waiting.cancel()


def _log(path: Path) -> IO[bytes]:
    path.unlink(missing_ok=True)  # the program before may have put a link there
    return os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600), "r+b", buffering=0)


def _read_end(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), KEPT_OUTPUT, max(0, size - KEPT_OUTPUT)).decode(errors="replace").strip()
