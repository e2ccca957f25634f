"""Functions in the main thread of processes of their own.

Signals, timers, event loops and objects that belong to a thread work there as when a person calls the function by hand.

    trainer ── fork, when functions are given ──► fork server ── fork, when a call waits ──► process: function(argument)
        └──────────────── a socket for each process: argument ►  ◄ what it returned ────────────┘      call by call

Forked, not started anew: a closure, a lambda, a notebook's cell is there as it was, and nothing is imported twice. The
fork server is made before the trainer has threads and weights, and runs nothing itself, so that a process that hung or
died is made again from the state at the start. A function's globals and caches live as long as its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from lightningrl.errors import RewardError, describe_raised
from lightningrl.processes import MARK, die_with_parent, kill_descendants, make_mark

__all__ = ["DaemonThreads", "FunctionProcesses", "ProcessEnded", "is_function_process", "scratch_prefix"]

PATIENCE_S: Final = 1.0
"""Wait for a turn after which a call gets another process, up to the limit: quick ones keep to one, with its state."""
FIRST_CALL_S: Final = 15.0
"""Time that the first call of all may take before the others count it as slow: it may import much, which each further
process would do as well."""
WATCH_S: Final = 0.25
"""Time between two looks of the fork server for its parent."""
_LENGTH: Final = struct.Struct("<Q")
_OURS: list[int] = []
"""The process id, in a process that runs functions."""

Function = Callable[[Any], Any]


class ProcessEnded(Exception):
    """The process ended before the function did; its text says how."""


def is_function_process() -> bool:
    """True in the main thread of a process that was made for one function."""
    return [os.getpid()] == _OURS and threading.current_thread() is threading.main_thread()


def scratch_prefix() -> str:
    """Prefix of temporary folders (`tempfile`) that go with the process that made them, even if it is killed."""
    return f"lightningrl-{os.environ[MARK]}-" if is_function_process() else "lightningrl-"


class FunctionProcesses:
    """Runs functions by name, at most `limit` calls of each at a time. In threads of this process where the system is
    not Linux: Apple's frameworks do not outlive a fork."""

    def __init__(self, functions: Mapping[str, tuple[Function, int]]) -> None:
        """`functions`: by name, with its limit. None of them may raise, and what they return can be pickled."""
        self._functions = dict(functions)
        can_fork = sys.platform == "linux"
        by_name = {name: function for name, (function, _) in functions.items()}
        self._server = _ForkServer(by_name) if by_name and can_fork else None
        self._threads = {name: DaemonThreads(limit) for name, (_, limit) in functions.items()}
        self._pools = (
            {}
            if self._server is None
            else {name: _Pool(self._server, name, limit) for name, (_, limit) in functions.items()}
        )

    async def run(self, name: str, argument: Any, *, on_start: Callable[[], None]) -> Any:
        """Call a function in its process. `on_start` is called when its turn has come. A caller that gives up ends the
        process. Raises ProcessEnded where it ended by itself."""
        if self._server is None:
            function = self._functions[name][0]
            return await self._threads[name].run(lambda: function(argument), on_start=on_start, name=name)
        pool = self._pools[name]
        process = await pool.take()
        is_well = False
        try:
            on_start()
            returned = await process.call(argument)
            is_well = True
        except (EOFError, OSError):
            raise ProcessEnded(process.end()) from None
        finally:
            pool.give_back(process, is_well=is_well)
        return returned


class _Pool:
    """The processes of one function."""

    def __init__(self, server: _ForkServer, name: str, limit: int) -> None:
        self._server = server
        self._name = name
        self._limit = limit
        self._alive = 0
        self._has_answered = False
        self._began = 0.0
        self._idle: list[_Process] = []
        self._waiting: deque[asyncio.Future[_Process | None]] = deque()

    async def take(self) -> _Process:
        """Take an idle process, or a new one where the last has ended or this call has waited for long: since the first
        call of all was answered, that is."""
        loop = asyncio.get_running_loop()
        if self._idle:
            return self._idle.pop()
        if not self._alive:
            return self._start()
        patience: float | None = PATIENCE_S
        while True:
            turn: asyncio.Future[_Process | None] = loop.create_future()
            self._waiting.append(turn)
            is_first = False
            try:
                async with asyncio.timeout(patience):
                    process = await turn
            except TimeoutError:
                process, is_first = None, self._is_at_first_call()
            except BaseException:
                if turn.done() and not turn.cancelled() and (given := turn.result()) is not None:
                    self.give_back(given, is_well=True)
                raise
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
            if process is None and turn.done() and not turn.cancelled():
                process = turn.result()
            if process is not None:
                return process
            if is_first and self._alive:
                continue
            if self._alive < self._limit:
                return self._start()
            patience = None

    def give_back(self, process: _Process, *, is_well: bool) -> None:
        """Hand a process to whoever waits; end one that is not well."""
        self._has_answered |= is_well
        if not is_well:
            self._alive -= 1
            process.end()
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(process if is_well else None)
                return
        if is_well:
            self._idle.append(process)

    def _is_at_first_call(self) -> bool:
        return not self._has_answered and time.monotonic() - self._began < FIRST_CALL_S

    def _start(self) -> _Process:
        process = self._server.start(self._name)
        if not self._alive:
            self._began = time.monotonic()
        self._alive += 1
        return process


