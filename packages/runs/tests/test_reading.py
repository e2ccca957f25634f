"""What a real server recorded, read as text: live over HTTP, from the folder while the server writes, and from the dead
folder."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI, BadRequestError
from typer.testing import CliRunner

from lightningrl import wire
from lightningrl.commands import app
from lightningrl.errors import LightningError, RunFolderError
from lightningrl.records import RolloutFilter, Score
from lightningrl.types import OtherCallKind, Outcome, RolloutSpec, SamplingSettings, Task
from lightningrl_client.control.client import ServerClient
from lightningrl_runs.reader import StoredRun, open_run, read_group
from lightningrl_runs.segments import SegmentKind
from lightningrl_runs.trace import Trace, whole_row
from lightningrl_testing.live_gateway import LiveGateway, live_gateway

DATA = Path(__file__).with_name("data")
TOOLS: Any = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]
ASKS = "<think>Look it up.</think>\n" + "\n".join(
    f'<tool_call>\n{{"name": "price", "arguments": {{"of": "{fruit}"}}}}\n</tool_call>' for fruit in ("tea", "air")
)
HOSTILE = "\x1b]0;mine\x07\x1b[2J\x9b31m\u202egnp.exe"
TOOLED, FAILED, ROLES, CUT, RUNNING, QUEUED = (
    "s000001-0000-000",
    "s000001-0000-001",
    "s000001-0001-000",
    "s000001-0001-001",
    "s000002-0000-000",
    "s000002-0000-001",
)


@dataclass
class Run:
    """A run's folder, and what was read of it while its server worked."""

    folder: Path
    in_server: dict[str, bytes] = field(default_factory=dict[str, bytes])
    beside_it: dict[str, bytes] = field(default_factory=dict[str, bytes])


class Agent:
    """Plays one attempt by hand."""

    def __init__(self, server: LiveGateway, client: ServerClient, rollout_id: str) -> None:
        self.server, self.control, self.id = server, client, rollout_id

    async def begin(self, *, sampling: SamplingSettings | None = None) -> Agent:
        task = Task(id="t", input={"question": "What costs tea?"}, answer="3 €")
        spec = RolloutSpec(id=self.id, task=task, group_id=self.id[:12], step=int(self.id[1:7]) - 1, sampling=sampling)
        await self.control.create_rollouts([spec])
        lease = await self.control.lease("w", 3600.0)
        assert lease is not None and lease.rollout_id == self.id
        self.base_url, self.key = self.server.url + lease.base_path, lease.key
        return self

    async def ask(self, *messages: Any, role: str = "shopper", says: str = "ok", **options: Any) -> Any:
        """The answer's message, as it goes into a history."""
        self.server.engine.enqueue(says)
        async with AsyncOpenAI(base_url=self.base_url, api_key=self.key, max_retries=0) as client:
            headers = {"x-lightningrl-agent": role}
            answer = await client.chat.completions.create(
                model="any", messages=list(messages), extra_headers=headers, **options
            )
        return answer.choices[0].message.model_dump()

    async def report(self, path: str, body: Any) -> None:
        async with httpx.AsyncClient() as client:
            answer = await client.post(
                f"{self.base_url}/{path}", json=body, headers={"authorization": f"Bearer {self.key}"}
            )
        assert answer.is_success, answer.text

    async def end(self, outcome: Outcome = Outcome.SUCCEEDED, **result: Any) -> None:
        await self.control.finish_attempt(self.id, 1, outcome, duration_s=2.5, **result)


def say(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("run"))
    asyncio.run(_play(run))
    return run


async def _play(run: Run) -> None:
    async with live_gateway(run.folder) as server, ServerClient(server.url, server.run_key) as control:
        server.engine.tokenizer.save_pretrained(run.folder / "policy")
        (run.folder / "run.json").write_text(
            json.dumps({"models": {"policy": str(run.folder / "policy")}}), encoding="utf-8"
        )
        await _use_tools(await Agent(server, control, TOOLED).begin())
        await _fail(await Agent(server, control, FAILED).begin())
        await _be_two(await Agent(server, control, ROLES).begin())
        await _be_cut(await Agent(server, control, CUT).begin(sampling=SamplingSettings(max_tokens=6)))
        await _credit(control)
        running = await Agent(server, control, RUNNING).begin()
        await running.ask(say("user", "Wait."), says="I do")
        queued = RolloutSpec(id=QUEUED, task=Task(id="t", input="x"), group_id=RUNNING[:12], step=1)
        await control.create_rollouts([queued])
        served = StoredRun(server.store, {"policy": server.engine.tokenizer}.get)
        for rollout_id in (TOOLED, FAILED, ROLES, CUT, RUNNING, QUEUED):
            run.in_server[rollout_id] = wire.encode(await served.trace(rollout_id))
            run.beside_it[rollout_id] = wire.encode(await read(run.folder, rollout_id))


