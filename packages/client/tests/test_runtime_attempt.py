"""An attempt that is taken away: stopped while its agent runs, left alone once the agent has ended."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sizes import PATIENCE_S

from lightningrl.records import Lease
from lightningrl.types import Outcome, RolloutMode, Task
from lightningrl_client.attribution.scope import ActiveRollout
from lightningrl_client.runtime.agent_loader import load_agent
from lightningrl_client.runtime.attempt import Attempt


def make_attempt() -> Attempt:
    lease = Lease(
        rollout_id="r",
        attempt=1,
        task=Task(id="t", input="hi"),
        mode=RolloutMode.TRAIN,
        timeout_s=30,
        key="k",
        expires_at=0.0,
    )
    return Attempt(lease, ActiveRollout(rollout_id="r", attempt=1, base_path="/v1", key="k"))


async def echo(text: str) -> str:
    await asyncio.sleep(0)
    return text


def test_an_agent_that_has_ended_is_no_reason_to_kill_its_worker() -> None:
    """A heartbeat that is on its way while the result arrives is answered that the attempt is over."""
    for agent in (echo, str.upper):
        attempt = make_attempt()
        report = attempt.run(load_agent(agent), asyncio.run)  # type: ignore[arg-type]
        assert report.outcome is Outcome.SUCCEEDED
        assert attempt.revoke(), "its worker was told to be killed, with all the rollouts beside it"


def test_an_agent_that_runs_in_a_thread_cannot_be_stopped_from_inside() -> None:
    attempt, has_begun, may_end = make_attempt(), threading.Event(), threading.Event()

    def slow(text: str) -> str:
        has_begun.set()
        may_end.wait(PATIENCE_S)
        return text

    reports: list[Any] = []
    thread = threading.Thread(target=lambda: reports.append(attempt.run(load_agent(slow), asyncio.run)))  # type: ignore[arg-type]
    thread.start()
    has_begun.wait(PATIENCE_S)
    assert not attempt.revoke()
    may_end.set()
    thread.join(PATIENCE_S)
    assert reports[0].outcome is Outcome.SUCCEEDED


def test_a_thread_of_an_agent_that_was_stopped_keeps_none_from_the_next() -> None:
    """`asyncio.to_thread` has a few threads for all agents of the loop, and one that hangs is never free again."""
    stopped, may_end = make_attempt(), threading.Event()

    def hang() -> None:
        stopped.revoke()
        may_end.wait(PATIENCE_S)

    async def wait(text: str) -> str:
        await asyncio.to_thread(hang)
        return text

    async def shout(text: str) -> str:
        return await asyncio.to_thread(text.upper)

    with asyncio.Runner() as runner:
        runner.get_loop().set_default_executor(ThreadPoolExecutor(1))
        assert stopped.run(load_agent(wait), runner.run).outcome is Outcome.CANCELLED  # type: ignore[arg-type]
        report = make_attempt().run(load_agent(shout), runner.run)  # type: ignore[arg-type]
        may_end.set()
    assert (report.outcome, report.output) == (Outcome.SUCCEEDED, "HI")