class _Process:
    """A forked process, seen from the trainer."""

    def __init__(self, server: _ForkServer, pid: int, line: socket.socket) -> None:
        self._server = server
        self._pid = pid
        self._line = line
        self._ended = ""

    async def call(self, argument: Any) -> Any:
        """Call the function. Raises EOFError or OSError where the process has ended."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._line, _frame(argument))
        received = bytearray()
        while len(received) < _LENGTH.size or len(received) < _LENGTH.size + _LENGTH.unpack_from(received)[0]:
            chunk = await loop.sock_recv(self._line, 65_536)
            if not chunk:
                raise EOFError
            received += chunk
        return pickle.loads(memoryview(received)[_LENGTH.size :])  # noqa: S301  of our own fork

    def end(self) -> str:
        """Kill it with what it started, once, and say how it ended."""
        if not self._ended:
            self._line.close()
            self._ended = self._server.end(self._pid)
        return self._ended


class _ForkServer:
    """The process that forks others, seen from the trainer. It ends with this object, and with the trainer."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = _fork()
        if not pid:
            try:
                ours.close()
                _serve(theirs, functions, parent)
            finally:
                os._exit(1)
        theirs.close()
        self._control = ours
        weakref.finalize(self, _stop, ours, pid, parent)

    def start(self, name: str) -> _Process:
        """Fork a process for a function."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            pid = int(self._ask({"start": name}, theirs))
        return _Process(self, pid, ours)

    def end(self, pid: int) -> str:
        """Kill a process, if it lives, and say how it ended."""
        return self._ask({"end": pid})

    def _ask(self, command: Mapping[str, Any], line: socket.socket | None = None) -> str:
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(command).encode()], [] if line is None else [line.fileno()])
                answer = self._control.recv(4096)
            except OSError:
                answer = b""
        if not answer:
            raise RewardError("the process that starts the rewards' processes has ended; go on with --resume")
        return answer.decode()


def _stop(control: socket.socket, pid: int, parent: int) -> None:
    if os.getpid() == parent:  # in a process that the trainer forked, it is nobody's child
        with contextlib.suppress(OSError):
            control.shutdown(socket.SHUT_RDWR)  # closed, it would live on in what was forked since
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    control.close()


def _fork() -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or somebody's own object: what it holds would be written twice
            stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child has one
        return os.fork()


def _serve(control: socket.socket, functions: Mapping[str, Function], parent: int) -> None:
    """Be the fork server: fork and end processes until the trainer is gone."""
    os.setsid()  # a terminal's signals are the trainer's
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    _forget_loops_and_signals()
    marks: dict[int, str] = {}
    while True:
        if not select.select([control], [], [], WATCH_S)[0]:
            if os.getppid() != parent:
                break
            continue
        message, lines, _, _ = socket.recv_fds(control, 65_536, 1)
        if not message:
            break
        command = json.loads(message)
        if "start" in command:
            own, mark = os.getpid(), make_mark()
            pid = _fork()
            if not pid:
                control.close()
                die_with_parent(own)
                os.setsid()
                os.environ[MARK] = mark
                _work(socket.socket(fileno=lines[0]), functions[command["start"]])
            os.close(lines[0])
            marks[pid] = mark
            answer = str(pid)
        else:
            answer = _end(command["end"], marks.pop(command["end"]))
        control.send(answer.encode())
    for pid, mark in marks.items():
        _end(pid, mark)


def _end(pid: int, mark: str) -> str:
    """Kill the process and what it started, and say how it ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    kill_descendants(pid, mark)
    for folder in Path(tempfile.gettempdir()).glob(f"lightningrl-{mark}-*"):
        shutil.rmtree(folder, ignore_errors=True)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status >= 0:
        return f"its process ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process was ended by signal {-status}"


def _forget_loops_and_signals() -> None:
    """Undo the trainer's event loop in this thread: signals are this process' own now, and `asyncio` begins anew."""
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asyncio.set_event_loop_policy(type(asyncio.get_event_loop_policy())())
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # its threads did not come along, and it would wait for them


def _work(line: socket.socket, function: Function) -> None:
    """Be a process: answer calls until the line ends. Never returns."""
    own = os.getpid()
    _OURS[:] = [own]
    try:
        with line.makefile("rb") as calls:
            while header := calls.read(_LENGTH.size):
                argument = pickle.loads(calls.read(_LENGTH.unpack(header)[0]))  # noqa: S301  of the trainer
                returned = function(argument)
                if os.getpid() != own:
                    os._exit(1)  # one that the function has forked, and whose work ended where the function's did
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(Exception):  # closed, or the function's own
                        stream.flush()
                line.sendall(_frame(returned))
    except ConnectionError:  # the trainer has gone, or given up this call: nobody waits for the value
        pass
    except BaseException as error:  # noqa: BLE001  nobody is above
        sys.stderr.write(f"a reward's process: {describe_raised(error)}\n")
    finally:
        os._exit(1)


def _frame(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class DaemonThreads:
    """At most `limit` functions at work at a time. One whose caller has given up no longer counts."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._places: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    async def run(self, function: Callable[[], Any], *, on_start: Callable[[], None], name: str) -> Any:
        """Run `function()` and return or raise what it does. `on_start` is called when its turn comes."""
        loop = asyncio.get_running_loop()
        async with self.places():
            on_start()
            done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
            context = contextvars.copy_context()

            def work() -> None:
                try:
                    outcome: tuple[Any, BaseException | None] = (context.run(function), None)
                except BaseException as error:  # noqa: BLE001 — handed to the caller, who is on another thread
                    outcome = (None, error)
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(_settle, done, outcome)

            threading.Thread(target=work, daemon=True, name=f"reward-{name}").start()
            value, error = await done
        if error is not None:
            raise error
        return value

    def places(self) -> asyncio.Semaphore:
        """Semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._places[0] is not loop:
            self._places = (loop, asyncio.Semaphore(self._limit))
        return self._places[1]


def _settle(done: asyncio.Future[tuple[Any, BaseException | None]], outcome: tuple[Any, BaseException | None]) -> None:
    if not done.done():
        done.set_result(outcome)
