"""The control API as Python: one typed method per endpoint, patient while the server restarts. Every request may be
repeated without harm but one, `lease`: its answer lost, the attempt waits for its lease to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar, cast

import httpx
import msgspec

from lightningrl import control_api as api
from lightningrl import wire
from lightningrl.control_api import Endpoint
from lightningrl.credentials import check_key
from lightningrl.errors import ServerError
from lightningrl.records import Lease, RolloutFilter, RolloutRecord, Score, StepRecord
from lightningrl.types import Outcome, RolloutSpec, RolloutState, Trajectory
from lightningrl_client.control.repeats import TRY_AGAIN, Repeats, read_sentence, reading_answer

__all__ = ["ServerClient"]

logger = logging.getLogger(__name__)

B = TypeVar("B")
A = TypeVar("A")


class ServerClient:
    """Talks to one server. Make it and use it on one event loop."""

    def __init__(self, base_url: str, key: str, *, patience_s: float = 60.0, timeout_s: float = 60.0) -> None:
        """`key`: the run's, or an attempt's own. Requests are repeated for `patience_s` without a server."""
        self._url = base_url.rstrip("/")
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers={
                "authorization": f"Bearer {check_key(key, 'the key to the server')}",
                "content-type": "application/json",
            },
            timeout=timeout_s,
            trust_env=False,
            # to read certificates that nobody asks for takes tens of milliseconds
            verify=base_url.startswith("https:"),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(
        self, endpoint: Endpoint[B, A], body: B, *, wait_s: float = 0.0, repeat: bool = True, **place: str | int
    ) -> A:
        """`place` fills the path. Raises ServerError with the server's sentence."""
        path = endpoint.path.format(**place)
        if endpoint.method != "POST" and body is not None:
            query = {name: value for name, value in msgspec.to_builtins(body).items() if value is not None}
            path = f"{path}?{httpx.QueryParams(query)}"
        content = wire.encode(body) if endpoint.method == "POST" else None
        answer = await self._send(endpoint.method, path, content, wait_s=wait_s, repeat=repeat)
        with reading_answer(self._url):
            return cast("A", wire.decode(answer, endpoint.answer) if answer else None)

    # ------------------------------------------------------------------ the run

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> int:
        """Queue rollouts; returns how many are new."""
        return (await self.ask(api.CREATE, api.Create(rollouts=specs))).count

    async def wait(self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None) -> tuple[str, ...]:
        """The finished ones, as soon as there are `min_finished` (None = all) or `wait_s` is over."""
        body = api.Wait(rollout_ids=rollout_ids, wait_s=wait_s, min_finished=min_finished)
        return tuple((await self.ask(api.WAIT, body, wait_s=wait_s)).finished)

    async def trajectories(self, rollout_ids: Sequence[str]) -> tuple[Trajectory, ...]:
        """Read trajectories, in the order of `rollout_ids`."""
        body = wire.encode(api.RolloutIds(rollout_ids=rollout_ids))
        answer = await self._send("POST", api.TRAJECTORIES.path, body)
        with reading_answer(self._url):
            return wire.decode_trajectories(answer)

    async def set_scores(self, scores: Sequence[Score]) -> None:
        await self.ask(api.SCORES, api.Scores(scores=scores))

    async def mark_trained(self, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None:
        await self.ask(api.STEP, api.Step(step=step, rollout_ids=rollout_ids, metrics=metrics))

    async def steps(self) -> Sequence[StepRecord]:
        return await self.ask(api.STEPS, None)

    async def rollback_steps(self, after: int) -> int:
        return (await self.ask(api.ROLLBACK, api.Rollback(after=after))).count

    async def forget_rollouts(self, through: int, slack: int = 0) -> int:
        """Forget rollouts of steps up to `through`; returns how many."""
        return (await self.ask(api.FORGET, api.Forget(through=through, slack=slack))).count

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        return (await self.ask(api.CANCEL, api.Cancel(rollout_ids=rollout_ids))).count

    async def retry(self, rollout_ids: Sequence[str], timeout_s: float) -> int:
        """Queue again those that failed; returns how many."""
        return (await self.ask(api.RETRY, api.Retry(rollout_ids=rollout_ids, timeout_s=timeout_s))).count

    async def interrupt(self, reason: str) -> int:
        """Queue all running attempts again; how many."""
        return (await self.ask(api.INTERRUPT, api.Interrupt(reason=reason))).count

    async def status(self) -> api.Status:
        return await self.ask(api.STATUS, None)

    async def rollout(self, rollout_id: str) -> RolloutRecord:
        return await self.ask(api.ROLLOUT, None, rid=rollout_id)

    async def list_rollouts(self, where: RolloutFilter = RolloutFilter()) -> Sequence[RolloutRecord]:  # noqa: B008
        return await self.ask(api.LIST, where)

    # ------------------------------------------------------------------ an attempt

    async def lease(self, worker_id: str, lease_s: float, wait_s: float = 0.0) -> Lease | None:
        """The next attempt; None = there was none for `wait_s`."""
        body = api.LeaseRequest(worker_id=worker_id, lease_s=lease_s, wait_s=wait_s)
        return await self.ask(api.LEASE, body, wait_s=wait_s, repeat=False)

    async def finish_attempt(
        self,
        rollout_id: str,
        attempt: int,
        outcome: Outcome,
        output: Any = None,
        error: str | None = None,
        duration_s: float = 0.0,
    ) -> RolloutState:
        body = api.Result(outcome=outcome, output=output, error=error, duration_s=duration_s)
        return (await self.ask(api.RESULT, body, rid=rollout_id, n=attempt)).state

    # ------------------------------------------------------------------ plumbing

    async def _send(
        self, method: str, path: str, body: bytes | None = None, *, wait_s: float = 0.0, repeat: bool = True
    ) -> bytes:
        repeats = Repeats(self._patience_s)
        while True:
            try:
                answer = await self._http.request(
                    method, path, content=body, timeout=httpx.Timeout(self._timeout_s + wait_s)
                )
            except httpx.TransportError as error:
                unsent = isinstance(error, httpx.ConnectError)
                if not (repeat or unsent) or (pause := repeats.next_pause()) is None:
                    problem = f"{type(error).__name__}: {error}".rstrip(": ")
                    raise ServerError(f"no server answers at {self._url!r} ({problem}); is it running?") from error
                logger.debug("server at %s: %s; again in %.2f s", self._url, error, pause)
            else:
                if answer.status_code < 400:
                    return answer.content
                if answer.status_code not in TRY_AGAIN or (pause := repeats.next_pause(says_not_now=True)) is None:
                    status, path = answer.status_code, answer.request.url.path
                    shown = f"the server answered {path!r} with {status}: {answer.text[:300]!r}"
                    raise ServerError(read_sentence(answer.content) or shown)
            await asyncio.sleep(pause)
