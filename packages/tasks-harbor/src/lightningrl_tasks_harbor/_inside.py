"""First process of a box by namespaces: makes a root of its own, then does what it is asked on its stdin.

    worker ── stdin, stdout ──► this program ── fork ──► namespaces, user ids ── fork ──► process 1 of the box

A request and an answer are each four bytes of length, JSON, and as many raw bytes as its `size` says. The end of stdin
is the end of the box: the kernel kills its processes with process 1, and its mounts and files, all of them in memory,
go with them. Run by path, by the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import io
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MS_RELATIME: Final = 1 << 21
ST_RELATIME: Final = 4096
MNT_DETACH: Final = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
KEPT_CAPABILITIES: Final = frozenset({0, 1, 3, 4, 5, 6, 7, 10})
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service: none that mounts or traces."""
NOBODY: Final = 65534
SYSTEM: Final = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
SETTINGS: Final = ("alternatives", "ssl", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "terminfo")
DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
PROCESSES: Final = 512
"""Processes and threads of a box."""

libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None)
    _call(f"mount {target}", libc.mount(*arguments))


def _bind(source: str, target: str) -> None:
    """Show a file or folder of the host, read-only. Flags that the host's mount has may not be taken away."""
    _mount(source, target, flags=MS_BIND | MS_REC)
    flags = os.statvfs(target).f_flag
    inherited = flags & (MS_NOSUID | MS_NODEV | 8 | 1024 | 2048) | (MS_RELATIME if flags & ST_RELATIME else 0)
    _mount("", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | inherited)


def _bind_new(source: str, target: str) -> None:
    if Path(source).is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    _bind(source, target)


