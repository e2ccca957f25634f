"""The keys of a run: what the server checks, and what its workers are given. And all keys, put out of sight in texts.

run key      the trainer's: everything
worker key   a supervisor's, who starts workers: speaks for all of them; derived from the run key, by no way back
process key  a worker process's: speaks for that worker alone; derived from the worker key in the same way
view key     a browser's: opens the run's pages and nothing else; derived, too
attempt key  an agent's: its own attempt (made by the store for each lease)

"401: no such key sk-abc…"  ─► Mask ─►  "401: no such key ***"
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

__all__ = ["KEY_VARIABLE", "MASKED", "Mask", "is_worker_key", "process_key", "view_key", "worker_key", "worker_of"]

KEY_VARIABLE: Final = "LIGHTNINGRL_KEY"
"""Variable where `lightningrl work` finds its key; agents never do."""

PREFIX: Final = "worker-"
PROCESS_PREFIX: Final = "process-"

MASKED: Final = "***"
SHORTEST: Final = 6
"""Fewest characters of a key that is masked: `none` and `EMPTY`, which local servers are given, are words."""
_SECRET_VARIABLE: Final = re.compile(r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|_PAT)(_?\d+)?", re.IGNORECASE)


def worker_key(run_key: str) -> str:
    """The key of a supervisor: it speaks for all its workers and opens nothing else. No worker holds it."""
    return PREFIX + hmac.new(run_key.encode(), b"lightningrl worker key", hashlib.sha256).hexdigest()


def process_key(worker_key: str, worker_id: str) -> str:
    """The key that one worker process gets: it beats and leases as `worker_id`, and opens nothing else."""
    digest = hmac.new(worker_key.encode(), b"lightningrl process key " + worker_id.encode(), hashlib.sha256).hexdigest()
    return f"{PROCESS_PREFIX}{quote(worker_id, safe='')}:{digest}"


def worker_of(key: str) -> str:
    """The worker that a process key names; "" = it looks like no process key."""
    return (
        unquote(key.removeprefix(PROCESS_PREFIX).rpartition(":")[0], errors="replace")
        if key.startswith(PROCESS_PREFIX)
        else ""
    )


def view_key(run_key: str) -> str:
    """The key that opens the run's pages: they show, and change nothing."""
    return hmac.new(run_key.encode(), b"lightningrl view key", hashlib.sha256).hexdigest()


def is_worker_key(key: str) -> bool:
    """True for a key that looks like a worker key, which a supervisor may have been given instead of the run key."""
    return key.startswith(PREFIX)


class Mask:
    """Puts `***` in the place of keys; also where they are written as JSON, as HTML, in an address, or in base64, alone
    or behind a user."""

    def __init__(self, keys: Iterable[str | None] = ()) -> None:
        import html  # its table of entities takes a millisecond, and each agent's process starts here

        written: set[str] = set()
        for key in keys:
            for part in {key, key.partition(" ")[2].strip()} if key else ():  # `Bearer KEY` in a header
                if len(part) >= SHORTEST:
                    in_address = {quote(part), quote(part, safe="")}
                    written |= {part, json.dumps(part)[1:-1], part.replace("/", "\\/"), *in_address}
                    written |= {html.escape(part), html.escape(part, quote=False), *_as_base64(part.encode())}
        self.written = sorted(written, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, self.written))) if written else None

    @classmethod
    def of_variables(cls, environment: Mapping[str, str], *more: str) -> Mask:
        """A mask of variables whose names end in KEY, TOKEN, SECRET, PASSWORD or _PAT, numbered or not, and of
        `more`."""
        return cls([*(value for name, value in environment.items() if _SECRET_VARIABLE.fullmatch(name)), *more])

    def text(self, text: str) -> str:
        return text if self._found is None else self._found.sub(MASKED, text)

    def json(self, value: Any) -> Any:
        """Mask the texts and names in a JSON value."""
        if self._found is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.json(item) for item in value]
        if isinstance(value, dict):
            return {self.text(str(name)): self.json(item) for name, item in value.items()}
        return value


def _as_base64(key: bytes) -> set[str]:
    """Base64 letters that stem from the key alone, at each of three offsets: `user:KEY`, in basic authorization."""
    written = set()
    for behind in range(3):
        letters = base64.b64encode(bytes(behind) + key).decode().rstrip("=")
        written.add(letters[(0, 2, 3)[behind] : 4 * (len(key) + behind) // 3])
    return written
