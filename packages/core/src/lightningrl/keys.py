"""The keys of a run: what the server checks, and what its workers are given.

run key      the trainer's: everything
worker key   of who starts workers (a supervisor): speaks for all of them; derived from the run key, which cannot be computed from it
process key  a worker process's: speaks for that worker alone; derived from the worker key in the same way
view key     of who looks at the run in a browser; opens its pages and nothing else; derived, too
attempt key  an agent's: its own attempt (made by the store for each lease)
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final
from urllib.parse import quote, unquote

__all__ = ["KEY_VARIABLE", "is_worker_key", "process_key", "view_key", "worker_key", "worker_of"]

KEY_VARIABLE: Final = "LIGHTNINGRL_KEY"
"""Where `lightningrl work` finds its key; agents never do."""

PREFIX: Final = "worker-"
PROCESS_PREFIX: Final = "process-"


def worker_key(run_key: str) -> str:
    """The key of whoever starts workers for a run: it speaks for all of them and opens nothing else. No worker process holds it."""
    return PREFIX + hmac.new(run_key.encode(), b"lightningrl worker key", hashlib.sha256).hexdigest()


def process_key(worker_key: str, worker_id: str) -> str:
    """The key that one worker process gets: it beats and leases as `worker_id`, and opens nothing else."""
    digest = hmac.new(worker_key.encode(), b"lightningrl process key " + worker_id.encode(), hashlib.sha256).hexdigest()
    return f"{PROCESS_PREFIX}{quote(worker_id, safe='')}:{digest}"


def worker_of(key: str) -> str:
    """The worker that a process key says it is of; "" = it looks like none."""
    return unquote(key.removeprefix(PROCESS_PREFIX).rpartition(":")[0], errors="replace") if key.startswith(PROCESS_PREFIX) else ""


def view_key(run_key: str) -> str:
    """The key that opens the run's pages: they show, and change nothing."""
    return hmac.new(run_key.encode(), b"lightningrl view key", hashlib.sha256).hexdigest()


def is_worker_key(key: str) -> bool:
    """Whether it looks like one: whoever starts workers may have been given one instead of the run key."""
    return key.startswith(PREFIX)
