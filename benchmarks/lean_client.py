"""A client that costs next to nothing: a raw socket for each call in flight, bodies made beforehand, answers searched
and not parsed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Attempt", "Load", "bodies", "send_all"]

TIMEOUT_S: Final = 600.0
"""Of a call, as OpenAI's clients have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Where the calls of one attempt go."""

    path: str
    """Up to and with `/v1`."""
    key: str


@dataclass(kw_only=True, slots=True)
class Load:
    """What became of the calls."""

    latencies_s: list[float] = field(default_factory=list)
    """Of calls that were answered as they should be."""
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    def p50_ms(self) -> float:
        return 1000 * sorted(self.latencies_s)[len(self.latencies_s) // 2]


def bodies(turns: int, answer: str, *, table: str = "singer") -> list[bytes]:
    """The request bodies of a conversation that grows by the engine's answer and a word of the agent's; they begin with
    600 characters about a table."""
    schema = (f"Table {table}(id, name, age, country), concert(id, singer_id, year). " * 40)[:600]
    messages = [{"role": "system", "content": schema}, {"role": "user", "content": "Who is older than 20?"}]
    made = []
    for _ in range(turns):
        made.append(json.dumps({"model": "policy", "messages": messages}).encode())
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "An error; write it again."}]
    return made


async def send_all(
    port: int, conversations: Iterable[tuple[Attempt, Sequence[bytes]]], answer: str, in_flight: int
) -> Load:
    """Every attempt's conversation, so many at once, each turn after the one before."""
    load = Load()
    waiting = iter(conversations)

    async def take_turns() -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for attempt, turns in waiting:
            for body in turns:
                started = time.perf_counter()
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        connection = connection or await asyncio.open_connection("127.0.0.1", port)
                        status, answered = await post(*connection, attempt, body)
                except (OSError, TimeoutError, EOFError) as error:
                    load.failures.append(type(error).__name__)
                    connection = None
                    break
                if status != 200 or answer.encode() not in answered:
                    load.failures.append(f"{status} {answered[:200]!r}")
                    break
                load.latencies_s.append(time.perf_counter() - started)
        if connection is not None:
            connection[1].close()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(take_turns())
    load.wall_s = time.perf_counter() - began
    return load


async def post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, attempt: Attempt, body: bytes
) -> tuple[int, bytes]:
    """One request on a connection that stays open: status and body."""
    head = (
        f"POST {attempt.path}/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {attempt.key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    headers = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(headers.partition(b"content-length:")[2].partition(b"\r\n")[0])
    return int(headers[9:12]), await reader.readexactly(length)