async def _use_tools(agent: Agent) -> None:
    history = [say("system", "Be brief."), say("user", "What costs tea?")]
    asked = await agent.ask(*history, says=ASKS, tools=TOOLS)
    first, second = (call["id"] for call in asked["tool_calls"])
    tools = [
        {
            "name": "price",
            "status": "ok",
            "arguments": {"of": "tea"},
            "result": "3 €",
            "tool_call_id": first,
            "duration_s": 0.2,
        },
        {
            "name": "price",
            "status": "error",
            "arguments": {"of": "air"},
            "result": "free",
            "tool_call_id": second,
            "error_type": "KeyError",
        },
        {"name": "bell", "status": "ok", "arguments": {}, "result": HOSTILE},
    ]
    await agent.report("tool_calls", {"tool_calls": tools})
    history += [asked, say("tool", "3 €", tool_call_id=first), say("tool", "free", tool_call_id=second)]
    await agent.ask(*history, says="It is 3 €.", tools=TOOLS)
    await agent.report("rewards", {"rewards": {"polite": 0.25}})
    await agent.end(output="3 €")


async def _fail(agent: Agent) -> None:
    await agent.ask(say("user", f"Say {HOSTILE} [red]now[/]"), says=HOSTILE)
    with pytest.raises(BadRequestError):
        await agent.ask(say("user", "x"), n=0)
    agent.server.engine._script.clear()
    await agent.end(Outcome.AGENT_ERROR, error=f"ValueError: {HOSTILE}")


async def _be_two(agent: Agent) -> None:
    shared = say("system", "You are one of two who write a plan and check it.")
    await agent.ask(shared, say("user", "Plan."), role="planner", says="Buy tea")
    await agent.ask(shared, say("user", "Check: Buy tea"), role="checker", says="Fine")
    edited = say("assistant", "Sell tea")
    await agent.ask(shared, say("user", "Plan."), edited, say("user", "And then?"), role="planner", says="Drink it")
    await agent.end(output="done")


async def _be_cut(agent: Agent) -> None:
    """The last token that is allowed is the second of the three of €."""
    said = await agent.ask(say("user", "Price?"), says="It:4€")
    await agent.ask(say("user", "Price?"), said, say("user", "Again"), says="5€")
    await agent.end(output="5€")


async def _credit(control: ServerClient) -> None:
    scores = []
    for trajectory, advantage in zip(await control.trajectories([TOOLED, FAILED]), (0.5, -0.5), strict=True):
        first, *others = trajectory.transitions
        rewards = {**trajectory.rewards, "right": advantage + 0.5}
        credit = {call.id: call.logprobs * 0 + advantage for call in (first, *others)}
        credit[first.id][0] = 0.0
        scores.append(
            Score(
                rollout_id=trajectory.rollout_id,
                attempt=1,
                rewards=rewards,
                reward=advantage + 0.5,
                transition_rewards={first.id: {"turn": 0.1}},
                advantages=credit,
            )
        )
    await control.set_scores(scores)
    await control.mark_trained(1, [TOOLED, FAILED], {"reward": 0.5})


async def read(folder: Path, rollout_id: str) -> Trace:
    async with open_run(folder) as run:
        return await run.trace(rollout_id)


def shown(folder: Path, rollout_id: str, *words: str) -> str:
    answer = CliRunner().invoke(
        app, ["rollouts", "show", rollout_id, "--run", str(folder), *words], env={"COLUMNS": "80"}
    )
    assert answer.exit_code == 0, answer.output
    return answer.output


def parts(trace: Trace, index: int) -> list[tuple[str, str, bool]]:
    return [
        (part.kind.value, part.text, part.is_sampled)
        for part in trace.calls[index].segments
        if part.kind is not SegmentKind.MARKUP
    ]


@pytest.mark.parametrize("rollout_id", [TOOLED, FAILED, ROLES, CUT, RUNNING, QUEUED])
async def test_a_live_server_a_folder_in_use_and_a_dead_folder_tell_the_same(run: Run, rollout_id: str) -> None:
    assert run.in_server[rollout_id] == run.beside_it[rollout_id] == wire.encode(await read(run.folder, rollout_id))


