"""What the pool tells a worker, and what a worker tells the pool: JSON lines over its standard input and output."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

__all__ = ["WorkerEvent", "WorkerSettings", "decode_event", "decode_settings", "encode_line"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """The first line that a worker reads."""

    server_url: str
    worker_key: str
    """Leases and reports; see `lightningrl.keys`."""
    worker_id: str
    agent: str
    """`"agent.py:answer"` or `"package.module:function"`."""
    base_dir: str = "."
    """Agent files are relative to it."""
    adapters: tuple[str, ...] = ()
    """Names of installed adapters, or `"module:factory"`."""
    base_urls: tuple[str, ...] = ()
    """Base URLs of models, beside those of OpenAI and Anthropic, whose calls go to the gateway."""
    concurrency: int = 1
    """Attempts at a time; 1 = exclusive, attribution is exact whatever the agent does."""
    lease_s: float = 30.0
    lease_wait_s: float = 10.0
    patience_s: float = 60.0
    """How long the server may be away."""
    parent_pid: int = 0
    """The worker dies with this process; 0 = with nobody."""
    event_token: str = ""
    """Every event carries it, so that what the agent writes into the pipe is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEvent:
    """One line that a worker writes."""

    kind: str
    """`ready`, `failed` (the agent cannot be loaded), `started`, `finished`, `revoked` (attempt taken away, agent cannot be stopped),
    `lost` (the server is gone)."""
    rollout_id: str = ""
    attempt: int = 0
    limit_s: float = 0.0
    """With `started`: after this time the worker is to be killed."""
    error: str = ""
    token: str = ""
    """`WorkerSettings.event_token`"""


def encode_line(message: WorkerSettings | WorkerEvent) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_settings(line: bytes) -> WorkerSettings:
    return msgspec.json.decode(line, type=WorkerSettings)


def decode_event(line: bytes) -> WorkerEvent:
    return msgspec.json.decode(line, type=WorkerEvent)
