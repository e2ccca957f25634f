"""Client of a worker: one kept-alive connection to the server, blocking, patient while the server restarts."""

from __future__ import annotations

import http.client
import json
import logging
import threading
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote, urlsplit

from msgspec import structs

from lightningrl import wire
from lightningrl.control_api import BEAT, LEASE, RESULT, TRACES, Endpoint, LeaseRequest, Orders, Result, WorkerBeat
from lightningrl.errors import ServerError
from lightningrl.records import Lease
from lightningrl.types import Outcome
from lightningrl_client.attribution.scope import Report
from lightningrl_client.control.repeats import TRY_AGAIN, Repeats, read_sentence, reading_answer

__all__ = ["ControlClient", "RefusedError"]

JSON: Final = "application/json"
OTLP: Final = "application/x-protobuf"
TROUBLE: Final = (OSError, http.client.HTTPException)
NOT_TAKEN: Final = frozenset({400, 413, 422})
"""Statuses that speak of the body, not of the key, of the attempt or of the server."""
CONTRADICTS: Final = frozenset({404, 409})
"""Statuses of a report that names a call that never was, or contradicts another report."""

logger = logging.getLogger(__name__)

B = TypeVar("B")
A = TypeVar("A")


class RefusedError(ServerError):
    """The server answered with an error status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_of_report(self) -> bool:
        """True if the agent's report was wrong; else the server could not take it."""
        return self.status in NOT_TAKEN | CONTRADICTS


class ControlClient:
    """The control API as a worker uses it. Belongs to one thread; `interrupt` may come from another."""

    def __init__(self, server_url: str, worker_key: str, *, patience_s: float = 60.0, timeout_s: float = 30.0) -> None:
        parts = urlsplit(server_url.rstrip("/"))
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            problem = f"server url {server_url!r} is no http(s) url"
            raise ServerError(f"{problem}; give something like 'http://127.0.0.1:8000'")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        self._url = server_url
        self._root = parts.path
        self._worker_key = worker_key
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._interrupted = threading.Event()

    def lease(self, *, worker_id: str, wait_s: float, lease_s: float) -> Lease | None:
        """The next attempt to run; None = there was none for `wait_s`. `worker_id` runs one at a time."""
        body = LeaseRequest(worker_id=worker_id, wait_s=wait_s, lease_s=lease_s, exclusive=True)
        return self._ask(LEASE, body, wait_s=wait_s)

    def beat(self, worker_id: str, beat: WorkerBeat) -> Orders:
        """Say how the worker is, keep its leases, and hear what it is to do."""
        path = BEAT.path.format(wid=quote(worker_id, safe=":"))
        return wire.decode(self._send(path, wire.encode(beat), JSON, key=self._worker_key, wait_s=beat.wait_s), Orders)

    def report(self, lease: Lease, report: Result) -> Lease | None:
        """Hand in the attempt's result, with its own key; returns the next lease, where the report asks for one.

        The first report of an attempt counts. A result that the server cannot take is reported as the agent's failure,
        with the server's sentence; spans that it cannot take are dropped.
        """
        if report.then is not None:
            report = structs.replace(report, then=structs.replace(report.then, key=self._worker_key))
        elif report.outcome is Outcome.INFRASTRUCTURE_ERROR:
            report = structs.replace(report, worker_key=self._worker_key)
        try:
            return self._ask(RESULT, report, lease).lease
        except RefusedError as error:
            if report.spans is None and error.status not in NOT_TAKEN:
                raise
            refusal = error
        if report.spans is not None:
            try:  # they may be too large for one request with the result
                self._send(_path(TRACES, lease), report.spans, OTLP, key=lease.key)
            except ServerError as error:
                logger.warning("rollout %s: its spans are lost: %s", lease.rollout_id, error)
            return self.report(lease, structs.replace(report, spans=None))
        logger.warning("rollout %s: its result was refused, so it failed: %s", lease.rollout_id, refusal)
        sentence = f"the server did not take the agent's result: {refusal}"
        failure = Result(outcome=Outcome.AGENT_ERROR, error=sentence, duration_s=report.duration_s, then=report.then)
        return self._ask(RESULT, failure, lease).lease

    def post(self, path: str, report: Report, *, key: str) -> None:
        """Hand in what the agent itself reported. Raises ServerError with the server's sentence where it is refused."""
        self._send(path, json.dumps(report.body).encode(), JSON, key=key)

    def interrupt(self) -> None:
        """Make a waiting request fail now, and every later one."""
        self._interrupted.set()
        sock = self._connection.sock
        if sock is not None:
            try:
                sock.shutdown(2)
            except OSError as error:
                logger.debug("control connection was closed before: %s", error)

    def close(self) -> None:
        self._connection.close()

    def _ask(self, endpoint: Endpoint[B, A], body: B, lease: Lease | None = None, *, wait_s: float = 0.0) -> A:
        key = self._worker_key if lease is None else lease.key
        answer = self._send(_path(endpoint, lease), wire.encode(body), JSON, key=key, wait_s=wait_s)
        with reading_answer(self._url):
            return cast("A", wire.decode(answer, endpoint.answer) if answer else None)

    def _send(self, path: str, body: bytes, content_type: str, *, key: str, wait_s: float = 0.0) -> bytes:
        """Send until the server answers, at most `patience_s`. Every request of this class may be repeated."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": content_type}
        repeats = Repeats(self._patience_s)
        while True:
            try:
                status, answer = self._exchange(path, body, headers, timeout_s=self._timeout_s + wait_s)
            except TROUBLE as error:
                self._connection.close()
                if self._interrupted.is_set() or (pause := repeats.next_pause()) is None:
                    problem = f"{type(error).__name__}: {error}"
                    raise ServerError(f"server {self._url!r} does not answer: {problem}") from error
            else:
                if status < 400:
                    return answer
                if status not in TRY_AGAIN or (pause := repeats.next_pause(says_not_now=True)) is None:
                    sentence = read_sentence(answer) or answer[:500].decode(errors="replace")
                    raise RefusedError(f"server {self._url!r} refused {path!r} with {status}: {sentence}", status)
            self._interrupted.wait(pause)

    def _exchange(self, path: str, body: bytes, headers: dict[str, str], *, timeout_s: float) -> tuple[int, bytes]:
        if self._connection.sock is None:
            self._connection.timeout = timeout_s
            self._connection.connect()
        elif self._connection.sock.gettimeout() != timeout_s:
            self._connection.sock.settimeout(timeout_s)
        if self._interrupted.is_set():  # also while it connected: there was no socket to shut
            raise ConnectionAbortedError("the request was interrupted")
        self._connection.request("POST", self._root + path, body, headers)
        response = self._connection.getresponse()
        return response.status, response.read()


def _path(endpoint: Endpoint[Any, Any], lease: Lease | None) -> str:
    if lease is None:
        return endpoint.path
    return endpoint.path.format(rid=quote(lease.rollout_id, safe=":"), n=lease.attempt)
