"""Forwarding of ingested spans and log records to the user's own collector: batched, in the background, bounded.

export ─► offer (returns at once) ─► bounded queue ─► one request per batch ─► collector
                                          └─► full, refused or unreachable: dropped and counted, one line per outage

Not a `BatchSpanProcessor` in each worker: programs in other languages export to this server alone, log records have no
rollout there, and the collector's key would lie in the environment of the user's agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lightningrl.keys import Mask
from lightningrl.recipe_tables import TelemetryConfig
from lightningrl_server.inflate import UNCOMPRESSED, read_at_most
from lightningrl_server.spans.otlp import Export

__all__ = ["ExportForwarder", "Forwarders", "create_forwarders"]

QUEUE_BYTES: Final = 64 * 2**20
"""Bytes of exports that wait; more than that are dropped, newest first."""
BATCH_BYTES: Final = 2 * 2**20
BATCH_WAIT_S: Final = 0.5
TRIES: Final = 4
FIRST_PAUSE_S: Final = 0.5
"""Seconds before the second try; the pause doubles with each."""
TIMEOUT_S: Final = 10.0
CLOSE_S: Final = 3.0
"""Seconds for what is left when the server stops."""
TRACES: Final = "/v1/traces"
LOGS: Final = "/v1/logs"
LONGEST_ANSWER: Final = 10_000
"""Bytes that are read of what a collector answers."""
RETRIED: Final = frozenset({429, 502, 503, 504})

logger = logging.getLogger(__name__)


class ExportForwarder:
    """Sends to one address of a collector. `offer` from the event loop; `close` sends what is left, within bounds."""

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, *, what: str = "spans", queue_bytes: int = QUEUE_BYTES
    ) -> None:
        """Send to `url`. `what`: spans, or log records."""
        self.forwarded = 0
        """Spans or records that the collector took."""
        self.failed = 0
        """Spans or records that were dropped."""
        self._what = what
        self._url = url
        own = dict(headers or {})
        self._headers = {"content-type": "application/x-protobuf", "content-encoding": "gzip", **UNCOMPRESSED, **own}
        self._mask = Mask(own.values())
        self._limit = queue_bytes
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._is_closing = False
        self._is_out = False
        self._sending: asyncio.Task[None] | None = None

    def offer(self, request: Export, rollout_id: str, attempt: int) -> None:
        """Queue an export, with the rollout as an attribute of its resources."""
        if isinstance(request, ExportTraceServiceRequest):
            resources = [one.resource for one in request.resource_spans]
            count = sum(len(scope.spans) for one in request.resource_spans for scope in one.scope_spans)
        else:
            resources = [one.resource for one in request.resource_logs]
            count = sum(len(scope.log_records) for one in request.resource_logs for scope in one.scope_logs)
        if not count or self._is_closing:
            return
        for resource in resources:
            resource.attributes.add(key="lightningrl.rollout.id").value.string_value = rollout_id
            resource.attributes.add(key="lightningrl.attempt").value.int_value = attempt
        body = request.SerializeToString()
        if self._waiting_bytes + len(body) > self._limit:
            self._drop(count, f"{self._limit} bytes of {self._what} wait already")
            return
        self._waiting.append((body, count))
        self._waiting_bytes += len(body)
        self._arrived.set()
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())

    async def close(self) -> None:
        """Send what is left for a few seconds, then drop it."""
        self._is_closing = True
        self._arrived.set()
        if self._sending is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._sending, CLOSE_S)
        left = sum(count for _, count in self._waiting)
        if left:
            self._drop(left, "the server stops")
        if self.failed:
            numbers = self.forwarded, self._what, self._url, self.failed
            logger.warning("telemetry: %d %s reached %r, %d did not", *numbers)

    async def _send_all(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            while self._waiting or not self._is_closing:
                await self._arrived.wait()
                if not self._is_closing and self._waiting_bytes < BATCH_BYTES:
                    await asyncio.sleep(BATCH_WAIT_S)
                if not self._is_closing:
                    self._arrived.clear()
                while self._waiting:
                    await self._send(client, *self._take())

    def _take(self) -> tuple[bytes, int]:
        """Return a batch and how many are in it: protobuf requests are joined one after the other."""
        bodies: list[bytes] = []
        size = total = 0
        while self._waiting and (not bodies or size + len(self._waiting[0][0]) <= BATCH_BYTES):
            body, count = self._waiting.popleft()
            bodies.append(body)
            size += len(body)
            total += count
        self._waiting_bytes -= size
        return b"".join(bodies), total

    async def _send(self, client: httpx.AsyncClient, batch: bytes, count: int) -> None:
        problem = ""
        try:
            content = await asyncio.to_thread(gzip.compress, batch, 1)
            for number in range(TRIES):
                if number:
                    await asyncio.sleep(FIRST_PAUSE_S * 2 ** (number - 1))
                try:
                    async with (
                        asyncio.timeout(TIMEOUT_S),
                        client.stream("POST", self._url, content=content, headers=self._headers) as answer,
                    ):
                        words, _ = await read_at_most(answer, LONGEST_ANSWER)
                except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                    problem = self._mask.text(f"{type(error).__name__}: {error}").removesuffix(": ")
                else:
                    if answer.is_success:
                        self.forwarded += count
                        self._is_out = False
                        return
                    text = self._mask.text(words.decode(errors="replace"))
                    problem = f"it answered {answer.status_code}: {text[:200]!r}"
                    if answer.status_code not in RETRIED:
                        break
                if self._is_closing or self._is_out:  # this batch was its chance to come back
                    break
        except asyncio.CancelledError:
            self._drop(count, "the server stops")
            raise
        self._drop(count, problem)

    def _drop(self, count: int, problem: str) -> None:
        self.failed += count
        if not self._is_out:
            self._is_out = True
            sentence = "telemetry: %s do not reach %r: %s; rollouts go on, and later failures are only counted"
            logger.warning(sentence, self._what, self._url, problem)


@dataclass(frozen=True, kw_only=True, slots=True)
class Forwarders:
    """A recipe's forwarders; None = nothing is handed on."""

    spans: ExportForwarder | None = None
    logs: ExportForwarder | None = None

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in (self.spans, self.logs) if one is not None))


def create_forwarders(config: TelemetryConfig | None, environment: Mapping[str, str]) -> Forwarders:
    """Make the recipe's forwarders. Raises ConfigError for a header whose variable is not set. Logs go to `…/v1/logs`
    beside a recipe's `…/v1/traces`, else nowhere: a path of its own need not take logs."""
    place = None if config is None else config.target(environment)
    if place is None:
        return Forwarders()
    url, headers = place
    base = url.removesuffix(TRACES)
    logs = None if base == url else ExportForwarder(base + LOGS, headers, what="log records")
    return Forwarders(spans=ExportForwarder(url, headers), logs=logs)
