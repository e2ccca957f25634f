"""Pages that other packages mount beside the server's API, and what they are given: the server imports none of them.

plugins with `lightningrl_pages` ─► create_app(mounts={"view": …}) ─► pages(run=ServedRun(…)) at /view
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from starlette.types import ASGIApp

from lightningrl.records import PolicyStatus, WorkerRecord
from lightningrl_server.store.protocol import Store

__all__ = ["Live", "MakePages", "ServedRun"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """State of a running run that its server knows and its store does not."""

    policies: Sequence[PolicyStatus]
    workers: Sequence[WorkerRecord]
    longest_pause_s: float | None
    """Seconds for which the server's event loop stood still at most; None = nobody watches."""
    memory_bytes: int | None
    calls_of_no_rollout: int = 0
    """Calls that it refused since its start: a task or thread that made them outlived its rollout, or never had one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRun:
    """The run that a server serves, for pages that are mounted in it."""

    folder: Path
    store: Store
    tokenizer_of: Callable[[str], Any | None]
    """Returns a policy's tokenizer; None where nobody has it."""
    live: Callable[[], Awaitable[Live]]
    view_key: str
    """Whoever shows it may look."""


class MakePages(Protocol):
    """Makes the application that is mounted."""

    def __call__(self, *, run: ServedRun) -> ASGIApp: ...
