"""Runs a program with a network and processes of its own: there is nothing in it but a way to the gateway (Linux).

program ─► 127.0.0.1:PORT ─► process 1, a forwarder ─► SOCKET, a file ─► opened_gate, in the worker ─► gateway

Its processes are those of a namespace too: they see no other, so they can signal none, and end with process 1.

    python box.py PORT SOCKET command …       PORT 0 = no way out at all

Run as a program, it needs the standard library alone and no site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import threading

__all__ = ["enter_namespace"]

NEW_NS, NEW_USER, NEW_PID, NEW_NET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
PRIVATE, NOSUID_NODEV_NOEXEC = 0x44000, 0xE
PR_SET_PDEATHSIG = 1
SET_FLAGS, IS_UP = 0x8914, 0x1
DEAF = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
"""Signals to the group, which are for the program."""
CHUNK = 65_536


def enter_namespace() -> None:
    """Move this process, under the user that it has, to a network with a loopback interface alone, and the processes
    that it starts to a namespace of their own. Raises OSError."""
    import fcntl

    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NS | NEW_USER | NEW_PID | NEW_NET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(text)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sH14s", b"lo", IS_UP, b""))


def _forward(listener: socket.socket, place: str) -> None:
    while True:
        there, _ = listener.accept()
        here = socket.socket(socket.AF_UNIX)
        here.connect(place)
        for ends in ((there, here), (here, there)):
            threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(CHUNK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _run_first(port: int, place: str, command: list[str]) -> None:
    """Be process 1: start the program and the forwarder; all else ends with this one, and it with the one outside."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.mount(None, b"/", None, ctypes.c_ulong(PRIVATE), None)
    # refused where the system hides parts of /proc: then the old one stays, which shows more and opens nothing
    libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(NOSUID_NODEV_NOEXEC), None)
    listener = socket.create_server(("127.0.0.1", port)) if port else None
    if (program := os.fork()) == 0:
        for number in DEAF:
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)  # noqa: S606
    if listener is not None:
        threading.Thread(target=_forward, args=(listener, place), daemon=True).start()
    while (ended := os.wait())[0] != program:
        pass
    status = os.waitstatus_to_exitcode(ended[1])
    os._exit(status if status >= 0 else 128 - status)


def main() -> None:
    """Enter the namespaces, and wait for the program to end."""
    port, place, *command = sys.argv[1:]
    try:
        enter_namespace()
    except OSError as error:
        sys.exit(str(error))
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
    if (first := os.fork()) == 0:
        _run_first(int(port), place, command)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)


if __name__ == "__main__":
    main()
