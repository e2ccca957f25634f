"""Box by a container command, docker or podman: its container ends when its stdin does, so with this process.

What the kill of everything at once leaves, the next start removes by its label, where the process that is named there
lives no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import tarfile
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import IO, Final

from lightningrl_tasks_harbor.boxes import LONGEST_OUTPUT, BoxError, BoxGone, CommandResult, pack

__all__ = ["ContainerBox", "build_image", "find_engine", "remove_orphans", "try_engine"]

logger = logging.getLogger(__name__)

ENGINES: Final = ("docker", "podman")
LABEL: Final = "lightningrl.harbor"
EMPTY: Final = "localhost/lightningrl-harbor-empty:1"
"""Image without a file."""
NO_PROGRAM: Final = 127
"""Status of a container that was started and has not the program that it should run."""
PATIENCE_S: Final = 60.0
MOST_BYTES: Final = 1 << 20
"""Bytes of a container command's output that are read: programs of the box write them, which an agent may replace."""
KILL: Final = "kill -9 -1"
KILLED: Final = 137
# podman would raise both to the kernel's own, which a machine within another may not
PLAIN_LIMITS: Final = ("--pids-limit", "512", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")
BOUNDED: Final = """
file=$(mktemp) || exit 1
timeout -s KILL "$1" /bin/bash -c "$2" > "$file" 2>&1 < /dev/null
status=$?
size=$(wc -c < "$file")
if [ "$size" -le "$3" ]; then
    cat "$file"
else
    half=$(($3 / 2))
    head -c "$half" "$file"
    printf '\\n[%d bytes left out]\\n' $((size - half - half))
    tail -c "$half" "$file"
fi
rm -f "$file"
exit "$status"
"""
"""A file takes the output: what goes on in the background holds no pipe that somebody waits for."""


@lru_cache(maxsize=1)
def find_engine() -> str | None:
    """Find a container command that runs containers; None = there is none. Asked once in a process."""
    for engine in filter(shutil.which, ENGINES):
        complaint = try_engine(engine)
        if complaint is None:
            return engine
        logger.warning("%s is here and opens no box: %s; look at `%s info`", engine, complaint, engine)
    return None


def try_engine(engine: str) -> str | None:
    """Let it start a container as a box is started, of an image without a file; return its complaint, None = it does.
    `info` alone answers where no container can start: on a machine within another, say."""
    try:
        if _ask(engine, "image", "inspect", EMPTY, check=False).returncode != 0:
            _ask(engine, "import", "-", EMPTY, content=pack(()))
        program = ("--entrypoint", "/none")
        started = _ask(engine, "run", "--rm", *program, *PLAIN_LIMITS, "--network", "none", EMPTY, check=False)
    except (OSError, BoxError) as error:
        return str(error)
    if started.returncode == NO_PROGRAM:
        return None
    return (started.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]


def build_image(engine: str, environment: Path, timeout_s: float) -> str:
    """Build the image of a task's `environment` folder, once for the same files, and name it. Raises BoxError."""
    digest = hashlib.sha256()
    for path in sorted(environment.rglob("*")):
        digest.update(str(path.relative_to(environment)).encode() + b"\0")
        if path.is_file():
            digest.update(oct(path.stat().st_mode).encode() + hashlib.sha256(path.read_bytes()).digest())
    image = f"localhost/lightningrl-harbor:{digest.hexdigest()[:24]}"
    if _ask(engine, "image", "inspect", image, check=False).returncode != 0:
        _ask(
            engine,
            "build",
            "--label",
            f"{LABEL}.image=1",
            "-t",
            image,
            str(environment),
            timeout_s=timeout_s,
            most=64 * MOST_BYTES,
        )
    return image


def remove_orphans(engine: str) -> int:
    """Remove containers whose process lives no more on this machine; return how many."""
    named = (
        f'{{{{.ID}}}} {{{{index .Labels "{LABEL}"}}}}'
        if engine == "podman"
        else f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'
    )
    listed = _ask(engine, "ps", "-a", "--filter", f"label={LABEL}", "--format", named).stdout.decode()
    orphans = [line.split()[0] for line in listed.splitlines() if line.strip() and not _is_living(line.split()[-1])]
    if orphans:
        _ask(engine, "rm", "-f", *orphans)
    return len(orphans)


class ContainerBox:
    """A container whose first process reads this process's pipe: when that closes, the container is removed."""

    def __init__(
        self,
        engine: str,
        image: str,
        *,
        storage_mb: int,
        memory_mb: int | None = None,
        cpus: float | None = None,
        network: bool = False,
    ) -> None:
        """Open it. Raises BoxError with what the command said."""
        self.kind = engine
        self._name = f"lightningrl-{uuid.uuid4().hex[:16]}"
        self._most_bytes = 2 * storage_mb << 20
        limits = [*PLAIN_LIMITS, "--ulimit", f"fsize={storage_mb << 20}:{storage_mb << 20}"]
        limits += ["--memory", f"{memory_mb}m"] if memory_mb else []
        limits += ["--cpus", str(cpus)] if cpus else []
        limits += [] if network else ["--network", "none"]
        marks = ["--name", self._name, "--label", f"{LABEL}={_name_owner()}"]
        self._process = subprocess.Popen(
            [
                engine,
                "run",
                "-i",
                "--rm",
                *marks,
                *limits,
                "--entrypoint",
                "/bin/sh",
                image,
                "-c",
                "echo ready; exec cat",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != b"ready":
            complaint = self._process.communicate()[1].decode(errors="replace").strip().splitlines() or ["no message"]
            self.close()
            raise BoxError(
                f"{engine} opened no box from the image {image!r}: {complaint[-1]}; try `{engine} run {image}` by hand"
            )

    def run(
        self,
        command: str,
        *,
        folder: str,
        environment: Mapping[str, str],
        timeout_s: float,
        limit: int = LONGEST_OUTPUT,
    ) -> CommandResult:
        """Run a command of bash in `folder`; after `timeout_s` it is killed. `limit`: bytes of output kept."""
        named = [part for name, value in environment.items() for part in ("-e", f"{name}={value}")]
        place = ["-w", folder] if folder else []
        arguments, started = [f"{timeout_s:g}", command, str(limit)], time.monotonic()
        process = self._exec([*named, *place], "/bin/bash", "-c", BOUNDED, "bash", *arguments, timeout_s=timeout_s)
        if process.returncode in (125, 126) and self._has_ended():
            raise BoxGone(f"the container {self._name} ended while it was in use; look at `{self.kind} events`")
        is_late = process.returncode == KILLED and time.monotonic() - started >= timeout_s
        return CommandResult(output=process.stdout.decode(errors="replace"), status=process.returncode, is_late=is_late)

    def put(self, files: bytes, target: str, *, afresh: bool = False) -> None:
        """Unpack a tar archive into the folder `target`; `afresh` removes first what is there."""
        remove = f'rm -rf -- "{target}" && ' if afresh else ""
        self._checked(self._exec([], "/bin/sh", "-c", f'{remove}mkdir -p "{target}"'))
        if not files.strip(b"\0"):  # podman takes an archive of nothing for none
            return
        self._checked(_ask(self.kind, "cp", "-", f"{self._name}:{target}", check=False, content=files))

    def take(self, path: str) -> bytes | None:
        """Pack a folder or a file under its own name, None = there is none."""
        process = _ask(self.kind, "cp", f"{self._name}:{path}", "-", check=False, most=self._most_bytes)
        if len(process.stdout) == self._most_bytes:
            raise BoxError(f"{path!r} in the box holds more than {self._most_bytes >> 20} MiB; it is not read")
        return process.stdout if process.returncode == 0 else None

    def read(self, path: str, limit: int) -> bytes | None:
        """Read the beginning of a regular file, None = there is none; links are not followed."""
        process = _ask(self.kind, "cp", f"{self._name}:{path}", "-", check=False)
        if process.returncode != 0:
            return None
        with tarfile.open(fileobj=io.BytesIO(process.stdout)) as archive:
            member = archive.next()
            file = archive.extractfile(member) if member is not None and member.isreg() else None
            return None if file is None else file.read(limit)

    def stop_processes(self) -> None:
        """Kill what runs in the box."""
        self._exec([], "/bin/sh", "-c", KILL)

    def close(self) -> None:
        """End the box with its processes and files. Does nothing the second time."""
        process = self._process
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        _ask(self.kind, "rm", "-f", self._name, check=False)
        process.kill()
        process.wait()

    def _exec(
        self, options: Sequence[str], *command: str, timeout_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[bytes]:
        return _ask(
            self.kind, "exec", "-u", "0", *options, self._name, *command, check=False, timeout_s=timeout_s + PATIENCE_S
        )

    def _checked(self, process: subprocess.CompletedProcess[bytes]) -> None:
        if process.returncode != 0:
            complaint = process.stderr.decode(errors="replace").strip()
            kind = BoxGone if self._has_ended() else BoxError
            raise kind(f"the box by {self.kind} refused: {complaint or process.returncode}")

    def _has_ended(self) -> bool:
        return _ask(self.kind, "inspect", self._name, check=False).returncode != 0


def _ask(
    engine: str,
    *arguments: str,
    check: bool = True,
    timeout_s: float = PATIENCE_S,
    content: bytes = b"",
    most: int = MOST_BYTES,
) -> subprocess.CompletedProcess[bytes]:
    """Run a container command; one that prints `most` bytes is ended there."""
    command = [engine, *arguments]
    pipe = subprocess.PIPE
    started = subprocess.Popen(command, process_group=0, stdin=pipe, stdout=pipe, stderr=pipe)
    with started as process, ThreadPoolExecutor(3) as threads:

        def read_head(stream: IO[bytes] | None) -> bytes:
            head = b"" if stream is None else stream.read(most)
            if len(head) == most:
                _end_group(process.pid)
            return head

        reading = [threads.submit(read_head, stream) for stream in (process.stdout, process.stderr)]
        threads.submit(_feed, process.stdin, content)
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise BoxError(
                f"`{engine} {arguments[0]}` took longer than {timeout_s:g} s; look whether it still answers"
            ) from None
        finally:
            _end_group(process.pid)
        output, errors = (head.result() for head in reading)
    if check and status != 0:
        complaint = errors.decode(errors="replace").strip().splitlines() or ["no message"]
        raise BoxError(
            f"`{engine} {arguments[0]}` failed: {complaint[-1]}; run `{engine} {json.dumps(arguments)}` by hand"
        )
    return subprocess.CompletedProcess(command, status, output, errors)


def _end_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _feed(stdin: IO[bytes] | None, content: bytes) -> None:
    if stdin is not None:
        with contextlib.suppress(BrokenPipeError), stdin:  # it does not read it
            stdin.write(content)


# ---------------------------------------------------------------------- marks that name a process for good


def _name_owner() -> str:
    """Name this process as no other is named, on this machine or another."""
    return f"{_boot()}.{os.getpid()}.{_started(os.getpid())}"


def _is_living(owner: str) -> bool:
    """False = the process is of this boot of this machine and has ended; others are not ours to judge."""
    boot, _, process = owner.partition(".")
    pid, _, started = process.partition(".")
    if boot != _boot() or not pid.isdigit():
        return True
    return _started(int(pid)) == started


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # no Linux: the container command's own end of stdin has to do
        return "unknown"


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