def build_root(root: str, settings: dict[str, Any]) -> None:
    """Mount an empty root in memory and show the host's programs in it; then leave the host's root."""
    _mount("", "/", flags=MS_REC | MS_PRIVATE)
    _mount("box", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={settings['storage_mb']}m,nr_inodes=200k,mode=755")
    _show_host(Path(root), settings["host_folders"])
    _fill_root(Path(root))
    _mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | 8)
    os.chdir(root)
    _call("pivot_root", libc.syscall(PIVOT_ROOT[os.uname().machine], b".", b"."))
    _call("umount", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")


def _show_host(root: Path, folders: list[str]) -> None:
    for name in SYSTEM:
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
        elif Path("/", name).is_dir():
            _bind_new(f"/{name}", f"{root}/{name}")
    for name in SETTINGS:
        if Path("/etc", name).exists():
            _bind_new(os.path.realpath(f"/etc/{name}"), f"{root}/etc/{name}")
    for folder in folders:
        _bind_new(folder, f"{root}{folder}")


def _fill_root(root: Path) -> None:
    for name in ("dev/shm", "etc", "proc", "root", "run", "tmp", "var/tmp", "home", "opt", "srv", "mnt"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("dev/shm", "tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    for name in DEVICES:
        if Path("/dev", name).exists():
            (root / "dev" / name).touch()
            _mount(f"/dev/{name}", f"{root}/dev/{name}", flags=MS_BIND)
    for name, place in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (root / "dev" / name).symlink_to(f"/proc/self/{place}")
    texts = {
        "passwd": f"root:x:0:0:root:/root:/bin/bash\nnobody:x:{NOBODY}:{NOBODY}::/:/bin/false\n",
        "group": f"root:x:0:\nnogroup:x:{NOBODY}:\n",
        "hosts": "127.0.0.1 localhost box\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    }
    for name, text in texts.items():
        (root / "etc" / name).write_text(text, encoding="utf-8")


def raise_loopback() -> None:
    """Let programs of the box reach each other on 127.0.0.1; there is no other network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain, contextlib.suppress(OSError):
        fcntl.ioctl(plain, 0x8914, struct.pack("16sh22x", b"lo", 0x1 | 0x40))


class Box:
    """Process 1: answers one request after the other."""

    def __init__(self, requests: int, answers: BinaryIO, settings: dict[str, Any]) -> None:
        self._requests = requests
        self._answers = answers
        self._settings = settings

    def serve(self) -> None:
        """Answer until stdin ends."""
        self.answer({"ready": True})
        while (request := self._receive()) is not None:
            header, body = request
            try:
                done, content = getattr(self, f"do_{header['do']}")(body, **header["with"])
                self.answer(done, content)
            except Exception as error:  # noqa: BLE001  the boundary: the worker says what did not work
                self.answer({"error": f"{type(error).__name__}: {error}"})
            self._reap()

    def answer(self, header: dict[str, Any], content: bytes = b"") -> None:
        text = json.dumps({**header, "size": len(content)}).encode()
        self._answers.write(struct.pack("!I", len(text)) + text + content)
        self._answers.flush()

    def _receive(self) -> tuple[dict[str, Any], bytes] | None:
        if not (length := self._read(4)):
            return None
        header = json.loads(self._read(struct.unpack("!I", length)[0]))
        return header, self._read(header["size"])

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size and (part := os.read(self._requests, min(size, 1 << 20))):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def do_put(self, body: bytes, *, target: str, afresh: bool) -> tuple[dict[str, Any], bytes]:
        """Unpack an archive into a folder; `afresh` = with nothing else in it, whatever was there before."""
        if afresh:
            _remove(target)
        Path(target).mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            # packed by the worker, or by process 1 of a box
            archive.extractall(target, filter="fully_trusted")  # noqa: S202
        return {}, b""

    def do_take(self, _: bytes, *, path: str) -> tuple[dict[str, Any], bytes]:
        """Pack a folder or a file under its own name; `found` False where there is none, or a link leads to it."""
        if os.path.realpath(path) != path or not os.path.lexists(path):
            return {"found": False}, b""
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            archive.add(path, arcname=Path(path).name, filter=_without_devices)
        return {"found": True}, content.getvalue()

    def do_read(self, _: bytes, *, path: str, limit: int) -> tuple[dict[str, Any], bytes]:
        """Read a regular file's beginning; `found` False where there is none. Links are not followed."""
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                if not Path(path).is_file() or os.path.realpath(path) != path:
                    return {"found": False}, b""
                return {"found": True}, file.read(limit)
        except OSError:
            return {"found": False}, b""

    def do_stop(self, _: bytes) -> tuple[dict[str, Any], bytes]:
        """Kill every process of the box but this one."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return {}, b""

    def do_run(
        self, _: bytes, *, command: str, folder: str, environment: dict[str, str], timeout_s: float, limit: int
    ) -> tuple[dict[str, Any], bytes]:
        """Run a command of bash; the answer holds the beginning and the end of its output."""
        process = subprocess.Popen(
            ["/bin/bash", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder if Path(folder).is_dir() else "/",
            env=environment,
            start_new_session=True,
            preexec_fn=self._bound,
        )
        assert process.stdout is not None
        output, is_late = _Ends(limit), False
        try:
            is_late = not self._follow(process, output, time.monotonic() + timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None or is_late:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        return {"status": process.returncode, "is_late": is_late, "left_out": output.left_out}, output.content()

    def _follow(self, process: subprocess.Popen[bytes], output: _Ends, deadline: float) -> bool:
        """Read until the command ends, False = until its time is over. Ends the box where the worker is gone."""
        assert process.stdout is not None
        output_pipe, ended = process.stdout.fileno(), os.pidfd_open(process.pid)
        os.set_blocking(output_pipe, False)
        poll = select.poll()
        poll.register(output_pipe, select.POLLIN)
        poll.register(ended, select.POLLIN)
        poll.register(self._requests, select.POLLHUP)
        try:
            while (left := deadline - time.monotonic()) > 0:
                events = dict(poll.poll(left * 1000))
                if events.get(self._requests, 0) & (select.POLLHUP | select.POLLERR):
                    os._exit(1)
                has_ended = ended in events
                if output_pipe in events or has_ended:
                    self._drain(output_pipe, output, poll)
                if has_ended:
                    return True
            return False
        finally:
            os.close(ended)

    @staticmethod
    def _drain(output_pipe: int, output: _Ends, poll: select.poll) -> None:
        for _ in range(64):  # a background process that prints without end is not followed for ever
            try:
                part = os.read(output_pipe, 1 << 16)
            except BlockingIOError:
                return
            if not part:
                with contextlib.suppress(KeyError):
                    poll.unregister(output_pipe)
                return
            output.add(part)

    def _bound(self) -> None:
        """Run in the command's process before it begins: limits, and no right to mount or trace."""
        storage = self._settings["storage_mb"] << 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (storage, storage))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NPROC, (PROCESSES, PROCESSES))
        if self._settings["memory_mb"]:
            memory = self._settings["memory_mb"] << 20
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        for number in range(64):
            if number not in KEPT_CAPABILITIES:
                libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)

    @staticmethod
    def _reap() -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


class _Ends:
    """The first and the last half of `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._first = bytearray()
        self._last = bytearray()
        self.left_out = 0

    def add(self, part: bytes) -> None:
        room = self._half - len(self._first)
        self._first += part[:room] if room > 0 else b""
        self._last += part[max(room, 0) :]
        if len(self._last) > self._half:
            self.left_out += len(self._last) - self._half
            del self._last[: -self._half]

    def content(self) -> bytes:
        middle = f"\n[{self.left_out} bytes left out]\n".encode() if self.left_out else b""
        return bytes(self._first) + middle + bytes(self._last)


def _without_devices(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None


def _remove(path: str) -> None:
    """Remove what is there, or move it aside where folders are nested deeper than can be walked."""
    if Path(path).is_dir() and not Path(path).is_symlink():
        try:
            shutil.rmtree(path)
        except (OSError, RecursionError):
            Path(path).rename(f"{path}-{os.urandom(8).hex()}")
    else:
        Path(path).unlink(missing_ok=True)


def run_first_process(settings: dict[str, Any], answers: BinaryIO) -> NoReturn:
    """Be process 1 of the box."""
    status = 1
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        box = Box(0, answers, settings)
        try:
            raise_loopback()
            build_root("/tmp", settings)  # noqa: S108  a mount of its own covers it
            socket.sethostname("box")
            libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        except OSError as error:
            box.answer({"error": str(error)})
        else:
            box.serve()
            status = 0
    finally:
        os._exit(status)


def main() -> int:
    """Fork into the namespaces, map user 0 of the box to nobody (or to the user who runs this), and wait."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    is_root, user, group = os.geteuid() == 0, os.geteuid(), os.getegid()
    mapped, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
            _call("unshare", libc.unshare(flags))
            os.write(mapped[1], b"u")
            if os.read(go[0], 1) != b"g":
                os._exit(1)
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == 1:
                os._exit(1)
            for pipe in (*mapped, *go):
                os.close(pipe)
            first = os.fork()
            if first == 0:
                run_first_process(settings, answers)
            os.close(0)
            answers.close()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        except OSError as error:
            sys.stderr.write(f"{error}\n")
            os._exit(1)
    os.close(mapped[1])
    if os.read(mapped[0], 1) == b"u":
        os.close(0)
        answers.close()
        outside = (NOBODY, NOBODY) if is_root else (user, group)
        Path(f"/proc/{child}/setgroups").write_text("deny", encoding="ascii")
        for name, identity in zip(("uid_map", "gid_map"), outside, strict=True):
            Path(f"/proc/{child}/{name}").write_text(f"0 {identity} 1\n", encoding="ascii")
        os.write(go[1], b"g")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
