"""News of a run as server-sent events. They carry ids only: a page fetches what it shows.

GET events?after=12.880.9312   or the header Last-Event-ID, which a browser sends when it comes back
    id: 13.884.9390            step, attempt and call that the store has come to: they outlive the server
    data: {"steps": [13], "running": 4}

Each finished step is told once, however often the server is killed in between: all after the id that is asked for, in
order. What a resumed run takes back is told by `"back": true`; its steps come again when they are done again. Nobody
looks: nothing is read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from lightningrl.errors import LightningError
from lightningrl_viewer.reading.queries.health import Position
from lightningrl_viewer.reading.reader import StoredRun

__all__ = ["Place", "stream_news"]

INTERVAL_S: Final = 1.0
"""Seconds between two looks at the store: a page is fetched no more often."""
IDLE_S: Final = 2.0
"""Seconds between two looks where nothing has happened for a while."""
_LOOKS: Final = 30
"""Looks without news until that is so."""
_STILL_HERE: Final = 10
"""Looks between two comments, by which a peer that has gone is noticed."""
_LARGEST: Final = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place in a run up to which somebody has heard."""

    step: int = 0
    attempt: int = 0
    call: int = 0

    @classmethod
    def read(cls, text: str) -> Place | None:
        """Read an event's id; None where it is none."""
        parts = text.split(".")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in parts):
            return None
        step, attempt, call = (min(int(part), _LARGEST) for part in parts)
        return cls(step=step, attempt=attempt, call=call)

    @classmethod
    def of(cls, position: Position) -> Place:
        return cls(step=position.step, attempt=position.attempt, call=position.call)

    def __str__(self) -> str:
        return f"{self.step}.{self.attempt}.{self.call}"


async def stream_news(
    run: StoredRun, after: Place | None, is_gone: Callable[[], Awaitable[bool]], *, interval_s: float = INTERVAL_S
) -> AsyncIterator[str]:
    """Yield events until `is_gone`. `after` None: from now on."""
    yield "retry: 1000\n\n"
    place, running, quiet = after, -1, 0
    while not await is_gone():
        try:
            position = await run.queries.position(place.step if place is not None else _LARGEST)
        except LightningError:  # its folder went, or its store is closed: the browser asks again
            return
        now = Place.of(position)
        is_news = place is not None and (now != place or running not in (-1, position.running))
        if place is None or is_news:
            is_back = place is not None and now.step < place.step
            news = {
                "steps": list(position.later_steps),
                "running": position.running,
                **({"back": True} if is_back else {}),
            }
            now = Place(step=max(position.later_steps, default=now.step), attempt=now.attempt, call=now.call)
            yield f"id: {now}\ndata: {json.dumps(news)}\n\n"
            quiet = 0
        elif (quiet := quiet + 1) % _STILL_HERE == 0:
            yield ": still here\n\n"
        place, running = now, position.running
        await asyncio.sleep(interval_s if quiet < _LOOKS else max(interval_s, IDLE_S))
