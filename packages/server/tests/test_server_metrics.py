"""`/metrics`: what Prometheus reads of a server and of its run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from lightningrl.keys import view_key, worker_key
from lightningrl.types import Outcome
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.metrics import newest_metrics
from lightningrl_server.store import SqlStore
from lightningrl_testing.live_gateway import LiveGateway, live_gateway

Samples = dict[tuple[str, str], float]
"""By name and its one label's value."""


def read(text: str) -> Samples:
    """What Prometheus' own parser makes of it; a histogram's buckets by their bound."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.labels["le"] if sample.name.endswith("_bucket") else ",".join(sample.labels.values())
            found[sample.name, key] = sample.value
    return found


async def ask(url: str, key: str) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        return await http.get(f"{url}/metrics", headers={"authorization": f"Bearer {key}"})


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path) as gateway:
        yield gateway


async def test_calls_tokens_and_refusals_are_counted_as_they_happen(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key, max_retries=0) as client:
        for number in range(3):
            gateway.engine.enqueue("42")
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": f"6 * {number}?"}])
        with pytest.raises(APIStatusError):
            await client.chat.completions.create(model="any", messages=[])
    async with AsyncOpenAI(base_url=attempt.base_url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(APIStatusError):
            await stranger.models.list()
    found = read((await ask(gateway.url, gateway.run_key)).text)
    policy, calls = gateway.engine.policy, await attempt.transitions()
    assert found["lightningrl_call_seconds_count", policy] == 3
    assert found["lightningrl_call_seconds_bucket", "+Inf"] == 3
    assert found["lightningrl_call_seconds_sum", policy] == pytest.approx(sum(call.duration_s for call in calls))
    assert found["lightningrl_tokens_total", f"completion,{policy}"] == sum(len(call.completion_ids) for call in calls)
    assert found["lightningrl_tokens_total", f"prompt,{policy}"] == sum(len(call.prompt_ids) for call in calls)
    assert sum(value for (name, _), value in found.items() if name == "lightningrl_calls_refused_total") == 2
    assert found["lightningrl_calls_refused_total", "invalid_api_key"] == 1
    assert found["lightningrl_rollouts", "running"] == 1
    assert found["lightningrl_policy_engines", policy] == 1
    assert found["lightningrl_calls", ""] == 3
    assert found["lightningrl_memory_bytes", ""] > 2**20
    await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.AGENT_ERROR)
    later = read((await ask(gateway.url, gateway.run_key)).text)
    assert (later["lightningrl_rollouts", "running"], later["lightningrl_rollouts_finished", "agent_error"]) == (0, 1)


async def test_metrics_want_a_key_that_may_look(gateway: LiveGateway) -> None:
    assert (
        (await ask(gateway.url, view_key(gateway.run_key)))
        .headers["content-type"]
        .startswith("text/plain; version=0.0.4")
    )
    attempt = await gateway.attempt()
    for key in ("wrong", worker_key(gateway.run_key), attempt.key):
        answer = await ask(gateway.url, key)
        assert answer.status_code == 401
        assert "send the run's view key" in answer.json()["error"]["message"]


async def test_the_runs_newest_numbers_are_there_validation_too(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.sqlite")
    app = create_app(store, EngineRegistry(), run_key="the-run-key", folder=tmp_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
        headers = {"authorization": "Bearer the-run-key"}
        assert "lightningrl_metric" not in (await http.get("/metrics", headers=headers)).text
        rows = [
            '{"step": 1, "reward": 0.25, "learn/loss": 1.5}',
            '{"step": 1, "validation/reward": 0.5}',
            '{"step": 2, "reward": 0.75}',
        ]
        (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '{"step": 3, "rew']), encoding="utf-8")
        found = read((await http.get("/metrics", headers=headers)).text)
    await store.close()
    assert found["lightningrl_metric", "reward"] == 0.75
    assert found["lightningrl_metric", "step"] == 2
    assert found["lightningrl_metric", "validation/reward"] == 0.5
    assert found["lightningrl_metric", "learn/loss"] == 1.5


def test_names_that_a_hook_made_up_cannot_break_the_text(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a\\"} 1\\nevil 2": 3.0, "deep": {"x": 1}, "text": "1"}\n[1]\n', encoding="utf-8"
    )
    assert newest_metrics(tmp_path / "metrics.jsonl") == {"step": 1.0, 'a"} 1\nevil 2': 3.0}
    assert newest_metrics(tmp_path / "none.jsonl") == {}
