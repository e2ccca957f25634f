"""What an agent says, raises and returns may be anything; what is kept of it can be read again, by everybody, for
good."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lightningrl.records import Lease
from lightningrl.sanitize import DEEPEST, clean_json, clean_text, parse_json
from lightningrl.types import Trajectory
from lightningrl.wire import decode_trajectories
from lightningrl_client.control.client import ServerClient
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import leased, make_call, make_spec

RUN_KEY = "the-run-key"
LONE = "\\ud800"
"""As JSON writes it."""


class Scene:
    """A server's application with one leased attempt."""

    def __init__(self, store: SqlStore, http: httpx.AsyncClient, lease: Lease) -> None:
        self.store, self.http, self.lease = store, http, lease

    async def post(self, path: str, body: str, key: str | None = None) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.lease.key}", "content-type": "application/json"}
        return await self.http.post(path, content=body.encode(), headers=headers)

    async def report(self, what: str, body: str) -> httpx.Response:
        return await self.post(f"{self.lease.base_path}/{what}", body)

    async def end(self, body: str) -> httpx.Response:
        return await self.post("/api/v1/rollouts/a/attempts/1/result", body)

    async def read(self) -> Trajectory:
        """As the trainer reads it, and as the list shows it."""
        answer = await self.post("/api/v1/trajectories", '{"rollout_ids": ["a"]}', RUN_KEY)
        assert answer.status_code == 200, answer.text
        (trajectory,) = decode_trajectories(answer.content)
        for path in ("/api/v1/rollouts", "/api/v1/rollouts/a"):
            shown = await self.http.get(path, headers={"authorization": f"Bearer {RUN_KEY}"})
            assert shown.status_code == 200, shown.text
        return trajectory


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    app = create_app(store, EngineRegistry(), run_key=RUN_KEY)
    await store.create_rollouts([make_spec("a")])
    lease = await leased(store)
    await store.append_call(make_call(lease, "c0", [1, 2], [3]))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        yield Scene(store, http, lease)
    await store.close()


async def test_a_lone_surrogate_in_an_error_text_does_not_end_the_run(scene: Scene) -> None:
    assert (await scene.end(f'{{"outcome": "agent_error", "error": "bad {LONE} text"}}')).status_code == 200
    assert (await scene.read()).error == "bad \ufffd text"


async def test_a_lone_surrogate_in_an_output_is_kept_as_a_replacement_character(scene: Scene) -> None:
    answer = await scene.end(f'{{"outcome": "succeeded", "output": {{"a{LONE}": ["{LONE}", "\\ud83d\\ude00"]}}}}')
    assert answer.status_code == 200, answer.text
    assert (await scene.read()).output == {"a\ufffd": ["\ufffd", "\U0001f600"]}


async def test_a_lone_surrogate_in_a_reported_tool_call_can_be_read(scene: Scene) -> None:
    told = f'{{"name": "f{LONE}", "status": "error", "arguments": {{"q": "{LONE}"}}, "result": "{LONE}", "error_type": "{LONE}"}}'
    answer = await scene.report("tool_calls", f'{{"tool_calls": [{told}]}}')
    assert answer.status_code == 204, answer.text
    await scene.end('{"outcome": "succeeded"}')
    (call,) = (await scene.read()).tool_calls
    assert (call.name, call.arguments, call.result, call.error_type) == (
        "f\ufffd",
        '{"q": "\ufffd"}',
        "\ufffd",
        "\ufffd",
    )


async def test_a_lone_surrogate_in_a_span_can_be_read(scene: Scene) -> None:
    attributes = [
        {"key": key, "value": {"stringValue": value}}
        for key, value in {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": "look-LONE",
            "gen_ai.tool.call.result": '{"content": "-LONE", "tool_call_id": "x-LONE"}',
        }.items()
    ]
    span = {"spanId": "aa" * 8, "name": "t", "startTimeUnixNano": "1", "endTimeUnixNano": "2", "attributes": attributes}
    body = str({"resourceSpans": [{"scopeSpans": [{"scope": {"name": "s"}, "spans": [span]}]}]})
    body = body.replace('"', '\\"').replace("'", '"').replace("look-LONE", f"look{LONE}").replace("-LONE", "\\" + LONE)
    answer = await scene.post("/api/v1/rollouts/a/attempts/1/v1/traces", body)
    assert answer.status_code == 200, answer.text
    await scene.end('{"outcome": "succeeded"}')
    (call,) = (await scene.read()).tool_calls
    assert (call.name, call.result) == ("look\ufffd", "\ufffd")


