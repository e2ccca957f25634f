"""The worker's side of a box without a network: a socket in the rollout's folders that leads to the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from urllib.parse import urlsplit

from lightningrl.errors import ConfigError
from lightningrl_client.runtime.harnesses import box
from lightningrl_client.runtime.harnesses.folder import FolderError, Room

__all__ = ["boxed_command", "opened_gate", "require_boxes"]

LONGEST_SOCKET = 100
"""Bytes of a socket's path, which the system bounds."""


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
