"""The whole server in its own process: gateway, engine link, control API and store, also while it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from sizes import PATIENCE_S, sized

from lightningrl.records import Lease
from lightningrl.types import Outcome
from lightningrl_client.control.client import ServerClient
from lightningrl_server.engines.link import EngineLink
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import PolicySettings, ServerSettings
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.store_conformance import make_spec
from lightningrl_testing.tokenizers import tiny_tokenizer

RUN_KEY = "the-run-key"


@asynccontextmanager
async def whole_server(
    folder: Path, **engine_fields: int
) -> AsyncIterator[tuple[ServerProcess, ServerClient, ScriptedEngine]]:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    engine = ScriptedEngine(tokenizer, **engine_fields)  # type: ignore[arg-type]
    settings = ServerSettings(
        store_url=f"sqlite:///{folder}/store.db",
        run_key=RUN_KEY,
        policies={engine.policy: PolicySettings(model=folder / "policy")},
    )
    async with (
        ServerProcess(settings, log_path=folder / "server.log") as server,
        ServerClient(server.url, RUN_KEY) as client,
        EngineLink(engine, server.url, RUN_KEY),
    ):
        yield server, client, engine


def patient_http() -> httpx.AsyncClient:
    return httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S)


async def ask(
    http: httpx.AsyncClient, url: str, lease: Lease, call_id: str, messages: list[dict[str, str]]
) -> httpx.Response:
    """One logical call, repeated while the server is away, as an SDK does it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await http.post(
                    f"{url}{lease.base_path}/chat/completions",
                    json={"model": "any", "messages": messages},
                    headers={"authorization": f"Bearer {lease.key}", "x-lightningrl-call-id": call_id},
                )
                if answer.status_code != 503:
                    return answer
            await asyncio.sleep(0.1)


async def test_a_call_is_answered_recorded_and_fetched_exactly_as_sampled(tmp_path: Path) -> None:
    async with whole_server(tmp_path) as (server, client, engine), patient_http() as http:
        await client.create_rollouts([make_spec("a")])
        lease = await client.lease("w", 60.0)
        assert lease is not None
        engine.enqueue("42")
        answer = await ask(http, server.url, lease, "call-1", [{"role": "user", "content": "6 * 7?"}])
        assert answer.json()["choices"][0]["message"]["content"] == "42"
        await client.finish_attempt("a", 1, Outcome.SUCCEEDED, "42")
        ((transition,),) = [one.transitions for one in await client.trajectories(["a"])]
        emission = engine.emissions[transition.id]
        assert tuple(transition.prompt_ids.tolist()) == emission.request.prompt_ids
        assert (tuple(transition.completion_ids.tolist()), tuple(transition.logprobs.tolist())) == (
            emission.token_ids,
            emission.logprobs,
        )
        late = await ask(http, server.url, lease, "call-2", [{"role": "user", "content": "more"}])
        assert late.status_code == 410 and "is over (succeeded)" in late.text
        status = await client.status()
        assert [(one.policy, one.connected, one.held) for one in status.policies] == [(engine.policy, 1, False)]


async def test_an_agent_that_failed_on_a_full_context_is_typed_so(tmp_path: Path) -> None:
    async with (
        whole_server(tmp_path, context_length=20) as (server, client, _),
        patient_http() as http,
    ):
        await client.create_rollouts([make_spec("a")])
        lease = await client.lease("w", 60.0)
        assert lease is not None
        answer = await ask(http, server.url, lease, "c", [{"role": "user", "content": "far too long " * 50}])
        assert answer.status_code == 400
        await client.finish_attempt("a", 1, Outcome.AGENT_ERROR, error="it raised")
        assert (await client.trajectories(["a"]))[0].outcome is Outcome.CONTEXT_OVERFLOW


@pytest.mark.slow
async def test_killing_the_server_in_mid_run_loses_no_call_and_doubles_none(tmp_path: Path) -> None:
    agents, turns, kills = 4, 40, sized(2, 5)

    async with whole_server(tmp_path) as (server, client, engine), patient_http() as http:
        engine.token_delay_s = 0.02
        url, answered = server.url, dict[str, list[str]]()

        async def agent(lease: Lease) -> None:
            messages: list[dict[str, str]] = []
            for turn in range(turns):
                messages.append({"role": "user", "content": f"question {turn}"})
                answer = await ask(http, url, lease, f"{lease.rollout_id}-{turn}", messages)
                assert answer.status_code == 200, answer.text
                said = answer.json()["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": said})
                answered.setdefault(lease.rollout_id, []).append(said)
            await client.finish_attempt(lease.rollout_id, lease.attempt, Outcome.SUCCEEDED, len(messages))

        await client.create_rollouts([make_spec(f"r{index}") for index in range(agents)])
        leases = [lease for _ in range(agents) if (lease := await client.lease("w", 600.0))]
        running = [asyncio.create_task(agent(lease)) for lease in leases]
        for kill in range(kills):
            await asyncio.sleep(0.3 + 0.07 * kill)
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            assert await server.wait_ended() == -signal.SIGKILL
            await server.restart()
        await asyncio.gather(*running)
        trajectories = await client.trajectories([lease.rollout_id for lease in leases])
    for trajectory in trajectories:
        assert len(trajectory.transitions) == turns and trajectory.output == 2 * turns
        assert sum(one.is_break for one in trajectory.transitions) == 0
        said = [engine.tokenizer.decode(one.completion_ids[:-1].tolist()) for one in trajectory.transitions]
        assert said == answered[trajectory.rollout_id]
