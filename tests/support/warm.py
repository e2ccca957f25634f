"""Warm starts: our own processes are forked from one that has imported what they need, instead of started with five to
ten CPU seconds of imports each.

`subprocess.Popen([sys.executable, "-m", "lightningrl…"])` stays what it is, for tests and for the code that they test:
the process has its own environment, folder and files, runs the same module as `__main__`, and is the caller's own
child. What a fresh interpreter itself does stays with the tests that use the fixture `fresh_processes`, and with
`--long`.

caller ── argv, environment, folder, three files ──► forge ── fork ──► middle ── fork ──► the process
   ▲                                                                     └ ends, so that the process becomes a child of the nearest
   └───── pid ◄──────────────────────────────────────────────────────────  ancestor that adopts orphans: the caller, for that moment
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self, TypeAlias

from sizes import PATIENCE_S

__all__ = ["WarmCommand", "fresh_starts", "warm_starts"]

COMMAND: Final = "lightningrl"
PARTS: Final = (
    "lightningrl_server.process",
    "lightningrl_server.app",
    "lightningrl_server.gateway.app",
    "lightningrl_server.rendering.renderer",
    "lightningrl_client.runtime.worker",
    "lightningrl_training.agent_check",
    "transformers.tokenization_utils_fast",
    "renderers.base",
    "renderers.default",
)
"""What a server and a worker import."""
COMMANDS: Final = (
    *PARTS,
    "lightningrl.commands",
    "lightningrl_training.commands",
    "lightningrl_training.export_check",
    "lightningrl_training.run",
    "lightningrl_training.session",
    "lightningrl_torch.backend",
    "lightningrl_torch.learner",
    "transformers.models.llama.modeling_llama",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "opentelemetry.sdk.trace",
    "httpcore",
)
"""What `lightningrl train` imports, at once or when it learns."""
SCRIPT: Final = ("-X", "warm")
"""Before a script that a forge makes. A fresh interpreter ignores it."""
FIRST_OF_FORGE: Final = 900
"""Descriptors from here on are the forge's, for a moment."""
MOST_KEPT: Final = 8
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36

Started: TypeAlias = "subprocess.Popen[bytes]"

libc = ctypes.CDLL(None)
fork_exec: Callable[..., int] = subprocess._fork_exec  # type: ignore[attr-defined]


# ------------------------------------------------------------------ for tests