async def test_a_lone_surrogate_in_a_rewards_name_is_kept_or_refused_with_a_sentence(scene: Scene) -> None:
    assert (await scene.report("rewards", f'{{"rewards": {{"good{LONE}": 1}}}}')).status_code == 204
    bad = await scene.report("rewards", f'{{"rewards": {{"good{LONE}": "x"}}}}')
    assert (bad.status_code, bad.json()["error"]["code"]) == (400, "invalid_body")
    await scene.end('{"outcome": "succeeded"}')
    assert (await scene.read()).reported == {"good\ufffd": 1.0}


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity", "1e300", "-1"])
async def test_a_duration_that_is_no_time_is_refused(scene: Scene, number: str) -> None:
    answer = await scene.end(f'{{"outcome": "succeeded", "duration_s": {number}}}')
    assert answer.status_code == 400 and "duration_s" in answer.json()["error"]["message"]
    assert (await scene.end('{"outcome": "succeeded", "output": [NaN, 1e999]}')).status_code == 200
    assert (await scene.read()).output == [None, None]


@pytest.mark.parametrize("number", ["1e999", "NaN", "1e308", "-1e308"])
async def test_a_reward_that_float32_cannot_hold_is_refused(scene: Scene, number: str) -> None:
    for path in (f"{scene.lease.base_path}/rewards", "/api/v1/rollouts/a/attempts/1/rewards"):
        answer = await scene.post(path, f'{{"rewards": {{"good": {number}}}}}')
        assert answer.status_code == 400 and "good" in answer.json()["error"]["message"]


@pytest.mark.parametrize("levels", [900, 100_000])
async def test_a_value_that_is_nested_too_deep_is_refused_with_a_sentence(scene: Scene, levels: int) -> None:
    deep = "[" * levels + "]" * levels
    for answer in (
        await scene.end(f'{{"outcome": "succeeded", "output": {deep}}}'),
        await scene.report("tool_calls", f'{{"tool_calls": [{{"name": "f", "status": "ok", "result": {deep}}}]}}'),
    ):
        assert answer.status_code == 400 and f"nested deeper than {DEEPEST} levels" in answer.json()["error"]["message"]
    fits = "[" * (DEEPEST - 1) + "]" * (DEEPEST - 1)
    assert (await scene.end(f'{{"outcome": "succeeded", "output": {fits}}}')).status_code == 200
    await scene.read()


async def test_numbers_and_texts_without_end_are_refused_or_cut(scene: Scene) -> None:
    answer = await scene.end('{"outcome": "succeeded", "output": ' + "1" * 5000 + "}")
    assert answer.status_code == 400 and "digits" in answer.json()["error"]["message"]
    assert (await scene.end('{"outcome": "agent_error", "error": "' + "x" * 10**6 + '"}')).status_code == 200
    assert len((await scene.read()).error or "") == 100_000


async def test_a_task_with_a_lone_surrogate_reaches_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/tasks.db")
    app = create_app(store, EngineRegistry(), run_key=RUN_KEY)
    async with ServerClient("http://server", RUN_KEY) as client:
        transport = httpx.ASGITransport(app)
        headers = {"authorization": f"Bearer {RUN_KEY}"}
        monkeypatch.setattr(
            client, "_http", httpx.AsyncClient(transport=transport, base_url="http://server", headers=headers)
        )
        for created in (1, 0):
            assert await client.create_rollouts([make_spec("a", question="what is \ud800?")]) == created
    lease = await leased(store)
    assert lease.task.input == "what is \ufffd?"
    await store.close()


def test_clean_text_changes_nothing_that_utf_8_can_carry() -> None:
    for text in ("", "plain", "größer \U0001f600 \x00 \u2028", "\ufffd"):
        assert clean_text(text) is text
    assert clean_text("a\ud800b\udc00c\ud83d\ude00") == "a\ufffdb\ufffdc\U0001f600"


def test_clean_json_cuts_or_refuses_what_lies_too_deep() -> None:
    deep: Any = "\ud800"
    for _ in range(DEEPEST + 1):
        deep = {"a": deep}
    with pytest.raises(ValueError, match="nested deeper than 100 levels"):
        clean_json(deep)
    inner = clean_json(deep, cut=True)
    for _ in range(DEEPEST):
        inner = inner["a"]
    assert inner is None


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'"\xed\xa0\x80"', '{"a": 1}'.encode("utf-16")])
def test_bytes_that_are_no_json_are_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(body)


def test_a_byte_order_mark_is_no_part_of_the_json() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_brackets_in_a_text_are_no_depth() -> None:
    assert parse_json(b'{"a": "' + b"[" * 10_000 + b'"}') == {"a": "[" * 10_000}
