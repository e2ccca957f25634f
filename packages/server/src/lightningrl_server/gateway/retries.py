"""Retries of one logical call: recorded once, answered with what was recorded.

A client says so with a stable call id, or (OpenAI's and Anthropic's SDKs) by counting how often it sent the same body.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable
from secrets import token_hex

from lightningrl.records import CallRecord
from lightningrl_server.gateway.request import Answer, CallContext

__all__ = ["Kept", "Retries"]

Kept = Answer | tuple[CallRecord, ...]
"""An answer of this process, or the choices the store kept for an earlier one."""


class Retries:
    """The logical calls of one attempt."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}
        self._done: dict[str, Kept] = {}
        self._keys: defaultdict[str, list[str]] = defaultdict(list)
        self._failed: Counter[str] = Counter()
        self._unseen: defaultdict[str, list[str]] = defaultdict(list)
        """Of a body: answers whose client left before they were sent. The next call of this body is a retry, though it may not say so."""

    def restore(self, calls: Iterable[CallRecord]) -> None:
        """Take over what the store kept, as after a restart of the server."""
        choices: defaultdict[str, list[CallRecord]] = defaultdict(list)
        for call in calls:
            choices[call.call_key.partition("#")[0]].append(call)
        for key, kept in choices.items():
            if key in self._open or key in self._done:
                continue  # it is answered here
            self._done[key] = tuple(kept)
            self._keys[_body_of(key)].append(key)

    async def begin(self, context: CallContext) -> tuple[str, Kept | None]:
        """The call's key, and what it was answered before. Waits for a first try that is still running."""
        given = context.call_id
        key = self._key_of_body(context) if given is None else f"id:{given.replace('#', '-')}"
        while key in self._open:
            await self._open[key].wait()
        kept = self._done.get(key)
        if kept is None:
            self._open[key] = asyncio.Event()
        return key, kept

    def end(self, key: str, kept: Kept | None) -> None:
        """The call is answered, or failed (None): its retry is then a first try."""
        running = self._open.pop(key, None)
        if running is not None:
            running.set()
        if kept is not None:
            self.keep(key, kept)
        elif key not in self._done:
            self._failed[_body_of(key)] += 1

    def keep(self, key: str, kept: Kept) -> None:
        """Answer a retry of the call with this."""
        self._done[key] = kept

    def keep_unseen(self, key: str, kept: Kept) -> None:
        """Answer the next call of the same body with this, which was recorded but never sent."""
        self.keep(key, kept)
        self._unseen[_body_of(key)].append(key)

    def _key_of_body(self, context: CallContext) -> str:
        # Without an id, tries are told apart by their count alone. Two calls of one body, the first of which fails:
        #     body, retries=0  ─► A, fails           body, retries=0  ─► B, answered
        #     body, retries=1  ─► a failed try is owed (`_failed`), so it is a first try: C, not the answer of B
        #     body, retries=1  ─► none is owed any more: the answer of the latest, C
        body = context.body_digest
        if self._unseen[body]:
            return self._unseen[body].pop()
        if context.retries and self._failed[body]:
            self._failed[body] -= 1
        elif context.retries and self._keys[body]:
            return self._keys[body][-1]
        key = f"{body}-{token_hex(4)}"
        self._keys[body].append(key)
        return key


def _body_of(key: str) -> str:
    return key.rpartition("-")[0]