class WarmCommand:
    """The command line, quickly: `warm.run("lightningrl", "train", …, cwd=folder)`."""

    def start(
        self, *arguments: str, output: IO[Any], errors: IO[Any], cwd: Path, environment: Mapping[str, str]
    ) -> Started:
        """`lightningrl …`, or a script, in a session of its own; what it says goes to the two files."""
        command = ["-m", COMMAND, *arguments[1:]] if arguments[0] == "lightningrl" else [*SCRIPT, *arguments]
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            cwd=cwd,
            env={**environment, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def run(
        self, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None, timeout: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run to its end. Killed with its process group, and TimeoutExpired, after `timeout` seconds."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = self.start(
                *arguments, output=output, errors=errors, cwd=cwd, environment={**os.environ, **(environment or {})}
            )
            try:
                status = process.wait(timeout)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
            output.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(arguments, status, output.read(), errors.read())


@contextlib.contextmanager
def warm_starts() -> Iterator[None]:
    """While it lasts, our own processes come from forges. On Linux; elsewhere each start is a fresh one."""
    if sys.platform != "linux":
        yield
        return
    with (
        Forge(PARTS) as parts,
        Forge(COMMANDS) as commands,
        _starts_by(lambda start: commands if start.is_command else parts),
    ):
        yield


@contextlib.contextmanager
def fresh_starts() -> Iterator[None]:
    """While it lasts, every process is a fresh interpreter's."""
    before = subprocess._fork_exec  # type: ignore[attr-defined]
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = before  # type: ignore[attr-defined]


# ------------------------------------------------------------------ the caller's end


@dataclass(frozen=True, slots=True)
class Start:
    """A process to be."""

    module: str
    """Or a script's file."""
    arguments: Sequence[str]
    environment: Mapping[str, str]
    cwd: str
    has_own_session: bool
    kept: Sequence[int] = ()
    """Numbers of the descriptors that it has beside its three files."""

    @property
    def is_script(self) -> bool:
        return self.module.endswith(".py")

    @property
    def is_command(self) -> bool:
        """It may start a server and workers."""
        return self.is_script or self.module in {COMMAND, "lightningrl_training.sweeps.process"}


class Forge:
    """A process that imports `modules` once, at its first use, and forks from then on."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # the forge is gone
                self._connection.shutdown(socket.SHUT_RDWR)  # closed alone, it would live on in what was forked since
            self._connection.close()
        if self._process is not None:
            self._process.wait()

    @classmethod
    def of(cls, connection: socket.socket) -> Self:
        """One that runs already."""
        forge = cls(())
        forge._connection = connection
        return forge

    def fork(self, start: Start, files: Sequence[int]) -> int:
        """Start it with `files` as stdin, stdout, stderr and what it keeps. Returns its pid; it is a child of this
        process."""
        with self._lock:
            connection = self._connection or self._open()
            body = json.dumps(
                [
                    start.module,
                    start.arguments,
                    dict(start.environment),
                    start.cwd,
                    start.has_own_session,
                    [*start.kept],
                    os.getpid(),
                ]
            )
            socket.send_fds(connection, [len(body.encode()).to_bytes(8)], files)
            connection.sendall(body.encode())
            pid = int.from_bytes(read(connection, 8))
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                connection.sendall(b"a")
                assert read(connection, 1) == b"!"
            finally:
                libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            return pid

    def _open(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno()), *self._modules]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with fresh_starts(), theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()]
            )
        self._connection = ours
        return ours


@contextlib.contextmanager
def _starts_by(choose: Callable[[Start], Forge]) -> Iterator[None]:
    def start(*arguments: Any) -> int:
        request = _read_start(arguments)
        if request is None:
            return fork_exec(*arguments)
        files = [
            given if given >= 0 else ours for ours, given in enumerate((arguments[6], arguments[9], arguments[11]))
        ]
        return choose(request).fork(request, [*files, *request.kept])

    subprocess._fork_exec = start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


def _read_start(arguments: Sequence[Any]) -> Start | None:
    """What `_posixsubprocess.fork_exec` was asked for, where a forge makes it: `python -m lightningrl…` or a script of
    `WarmCommand`, with what interpreters and linkers read in their environment as it is here."""
    args, _, _, kept, cwd, given = arguments[:6]
    has_own_session, group, gid, gids, uid, umask, preexec_fn = arguments[15:22]
    words = [os.fsdecode(word) for word in args]
    is_plain = max(kept) < FIRST_OF_FORGE and (group, gid, gids, uid, umask, preexec_fn) == (
        -1,
        None,
        None,
        None,
        -1,
        None,
    )
    is_script = words[0] == sys.executable and tuple(words[1:3]) == SCRIPT
    if not is_plain or not (is_script or (words[:2] == [sys.executable, "-m"] and words[2].startswith("lightningrl"))):
        return None
    environment = dict(os.environ) if given is None else dict(os.fsdecode(entry).split("=", 1) for entry in given)
    if _of_interpreter(environment) != _of_interpreter(os.environ):
        return None
    folder = Path(os.fsdecode(cwd) if cwd is not None else "").absolute()
    module, *rest = words[3:] if is_script else words[2:]
    theirs = [one for one in kept if one != arguments[13]]  # that one tells the caller why no program could be started
    return Start(
        str(folder / module) if is_script else module, rest, environment, str(folder), bool(has_own_session), theirs
    )


def _of_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(("PYTHON", "LD_")) and name != "PYTHONUNBUFFERED"
    }


# ------------------------------------------------------------------ the forge's end


def serve(connection: socket.socket) -> Start | None:
    """Fork a process for each request, until the caller is gone. Returns in each of them with what it is to be."""
    while (head := _receive_head(connection)) is not None:
        length, files = head
        *of_start, parent = json.loads(read(connection, length))
        start = Start(*of_start)
        read_end, write_end = os.pipe()
        go_read, go_write = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                os.close(go_write)
                os.read(go_read, 1)  # the middle one has ended
                while os.getppid() != parent:
                    if not Path(f"/proc/{parent}").exists():  # killed before it could take this one over
                        os._exit(1)
                    time.sleep(0.0001)
                become(start, files)
                return start
            os.write(write_end, pid.to_bytes(8))
            os.close(write_end)
            os.close(go_write)
            os.read(go_read, 1)
            os._exit(0)
        connection.sendall(os.read(read_end, 8))
        adopts = connection.recv(1)
        os.close(go_write)
        os.waitpid(middle, 0)
        for file in (*files, read_end, write_end, go_read):
            os.close(file)
        if adopts:
            connection.sendall(b"!")
    return None


def _receive_head(connection: socket.socket) -> tuple[int, list[int]] | None:
    head, files, _, _ = socket.recv_fds(connection, 8, 3 + MOST_KEPT)
    return (int.from_bytes(head), files) if head else None


def read(connection: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise EOFError("the other end is gone")
        parts += part
    return parts


def become(start: Start, files: Sequence[int]) -> None:
    """Turn this forked child into the process."""
    if start.has_own_session:
        os.setsid()
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, FIRST_OF_FORGE) for file in files]
    os.closerange(3, FIRST_OF_FORGE)
    for target, source in zip((0, 1, 2, *start.kept), aside, strict=True):
        os.dup2(source, target)
        os.close(source)
    for name, number in (("stdout", 1), ("stderr", 2)):  # Python asked what the descriptors of this process can do
        stream: Any = getattr(sys, name)
        as_before = {"encoding": stream.encoding, "errors": stream.errors}
        setattr(sys, name, open(number, "w", buffering=1, closefd=False, **as_before))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.cwd)
    time.tzset()
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    libc.prctl(PR_SET_NAME, start.module[-15:].encode(), 0, 0, 0)
    sys.argv = [start.module, *start.arguments]
    sys.path[0] = str(Path(start.module).parent) if start.is_script else start.cwd


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the commands of its group
    for module in sys.argv[2:]:
        __import__(module)
    gc.collect()
    gc.freeze()
    connection = socket.socket(fileno=int(sys.argv[1]))
    while (start := serve(connection)) is not None:
        if not start.is_command:
            return run(start)
        connection.detach()  # its number was closed with all others, and may be another's soon
        ours, connection = socket.socketpair()
        # the command, which starts a server and workers: its child is a forge of its own, made before there are threads
        if os.fork():
            connection.close()
            return run_with(Forge.of(ours), start)
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    os._exit(0)


def run_with(forge: Forge, start: Start) -> None:
    with _starts_by(lambda start: forge):
        run(start)


def run(start: Start) -> None:
    if start.is_script:
        runpy.run_path(start.module, run_name="__main__")
        return
    if not hasattr(sys.modules.get(start.module), "__path__"):
        sys.modules.pop(start.module, None)  # it was imported under its own name; it is `__main__` now
    runpy.run_module(start.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
