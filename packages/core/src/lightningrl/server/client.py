"""The control API as Python: one typed method per endpoint, patient while the server restarts.

Every request may be repeated without harm but one, `lease`: its answer lost, the attempt waits for its lease to end.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import msgspec
import numpy as np

from lightningrl.clean import clean_json
from lightningrl.errors import ServerError
from lightningrl.server.wire import decode_trajectories
from lightningrl.store.protocol import Lease, RolloutFilter, Score, StepRecord
from lightningrl.types import Outcome, RolloutMode, RolloutSpec, RolloutState, Task, Trajectory

__all__ = ["ServerClient"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_encoder = msgspec.json.Encoder()


class _Lease(msgspec.Struct):
    rollout_id: str
    attempt: int
    task: Task
    mode: RolloutMode
    timeout_s: float
    key: str
    expires_at: float


class ServerClient:
    """Talks to one server. Make it and use it on one event loop."""

    def __init__(self, base_url: str, key: str, *, patience_s: float = 60.0, timeout_s: float = 60.0) -> None:
        """`key` is the run key, or a scoped one for its own attempt. While the server cannot be reached, requests are repeated for
        `patience_s`."""
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=base_url.rstrip("/"),
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
            timeout=timeout_s,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # ------------------------------------------------------------------ the run

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> int:
        """How many are new."""
        return int(_json(await self._post("/rollouts", {"rollouts": list(specs)}))["created"])

    async def wait(self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None) -> tuple[str, ...]:
        """The finished ones, as soon as there are `min_finished` (None = all) or `wait_s` is over."""
        body = {"rollout_ids": list(rollout_ids), "wait_s": wait_s, "min_finished": min_finished}
        return tuple(_json(await self._post("/wait", body, wait_s=wait_s))["finished"])

    async def trajectories(self, rollout_ids: Sequence[str]) -> tuple[Trajectory, ...]:
        """In the order asked."""
        return decode_trajectories(await self._post("/trajectories", {"rollout_ids": list(rollout_ids)}))

    async def set_scores(self, scores: Sequence[Score]) -> None:
        await self._post("/scores", {"scores": [_score(score) for score in scores]})

    async def mark_trained(self, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None:
        await self._post("/steps", {"step": step, "rollout_ids": list(rollout_ids), "metrics": dict(metrics)})

    async def steps(self) -> tuple[StepRecord, ...]:
        return msgspec.json.decode(await self._send("GET", "/steps"), type=tuple[StepRecord, ...])

    async def rollback_steps(self, after: int) -> int:
        return _count(await self._send("DELETE", f"/steps?after={after}"))

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        return _count(await self._post("/cancel", {"rollout_ids": list(rollout_ids)}))

    async def retry(self, rollout_ids: Sequence[str], timeout_s: float) -> int:
        """Queue those that failed again; how many."""
        return _count(await self._post("/retry", {"rollout_ids": list(rollout_ids), "timeout_s": timeout_s}))

    async def interrupt(self, reason: str) -> int:
        """Queue all running attempts again; how many."""
        return _count(await self._post("/interrupt", {"reason": reason}))

    async def status(self) -> dict[str, Any]:
        """Totals by state and outcome; policies with version, connected, held, in flight."""
        return _json(await self._send("GET", "/status"))

    async def rollout(self, rollout_id: str) -> dict[str, Any]:
        return _json(await self._send("GET", f"/rollouts/{rollout_id}"))

    async def list_rollouts(self, where: RolloutFilter = RolloutFilter()) -> list[dict[str, Any]]:  # noqa: B008
        query = {name: value for name in RolloutFilter.__slots__ if (value := getattr(where, name)) is not None}
        found: list[dict[str, Any]] = msgspec.json.decode(await self._send("GET", f"/rollouts?{httpx.QueryParams(query)}"))
        return found

    # ------------------------------------------------------------------ an attempt

    async def lease(self, worker_id: str, lease_s: float, wait_s: float = 0.0) -> Lease | None:
        """The next attempt; None = there was none for `wait_s`."""
        body = {"worker_id": worker_id, "lease_s": lease_s, "wait_s": wait_s}
        answer = await self._post("/leases", body, wait_s=wait_s, repeat=False)
        if not answer:
            return None
        got = msgspec.json.decode(answer, type=_Lease)
        return Lease(**{name: getattr(got, name) for name in got.__struct_fields__})

    async def heartbeat(self, rollout_id: str, attempt: int, lease_s: float) -> bool:
        """False = stop working on it."""
        return bool(_json(await self._post(_attempt(rollout_id, attempt, "heartbeat"), {"lease_s": lease_s}))["continue"])

    async def finish_attempt(
        self, rollout_id: str, attempt: int, outcome: Outcome, output: Any = None, error: str | None = None, duration_s: float = 0.0
    ) -> RolloutState:
        body = {"outcome": outcome, "output": output, "error": error, "duration_s": duration_s}
        return RolloutState(_json(await self._post(_attempt(rollout_id, attempt, "result"), body))["state"])

    async def add_rewards(
        self, rollout_id: str, attempt: int, rewards: Mapping[str, float | None], transition_id: str | None = None
    ) -> None:
        await self._post(_attempt(rollout_id, attempt, "rewards"), {"rewards": dict(rewards), "transition_id": transition_id})

    async def export_spans(self, rollout_id: str, attempt: int, body: bytes) -> None:
        """An OTLP ExportTraceServiceRequest."""
        await self._send("POST", _attempt(rollout_id, attempt, "v1/traces"), body, content_type="application/x-protobuf")

    # ------------------------------------------------------------------ plumbing

    async def _post(self, path: str, body: object, *, wait_s: float = 0.0, repeat: bool = True) -> bytes:
        return await self._send("POST", path, _encode(body), wait_s=wait_s, repeat=repeat)

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        wait_s: float = 0.0,
        repeat: bool = True,
        content_type: str = "application/json",
    ) -> bytes:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        pause = 0.05
        while True:
            try:
                answer = await self._http.request(
                    method,
                    f"/api/v1{path}",
                    content=body,
                    headers={"content-type": content_type},
                    timeout=httpx.Timeout(self._timeout_s + wait_s),
                )
            except httpx.TransportError as error:
                unsent = isinstance(error, httpx.ConnectError)
                if not (repeat or unsent) or loop.time() + pause > deadline:
                    problem = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise ServerError(f"no server answers at {str(self._http.base_url)!r} ({problem}); is it running?") from error
                logger.debug("server at %s: %s; again in %.2f s", self._http.base_url, error, pause)
            else:
                if answer.status_code < 400:
                    return answer.content
                if answer.status_code not in (502, 503, 504) or loop.time() + pause > deadline:
                    raise ServerError(_sentence(answer))
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)


def _encode(body: object) -> bytes:
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:  # a task of the data set, perhaps: the server would replace its lone surrogates anyway
        return _encoder.encode(clean_json(msgspec.to_builtins(body)))


def _attempt(rollout_id: str, attempt: int, tail: str) -> str:
    return f"/rollouts/{rollout_id}/attempts/{attempt}/{tail}"


def _json(data: bytes) -> dict[str, Any]:
    return msgspec.json.decode(data, type=dict[str, Any])


def _count(data: bytes) -> int:
    return int(_json(data)["count"])


def _score(score: Score) -> dict[str, Any]:
    return {
        "rollout_id": score.rollout_id,
        "attempt": score.attempt,
        "rewards": dict(score.rewards),
        "reward": score.reward,
        "transition_rewards": {name: dict(values) for name, values in score.transition_rewards.items()},
        "advantages": {
            name: None if values is None else base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()
            for name, values in score.advantages.items()
        },
    }


def _sentence(answer: httpx.Response) -> str:
    try:
        return str(_json(answer.content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the server answered {answer.request.url.path!r} with {answer.status_code}: {answer.text[:300]!r}"
