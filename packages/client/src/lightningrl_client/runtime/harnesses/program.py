"""Runs programs in a rollout's folder: the harness, and the command that checks what it has done.

started ─┬─ ends by itself ───────► what it left behind is killed          output and disk are bounded
         ├─ writes too much ──────► ended, CommandFailed
         └─ time over, cancelled ─► SIGTERM, GRACE_S, SIGKILL, for all that it started

In a box it has no network: a socket in the rollout's folders leads to the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import urlsplit

from lightningrl.errors import ConfigError
from lightningrl_client.runtime.command import CommandFailed, kept_program
from lightningrl_client.runtime.harnesses import box, guard
from lightningrl_client.runtime.harnesses.folder import FolderError, Room, in_thread
from lightningrl_client.runtime.worker_process import bound_log

__all__ = [
    "ProgramOutput",
    "boxed_command",
    "count_tests",
    "opened_gate",
    "require_boxes",
    "run_check",
    "run_program",
]

GRACE_S: Final = 3.0
"""Seconds between SIGTERM and SIGKILL; a worker whose attempt is over is killed after five."""
LOOK_S: Final = 0.5
"""Between two looks at its files."""
MOST_OUTPUT: Final = 8 * 2**20
"""Bytes of stdout or stderr before it is cut to its end."""
KEPT_OUTPUT: Final = 64 * 1024
"""Bytes of the end that is read."""
LONGEST_SAID: Final = 2_000
"""Characters of the check's output that are kept: its end."""
LONGEST_SOCKET: Final = 100
"""Bytes of a socket's path, which the system bounds."""
_COUNT: Final = re.compile(r"(\d+) (passed|failed|failures?|errors?)\b")
_SUMMARY: Final = re.compile(r"^.*\b\d+ (?:passed|failed)\b.*$", re.MULTILINE)
_UNITTEST: Final = re.compile(r"^Ran (\d+) tests? in .*\n+(?:OK|FAILED)(.*)$", re.MULTILINE)
_UNITTEST_BAD: Final = re.compile(r"\b(?:failures|errors|unexpected successes)=(\d+)")
_GO: Final = re.compile(r"^\s*--- (PASS|FAIL): ", re.MULTILINE)
_TAP: Final = re.compile(r"^(not )?ok\b", re.MULTILINE)


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


async def run_check(
    words: Sequence[str], room: Room, environment: Mapping[str, str], *, seconds: float, most_bytes: int
) -> dict[str, Any]:
    """Run it in the room's working folder: `status` (None = it ran longer than `seconds`), `passed` and
    `failed` (None = the output does not say), `said`, the end of its output."""
    try:
        async with asyncio.timeout(seconds):
            ended = await run_program(words, room, environment, most_bytes=most_bytes, one_output=True)
    except TimeoutError:
        return {"status": None, "passed": None, "failed": None, "said": f"the check ran longer than {seconds:g} s"}
    passed, failed = count_tests(ended.output) or (None, None)
    return {"status": ended.status, "passed": passed, "failed": failed, "said": ended.output[-LONGEST_SAID:]}


def count_tests(text: str) -> tuple[int, int] | None:
    """Tests that passed and failed, by the last summary in a runner's output; None where there is none."""
    if summaries := _SUMMARY.findall(text):
        counts = [(int(number), word) for number, word in _COUNT.findall(summaries[-1])]
        passed = sum(number for number, word in counts if word == "passed")
        return passed, sum(number for number, word in counts if word != "passed")
    if summaries := list(_UNITTEST.finditer(text)):
        failed = sum(map(int, _UNITTEST_BAD.findall(summaries[-1][2])))
        return max(0, int(summaries[-1][1]) - failed), failed
    if results := _GO.findall(text):
        return results.count("PASS"), results.count("FAIL")
    if marks := _TAP.findall(text):
        return marks.count(""), len(marks) - marks.count("")
    return None


def boxed_command(command: Sequence[str], room: Room, port: int) -> list[str]:
    """The command in a box; `port` 0 = without a way to the gateway."""
    return [sys.executable, "-I", "-S", box.__file__, str(port), str(room.place / "gate"), *command]


def require_boxes() -> None:
    """Raise ConfigError where this machine gives no namespaces."""
    command = (sys.executable, "-I", "-S", box.__file__, "0", "-", "true")
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        raise ConfigError(
            f"agent.network = 'gateway' needs user namespaces, which are not to be had here: "
            f"{tried.stderr.strip()[-200:]}; leave it out, or run workers where `unshare -rnpfm true` works"
        )


@contextlib.asynccontextmanager
async def opened_gate(
    server_url: str, room: Room, variables: Mapping[str, str]
) -> AsyncIterator[tuple[int, dict[str, str]]]:
    """While it is open, connections to the room's socket reach the server. Gives the port that the box listens on, and
    the variables with addresses of the box. Raises FolderError."""
    address, path = urlsplit(server_url), str(room.place / "gate")
    if address.scheme != "http" or address.hostname is None or len(path.encode()) > LONGEST_SOCKET:
        raise FolderError(
            f"agent.network = 'gateway' needs a server at http://… and a temporary folder with a short path, got "
            f"{server_url!r} and {path!r}; set TMPDIR, or leave it out"
        )
    host, port = address.hostname, address.port or 80

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(host, port)
            await asyncio.gather(_copy(reader, back), _copy(there, writer), return_exceptions=True)
            back.close()
        writer.close()

    own = {"NO_PROXY": "*", "no_proxy": "*"}
    boxed = {name: value.replace(server_url, f"http://127.0.0.1:{port}") for name, value in variables.items()}
    async with await asyncio.start_unix_server(serve, path):
        yield port, {**boxed, **own}


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(box.CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
