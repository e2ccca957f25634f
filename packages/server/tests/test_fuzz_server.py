"""Hostile bodies against a whole server: each is answered, no defect, the loop is free for others, and what was sound
stays sound."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hostile_bodies import DIALECTS, SOUND, Large, exports, fresh_bodies, hostile, large_bodies, large_reports, write
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from metered import MeteredServer, metered_server
from sizes import sized

from lightningrl.records import Lease
from lightningrl.types import Outcome, Trajectory

pytestmark = pytest.mark.slow

LONGEST_PAUSE_S = 0.05
MILLION = 1_100_000
"""Tokens of context: 1 MB of any text fits."""
Record = Callable[[str, object], None]


class Scene:
    """A server for all tests of a file, on an event loop that examples share."""

    def __init__(self, loop: asyncio.AbstractEventLoop, server: MeteredServer) -> None:
        self.loop, self.server = loop, server

    def attempt(self) -> Lease:
        return self.loop.run_until_complete(self.server.attempt())

    def post(self, lease: Lease, path: str, body: bytes, **headers: str) -> httpx.Response:
        return self.loop.run_until_complete(self.server.post(lease, place_of(lease, path), body, **headers))

    def pause(self, lease: Lease, path: str, body: bytes, **headers: str) -> tuple[httpx.Response, float]:
        return self.loop.run_until_complete(self.server.timed(lease, place_of(lease, path), body, **headers))

    def end(self, lease: Lease) -> Trajectory:
        """The attempt, ended if it was not, as the trainer reads it."""
        return self.loop.run_until_complete(self.server.end(lease))

    def check_sound(self, lease: Lease, transitions: int) -> Trajectory:
        """A call is answered as ever, and the attempt reads back: its answered calls, and no other."""
        answer = self.post(
            lease, "chat/completions", write({"model": "m", "messages": [{"role": "user", "content": "still there?"}]})
        )
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == "ok", answer.text
        trajectory = self.end(lease)
        assert len(trajectory.transitions) == transitions + 1
        assert trajectory.transitions[-1].id == answer.json()["id"].removeprefix("chatcmpl-")
        return trajectory


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        loop = runner.get_loop()
        running = metered_server(Path(folder), context_length=getattr(request, "param", MILLION))
        server = loop.run_until_complete(running.__aenter__())
        try:
            yield Scene(loop, server)
        finally:
            loop.run_until_complete(running.__aexit__(None, None, None))
            assert "Traceback" not in (Path(folder) / "server.log").read_text()


def place_of(lease: Lease, path: str) -> str:
    """Reports of a worker stand below the control API."""
    base = f"/api/v1/rollouts/{lease.rollout_id}/attempts/{lease.attempt}"
    return {"result": f"{base}/result", "traces": f"{base}/v1/traces", "logs": f"{base}/v1/logs"}.get(path, path)


def check_answer(path: str, answer: httpx.Response) -> None:
    """Answered, or refused in the form of its API with a sentence that a person can read."""
    assert answer.status_code < 500, answer.text
    if answer.status_code < 400:
        return
    body = answer.json()
    error = body["error"]
    if path.startswith("messages"):
        assert body["type"] == "error" and error["type"].endswith("_error"), body
    elif path in DIALECTS:
        assert {"message", "type", "param", "code"} <= error.keys(), body
    else:
        assert error["code"], body
    assert 10 < len(error["message"]) <= 10_000 and "Traceback" not in error["message"], body


def count_answers(path: str, answer: httpx.Response) -> int:
    """How many transitions an answer stands for."""
    if answer.status_code >= 400:
        return 0
    if answer.headers["content-type"].startswith("application/json"):
        return len(answer.json()["choices"]) if path == "chat/completions" else 1
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    assert not any("error" in event and event["error"] for event in events), answer.text
    ended = {"responses": '"type":"response.', "messages": "message_stop"}.get(path, "[DONE]")
    assert ended in answer.text
    return (
        len({choice["index"] for event in events for choice in event["choices"]}) if path == "chat/completions" else 1
    )


examples = settings(
    deadline=None,
    max_examples=sized(8, 200),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("path", DIALECTS)
def test_a_dialect_answers_or_refuses_whatever_it_is_sent(scene: Scene, path: str) -> None:
    @examples
    @given(bodies=st.lists(hostile(path), min_size=1, max_size=4))
    def fuzz(bodies: list[bytes]) -> None:
        lease, transitions = scene.attempt(), 0
        for body in bodies:
            answer = scene.post(lease, path, body)
            check_answer(path, answer)
            transitions += count_answers(path, answer)
        scene.check_sound(lease, transitions)

    fuzz()


@pytest.mark.parametrize("path", ["rewards", "tool_calls"])
def test_a_report_is_kept_or_refused_whatever_it_says(scene: Scene, path: str) -> None:
    @examples
    @given(bodies=st.lists(hostile(path), min_size=1, max_size=4))
    def fuzz(bodies: list[bytes]) -> None:
        lease = scene.attempt()
        for body in bodies:
            check_answer(path, scene.post(lease, path, body))
        scene.check_sound(lease, 0)

    fuzz()


@examples
@given(bodies=st.lists(exports(), min_size=1, max_size=3))
def test_spans_are_kept_or_refused_whatever_they_hold(scene: Scene, bodies: list[tuple[bytes, dict[str, str]]]) -> None:
    lease = scene.attempt()
    for body, headers in bodies:
        check_answer("traces", scene.post(lease, "traces", body, **headers))
    scene.check_sound(lease, 0)


@examples
@given(bodies=st.lists(hostile("logs"), min_size=1, max_size=3))
def test_log_records_are_kept_or_refused_whatever_they_hold(scene: Scene, bodies: list[bytes]) -> None:
    lease = scene.attempt()
    for body in bodies:
        check_answer("logs", scene.post(lease, "logs", body))
    scene.check_sound(lease, 0)


@examples
@given(body=hostile("result"))
def test_a_result_ends_its_attempt_or_is_refused(scene: Scene, body: bytes) -> None:
    lease = scene.attempt()
    answer = scene.post(lease, "result", body)
    check_answer("result", answer)
    if answer.status_code >= 400:
        scene.check_sound(lease, 0)
        return
    (trajectory,) = scene.loop.run_until_complete(scene.server.client.trajectories([lease.rollout_id]))
    assert trajectory.outcome is Outcome(json.loads(body)["outcome"])
    scene.loop.run_until_complete(scene.server.client.rollout(lease.rollout_id))


# ------------------------------------------------------------------ large bodies, picked by hand


CALLS = sized(["messages: results", "chat: eight choices"], sorted(large_bodies(0)))
REPORTS = sized(["tool calls: wrong", "result: lists"], sorted(large_reports(0)))


def longest_pause(scene: Scene, name: str, make: Callable[[int], dict[str, Large]], record: Record) -> float:
    """Within the target, or the best of three: what the body takes is there each time, and what the machine does beside
    it is not."""
    pauses: list[float] = []
    for number in range(3):
        large = make(number)[name]
        path, body = large.path, large.make()
        assert len(body) <= 1_000_000
        lease = scene.attempt()
        answer, pause = scene.pause(lease, path, body, **large.headers)
        check_answer(path, answer)
        pauses.append(pause)
        if path != "result" or answer.status_code >= 400:
            scene.check_sound(lease, count_answers(path, answer) if path in DIALECTS else 0)
        if pause <= LONGEST_PAUSE_S:
            break
    record(
        "figure", f"pause {min(pauses) * 1e3:5.1f} ms  {name} (context of {scene.server.engine.context_length} tokens)"
    )
    return min(pauses)


@pytest.mark.parametrize("scene", sized([MILLION], [MILLION, 32_768]), indirect=True)
@pytest.mark.parametrize("name", CALLS)
def test_a_large_call_leaves_the_event_loop_to_others(scene: Scene, name: str, record_property: Record) -> None:
    assert longest_pause(scene, name, large_bodies, record_property) <= LONGEST_PAUSE_S


@pytest.mark.parametrize("name", REPORTS)
def test_a_large_report_leaves_the_event_loop_to_others(scene: Scene, name: str, record_property: Record) -> None:
    assert longest_pause(scene, name, large_reports, record_property) <= LONGEST_PAUSE_S


@pytest.mark.parametrize("scene", sized([MILLION], [MILLION, 32_768]), indirect=True)
@pytest.mark.parametrize("path", sized(DIALECTS[:1], DIALECTS))
def test_a_large_conversation_goes_on_without_holding_the_event_loop(
    scene: Scene, path: str, record_property: Record
) -> None:
    pauses: list[float] = []
    for number in range(3):
        lease = scene.attempt()
        body = json.loads(large_bodies(number)[f"{path}: one text"].make())
        first = scene.post(lease, path, write(body))
        messages = body["input" if path == "responses" else "messages"]
        messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
        answer, pause = scene.pause(lease, path, write(body), connection="close")  # or its retry is another call
        assert answer.status_code == first.status_code
        again, retried = scene.pause(lease, path, write(body), x_stainless_retry_count="1")
        assert again.status_code == first.status_code
        pauses.append(max(pause, retried))
        trajectory = scene.check_sound(lease, 0 if first.is_error else 2)
        if not first.is_error:
            assert trajectory.transitions[1].parent_id == trajectory.transitions[0].id
        if pauses[-1] <= LONGEST_PAUSE_S:
            break
    record_property("figure", f"pause {min(pauses) * 1e3:5.1f} ms  {path}: a second turn, and its retry")
    assert min(pauses) <= LONGEST_PAUSE_S


# ------------------------------------------------------------------ memory


@pytest.mark.long
def test_the_servers_memory_does_not_grow_with_what_it_was_sent(scene: Scene, record_property: Record) -> None:
    """Thousands of bodies of every kind: what the second half adds is what nobody forgets, whatever names an agent
    thinks of. The least of some readings counts: what a large body took is given back to the system now and then."""
    all_large = {**large_bodies(0), **large_reports(0)}
    large = [
        (one.path, one.make(), one.headers) for name in (*CALLS, *REPORTS) if (one := all_large[name]).path != "result"
    ]
    small: list[Any] = [
        (path, write(body), {})
        for path, bodies in SOUND.items()
        if path not in ("result", "traces", "logs")
        for body in bodies
    ]
    broken: list[Any] = [(path, body[:-9] + b"@", {}) for path, body, _ in small]
    rounds, halves = 25, []
    for half in range(2):
        readings = []
        for turn in range(rounds):
            lease = scene.attempt()
            fresh = [one for index in range(20) for one in fresh_bodies((half * rounds + turn) * 20 + index)]
            for path, body, headers in [*(small + broken) * 4, *fresh, large[turn * len(large) // rounds]]:
                check_answer(path, scene.post(lease, path, body, **headers))
            scene.end(lease)
            readings.append(scene.server.memory_bytes)
        halves.append(min(readings[-10:]))
    record_property(
        "figure",
        f"memory after half of {rounds * 2 * len(small) * 8} bodies {halves[0] / 2**20:.0f} MiB, in the end {halves[1] / 2**20:.0f} MiB",
    )
    assert halves[1] - halves[0] < 32 * 2**20
