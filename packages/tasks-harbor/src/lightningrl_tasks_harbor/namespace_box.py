"""Box by Linux namespaces: a root in memory with the host's programs in it, no network, no right to what is outside."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightningrl.processes import MARK
from lightningrl_tasks_harbor.boxes import LONGEST_OUTPUT, BoxError, BoxGone, CommandResult

__all__ = ["NamespaceBox"]

PROGRAM: Final = Path(__file__).with_name("_inside.py")
PATIENCE_S: Final = 10.0


class NamespaceBox:
    """A box that ends with this process, however it ends: its first process sees the end of its stdin."""

    kind = "unshare"

    def __init__(self, *, storage_mb: int, memory_mb: int | None = None, host_folders: tuple[str, ...] = ()) -> None:
        """Open it. Raises BoxError where the machine allows no namespaces to this user."""
        settings = {"storage_mb": storage_mb, "memory_mb": memory_mb, "host_folders": list(host_folders)}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # keys of the run are no business of the box; the mark is the worker's, by which its supervisor ends it
            env={name: os.environ[name] for name in (MARK, "LD_LIBRARY_PATH") if name in os.environ},
        )
        try:
            self._receive()
        except BoxError:
            self.close()
            raise

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
        header, output = self._ask(
            "run", command=command, folder=folder, environment=dict(environment), timeout_s=timeout_s, limit=limit
        )
        text = output.decode(errors="replace")
        return CommandResult(output=text, status=header["status"], is_late=header["is_late"])

    def put(self, files: bytes, target: str, *, afresh: bool = False) -> None:
        """Unpack a tar archive into the folder `target`; `afresh` removes first what is there."""
        self._ask("put", files, target=target, afresh=afresh)

    def take(self, path: str) -> bytes | None:
        """Pack a folder or a file under its own name, None = there is none."""
        header, content = self._ask("take", path=path)
        return content if header["found"] else None

    def read(self, path: str, limit: int) -> bytes | None:
        """Read the beginning of a regular file, None = there is none; links are not followed."""
        header, content = self._ask("read", path=path, limit=limit)
        return content if header["found"] else None

    def stop_processes(self) -> None:
        """Kill what runs in the box."""
        self._ask("stop")

    def close(self) -> None:
        """End the box with its processes and files. Does nothing the second time."""
        process = self._process
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the kernel kills the box's first process with it
            process.wait()

    def _ask(self, what: str, content: bytes = b"", **arguments: Any) -> tuple[dict[str, Any], bytes]:
        text = json.dumps({"do": what, "with": arguments, "size": len(content)}).encode()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(struct.pack("!I", len(text)) + text + content)
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._ended() from None
        return self._receive()

    def _receive(self) -> tuple[dict[str, Any], bytes]:
        assert self._process.stdout is not None
        if len(length := self._process.stdout.read(4)) < 4:
            raise self._ended()
        header: dict[str, Any] = json.loads(self._process.stdout.read(struct.unpack("!I", length)[0]))
        content = self._process.stdout.read(header["size"])
        if "error" in header:
            raise BoxError(f"the box by unshare refused: {header['error']}")
        return header, content

    def _ended(self) -> BoxGone:
        if self._process.stderr is None or self._process.stderr.closed:
            return BoxGone("the box by unshare ended: it was closed; open another")
        complaint = self._process.stderr.read().decode(errors="replace").strip()
        last = complaint.splitlines()[-1] if complaint else "no message"
        return BoxGone(
            f"the box by unshare ended: {last}; look whether memory ran out, or, where none opens, allow user "
            "namespaces to this user or install docker or podman"
        )
