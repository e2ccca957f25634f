"""Runs a program in a network namespace of its own, where there is nothing but a way to the gateway (Linux).

program ─► 127.0.0.1:PORT ─► forwarder, beside it ─► SOCKET, a file ─► opened_gate, in the worker ─► gateway

    python box.py PORT SOCKET command …       PORT 0 = no way out at all

Run as a program, it needs the standard library alone and no site-packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
import threading

__all__ = ["enter_namespace"]

NEW_USER, NEW_NET = 0x10000000, 0x40000000
SET_FLAGS, IS_UP = 0x8914, 0x1
CHUNK = 65_536


def enter_namespace() -> None:
    """Move this process, under the user that it has, to a network with a loopback interface alone. Raises OSError."""
    import fcntl

    user, group = os.getuid(), os.getgid()
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_USER | NEW_NET):
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


def main() -> None:
    """Enter the namespace, start the forwarder as nobody's child, become the program."""
    port, place, *command = sys.argv[1:]
    try:
        enter_namespace()
    except OSError as error:
        sys.exit(str(error))
    if int(port):
        listener = socket.create_server(("127.0.0.1", int(port)))
        if (child := os.fork()) == 0:
            if os.fork() == 0:
                _forward(listener, place)
            os._exit(0)
        os.waitpid(child, 0)
        listener.close()
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main()
