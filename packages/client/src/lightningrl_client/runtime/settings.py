"""A worker's settings, told when it starts: one line of JSON on its standard input."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightningrl.dialects import DIALECTS, Dialect

__all__ = ["WorkerSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """Everything that a worker needs to know."""

    server_url: str
    worker_key: str = field(repr=False)
    """A worker process has one that speaks for it alone, its supervisor one for all; see `lightningrl.keys`."""
    worker_id: str
    """Where several workers are to be started, the beginning of their ids."""
    agent: str
    """`"agent.py:answer"` or `"package.module:function"`."""
    base_dir: str = "."
    """Agent files are relative to it."""
    adapters: tuple[str, ...] = ()
    """Names of installed adapters, or `"module:factory"`."""
    base_urls: tuple[str, ...] = ()
    """Base URLs of models, beside the dialects' hosts, whose calls go to the gateway."""
    dialects: tuple[Dialect, ...] = DIALECTS
    """The APIs that the gateway speaks."""
    infrastructure: tuple[str, ...] = ()
    """Names of exceptions of the agent's that the world causes."""
    withheld: tuple[str, ...] = ()
    """Variables of the machine's environment that no worker gets: secrets of the run."""
    concurrency: int = 1
    """Attempts at a time; 1 = exclusive, attribution is exact whatever the agent does."""
    lease_s: float = 30.0
    lease_wait_s: float = 10.0
    patience_s: float = 60.0
    """Longest absence of the server."""
    parent_pid: int = 0
    """The worker dies with this process; 0 = with nobody."""
    first_words: int = 0
    """The file descriptor on which it says that it begins, or why it cannot; 0 = nobody listens."""