async def test_each_part_of_a_conversation_says_whose_it_is_and_stands_once(run: Run) -> None:
    trace = await read(run.folder, TOOLED)
    first, second = trace.calls
    (_, system, _), *others = parts(trace, 0)
    assert system.startswith("Be brief.")
    assert others == [
        ("user", "What costs tea?", False),
        ("reasoning", "Look it up.", True),
        ("assistant", "\n", True),
        ("tool_call", '\n{"name": "price", "arguments": {"of": "tea"}}\n', True),
        ("assistant", "\n", True),
        ("tool_call", '\n{"name": "price", "arguments": {"of": "air"}}\n', True),
    ]
    assert parts(trace, 1) == [
        ("tool_result", "3 €\n", False),
        ("tool_result", "free\n", False),
        ("assistant", "It is 3 €.", True),
    ]
    assert (second.seen_in, second.seen) == (first.call.id, first.prompt_tokens + len(first.call.completion_ids))
    assert second.segments[0].start == second.seen


@pytest.mark.parametrize("rollout_id", [TOOLED, FAILED, ROLES])
async def test_the_segments_of_a_row_are_the_tokens_that_were_recorded(run: Run, rollout_id: str) -> None:
    async with open_run(run.folder) as reader:
        trace = await reader.trace(rollout_id)
        (trajectory,) = await reader.look.trajectories([rollout_id])
    decode = _tokenizer(run).decode
    for call, made in zip(trace.calls, trajectory.transitions, strict=True):
        row = whole_row(trace, call)
        assert "".join(part.text for part in row) == decode(
            [*made.prompt_ids, *made.completion_ids], skip_special_tokens=False
        )
        assert [part.start for part in row] == [0, *(part.end for part in row[:-1])]
        sampled = [part for part in call.segments if part.is_sampled]
        assert (sampled[0].start, sampled[-1].end) == (
            len(made.prompt_ids),
            len(made.prompt_ids) + len(made.completion_ids),
        )
        assert all("".join(part.pieces) == part.text and len(part.pieces) == part.end - part.start for part in sampled)


def _tokenizer(run: Run) -> Any:
    from lightningrl_server.rendering.tokenizer import load_tokenizer

    return load_tokenizer(run.folder / "policy")


async def test_a_character_that_was_cut_off_is_shown_as_one_that_is_none(run: Run) -> None:
    trace = await read(run.folder, CUT)
    assert parts(trace, 0)[-1] == ("assistant", "It:4\ufffd", True)
    assert trace.calls[0].segments[-1].pieces == ("I", "t", ":", "4", "", "\ufffd")
    assert trace.calls[0].call.finish_reason == "length"
    assert parts(trace, 1)[-1] == ("assistant", "5€", True)


async def test_credit_rewards_and_tools_stand_with_the_call_they_belong_to(run: Run) -> None:
    trace = await read(run.folder, TOOLED)
    first, second = trace.calls
    assert first.advantages is not None and second.advantages is not None
    assert set(first.advantages[1:].tolist()) == set(second.advantages.tolist()) == {0.5}
    assert (first.call.rewards, second.call.rewards) == ({"turn": 0.1}, {})
    assert (trace.rewards, trace.reported) == ({"right": 1.0}, {"polite": 0.25})
    assert (trace.rollout.reward, trace.rollout.trained_step) == (1.0, 1)
    assert [(tool.name, tool.status.value) for tool in first.tool_calls] == [("price", "ok"), ("price", "error")]
    assert [tool.name for tool in trace.tool_calls] == ["bell"]


async def test_a_refused_call_stands_behind_the_call_before_it(run: Run) -> None:
    trace = await read(run.folder, FAILED)
    (call,) = trace.calls
    assert [(other.kind, other.status) for other in call.other_calls] == [(OtherCallKind.REFUSED, 400)]
    assert trace.other_calls == ()


async def test_a_broken_history_says_where_it_parts_from_the_earlier_one(run: Run) -> None:
    plan, check, again = (await read(run.folder, ROLES)).calls
    assert [call.call.agent for call in (plan, check, again)] == ["planner", "checker", "planner"]
    assert again.call.is_break and again.call.parent_id is None
    assert check.seen_in == again.seen_in == plan.call.id

    def new(call: Any) -> str:
        return "".join(
            part.text
            for part in call.segments
            if call.seen <= part.start < call.prompt_tokens and part.kind != "markup"
        )

    assert (new(check), new(again)) == ("Check: Buy tea", "Sell teaAnd then?")


