"""What an agent returns or raises: whatever it is, it becomes a report that can be sent, stored and read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.control_api import Result
from lightningrl.records import Lease
from lightningrl.types import Outcome, RolloutMode, Task
from lightningrl_client.attribution.scope import ActiveRollout
from lightningrl_client.control.blocking import ControlClient
from lightningrl_client.runtime.agent_loader import LoadedAgent
from lightningrl_client.runtime.attempt import Attempt
from lightningrl_client.runtime.report import DEEPEST_OUTPUT, LONGEST_ERROR, LONGEST_OUTPUT
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.store_conformance import make_spec


def run_agent(act: Callable[[Any], Any]) -> Result:
    lease = Lease(
        rollout_id="r",
        attempt=1,
        task=Task(id="t", input="hi"),
        mode=RolloutMode.TRAIN,
        timeout_s=30,
        key="k",
        expires_at=0.0,
    )
    agent = LoadedAgent(name="agent.py:act", function=act, is_async=False)
    return Attempt(lease, ActiveRollout(rollout_id="r", attempt=1, base_path=BASE, key="k")).run(agent, asyncio.run)  # type: ignore[arg-type]


BASE = "/rollouts/r/attempts/1/v1"


def returns(output: Any) -> Result:
    return run_agent(lambda task: output)


def raises(error: BaseException) -> Result:
    def act(task: Any) -> None:
        raise error

    return run_agent(act)


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


def test_a_deep_output_fails_its_attempt_and_not_its_worker() -> None:
    assert returns(nested(DEEPEST_OUTPUT)).outcome is Outcome.SUCCEEDED
    for depth in (DEEPEST_OUTPUT + 1, 900, 5000):
        report = returns(nested(depth))
        assert report.outcome is Outcome.AGENT_ERROR, depth
        json.dumps(report.output)


def test_an_output_is_bounded_before_it_is_sent() -> None:
    report = returns("x" * (LONGEST_OUTPUT + 1))
    assert report.outcome is Outcome.AGENT_ERROR
    assert report.error is not None
    assert f"at most {LONGEST_OUTPUT} are kept" in report.error


def test_halves_of_characters_are_replaced_wherever_an_agent_may_put_them() -> None:
    report = returns({"query\ud800": ["a\udc00", "\U0001f600", "\ud83d\ude00"]})
    assert report.output == {"query�": ["a�", "\U0001f600", "\U0001f600"]}
    report = raises(ValueError("no table '\ud800'"))
    assert report.error is not None
    assert report.error.startswith("ValueError: no table '�'")


class UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    @property
    def code(self) -> str:
        raise KeyboardInterrupt


class Mischief(dict[str, Any]):
    def items(self) -> Any:
        raise OSError("not today")


def test_whatever_an_agent_raises_is_its_own_failure() -> None:
    for error in (UnsayableError(), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), MemoryError()):
        report = raises(error)
        assert report.outcome is Outcome.AGENT_ERROR, error.__class__
        assert report.error is not None
        assert type(error).__name__ in report.error
    assert returns(Mischief(a=1)).outcome is Outcome.AGENT_ERROR
    assert len(raises(ValueError("x" * 10**6)).error or "") == LONGEST_ERROR


@pytest.mark.parametrize(
    ("status", "url", "outcome"),
    [
        (500, f"http://gateway{BASE}/chat/completions", Outcome.INFRASTRUCTURE_ERROR),
        (507, f"http://gateway{BASE}/chat/completions", Outcome.INFRASTRUCTURE_ERROR),
        (500, "http://search.example.com/find", Outcome.AGENT_ERROR),
        (400, f"http://gateway{BASE}/chat/completions", Outcome.AGENT_ERROR),
    ],
)
def test_a_store_that_keeps_nothing_is_never_the_agents_fault(status: int, url: str, outcome: Outcome) -> None:
    request = httpx.Request("POST", url)
    answer = httpx.Response(status, request=request, json={"error": {"code": "store_error", "message": "no room"}})
    assert raises(httpx.HTTPStatusError("refused", request=request, response=answer)).outcome is outcome


async def test_a_result_that_the_server_refuses_ends_its_attempt_with_the_servers_sentence(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, attach=False, max_body_bytes=2000) as control:
        await control.store.create_rollouts([make_spec("r")])

        def lease_and_report() -> None:
            client = ControlClient(control.url, control.run_key)
            lease = client.lease(worker_id="w", wait_s=0, lease_s=30)
            assert lease is not None
            client.report(lease, Result(outcome=Outcome.SUCCEEDED, output="x" * 3000))
            client.close()

        await asyncio.to_thread(lease_and_report)
        (trajectory,) = await control.store.trajectories(["r"])
    assert trajectory.outcome is Outcome.AGENT_ERROR
    assert trajectory.error is not None
    assert trajectory.error.startswith("the server did not take the agent's result: ")
    assert "413" in trajectory.error


async def test_the_deepest_output_that_a_worker_hands_in_is_taken_by_the_server(tmp_path: Path) -> None:
    deepest = returns(nested(DEEPEST_OUTPUT))
    async with live_gateway(tmp_path, attach=False) as control:
        await control.store.create_rollouts([make_spec("r")])

        def lease_and_report() -> None:
            client = ControlClient(control.url, control.run_key)
            lease = client.lease(worker_id="w", wait_s=0, lease_s=30)
            assert lease is not None
            client.report(lease, deepest)
            client.close()

        await asyncio.to_thread(lease_and_report)
        (trajectory,) = await control.store.trajectories(["r"])
    assert (trajectory.outcome, trajectory.output) == (Outcome.SUCCEEDED, nested(DEEPEST_OUTPUT)), trajectory.error
