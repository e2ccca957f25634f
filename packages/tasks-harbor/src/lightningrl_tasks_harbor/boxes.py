"""Protocol of a box: a place of its own for a rollout's commands, which goes with all that is in it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from lightningrl.errors import LightningError

__all__ = ["LONGEST_OUTPUT", "PLAIN_PATH", "Box", "BoxError", "BoxGone", "CommandResult", "pack"]

LONGEST_OUTPUT: Final = 16_384
"""Bytes of a command's output that are kept, unless the caller says otherwise."""
PLAIN_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class BoxError(LightningError):
    """A box cannot be opened, or refused what it was asked."""


class BoxGone(BoxError):
    """The box ended while it was in use. A worker reports it as `infrastructure_error`: it is nobody's answer to a
    task, and is tried again."""

    status_code: int = 503


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """End of a command in a box."""

    output: str
    """Stdout and stderr, as they came; of a longer one the beginning and the end, with a line between them."""
    status: int
    is_late: bool = False
    """True if it was killed because its time was over."""


class Box(Protocol):
    """Commands of one rollout run here. All methods raise BoxGone where the box has ended."""

    kind: str
    """`"unshare"`, or the container command: `"docker"`, `"podman"`."""

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
        ...

    def put(self, files: bytes, target: str, *, afresh: bool = False) -> None:
        """Unpack a tar archive into the folder `target`; `afresh` removes first what is there. Raises BoxError."""
        ...

    def take(self, path: str) -> bytes | None:
        """Pack a folder or a file as a tar archive, under its own name, None = there is none. Raises BoxError."""
        ...

    def read(self, path: str, limit: int) -> bytes | None:
        """Read the beginning of a regular file, None = there is none; links are not followed."""
        ...

    def stop_processes(self) -> None:
        """Kill what runs in the box."""
        ...

    def close(self) -> None:
        """End the box with its processes and files. Does nothing the second time."""
        ...


def pack(files: Iterable[tuple[Path, str]]) -> bytes:
    """Pack files and folders, each under its new name, as root's. Links are packed as links."""

    def as_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        if member.name.endswith(".sh"):
            member.mode |= 0o555
        return member

    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path, name in files:
            archive.add(path, arcname=name, filter=as_root)
    return content.getvalue()