async def test_a_running_attempt_shows_its_calls_so_far_and_a_queued_rollout_none(run: Run) -> None:
    running = await read(run.folder, RUNNING)
    assert [part[1] for part in parts(running, 0)] == ["Wait.", "I do"]
    assert (running.attempt, running.rollout.state, running.rollout.outcome) == (1, "running", None)
    queued = await read(run.folder, QUEUED)
    assert (queued.attempt, queued.calls, queued.rollout.state) == (None, (), "queued")


async def test_a_group_stands_side_by_side_with_its_mean_and_deviation(run: Run) -> None:
    async with open_run(run.folder) as reader:
        group = await read_group(reader, TOOLED[:12])
        (step,) = await reader.look.steps()
        failed = await reader.list_rollouts(RolloutFilter(outcome=Outcome.AGENT_ERROR))
    assert [(rollout.spec.id, rollout.reward) for rollout in group.rollouts] == [(TOOLED, 1.0), (FAILED, 0.0)]
    assert (group.mean, group.std) == (0.5, 0.5)
    assert (step.step, step.rollout_ids, step.metrics) == (1, (TOOLED, FAILED), {"reward": 0.5})
    assert [rollout.spec.id for rollout in failed] == [FAILED]


@pytest.mark.parametrize("rollout_id", [TOOLED, FAILED, ROLES])
def test_what_is_printed_looks_like_its_picture(run: Run, rollout_id: str) -> None:
    text = re.sub(r"\d+\.\d s\b", "#.# s", shown(run.folder, rollout_id))
    picture = DATA / "shown" / f"{rollout_id}.txt"
    assert max(map(len, text.splitlines())) <= 80
    assert [line.rstrip() for line in text.splitlines()] == picture.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("words", [(), ("--full",)])
@pytest.mark.parametrize("rollout_id", [TOOLED, FAILED])
def test_what_a_terminal_would_obey_or_hide_is_shown_instead(run: Run, rollout_id: str, words: tuple[str, ...]) -> None:
    text = shown(run.folder, rollout_id, *words)
    assert not set(text) & set("\x1b\x07\x9b\u202e\x00")
    assert r"\x1b]0;mine\x07\x1b[2J\x9b31m\u202egnp.exe" in re.sub(r"\n *", "", text)


def test_sampled_tokens_have_the_colour_of_their_advantage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1;32mIt is 3 €.\x1b[0m" in shown(run.folder, TOOLED)
    assert "\x1b[1;31m" in shown(run.folder, FAILED)
    assert "\x1b[1mDrink it\x1b[0m" in shown(run.folder, ROLES)


def test_full_shows_each_whole_row_with_its_markup(run: Run) -> None:
    full = shown(run.folder, TOOLED, "--full")
    assert full.count("What costs tea?<") == 0 and full.count("Look it up.") == 2
    assert "<|im_start|>user" in full and "<|im_start|>user" not in shown(run.folder, TOOLED)


def test_json_is_the_trace_with_plain_numbers(run: Run) -> None:
    trace = msgspec.json.decode(shown(run.folder, TOOLED, "--json"))
    assert trace["rollout"]["spec"]["id"] == TOOLED
    call = trace["calls"][1]
    assert call["advantages"] == [0.5] * len(call["call"]["completion_ids"])
    assert [part["kind"] for part in call["segments"] if part["kind"] != "markup"] == [
        "tool_result",
        "tool_result",
        "assistant",
    ]


def test_a_rollout_that_is_not_there_is_answered_with_its_neighbours(run: Run) -> None:
    answer = CliRunner().invoke(app, ["rollouts", "show", "s000001-0000-007", "--run", str(run.folder)])
    with pytest.raises(
        LightningError, match=f"no rollout 's000001-0000-007'; near it are '{TOOLED}', '{FAILED}', '{ROLES}', '{CUT}'"
    ):
        raise answer.exception or AssertionError(answer.output)


async def test_a_folder_without_a_store_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no store in"):
        await read(tmp_path, "x")


def test_looking_changes_nothing_in_the_folder(run: Run) -> None:
    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()}

    before = contents()
    shown(run.folder, TOOLED)
    assert contents() == before


async def test_a_rollout_is_looked_at_while_it_runs_and_one_that_is_not_there_names_its_neighbours(
    tmp_path: Path,
) -> None:
    async with live_gateway(tmp_path) as server:
        await server.attempt(rollout_id="r")
        async with open_run(tmp_path) as run:
            assert (await run.trace("r")).attempt == 1
            with pytest.raises(LightningError, match="no rollout 'q'; near it are 'r'"):
                await run.trace("q")
