"""The conformance suite of adapters: subclass `AdapterConformance`, write the same small agents in your framework.

    class TestMyAdapter(AdapterConformance):
        def create_adapter(self): return MyAdapter()
        def agent(self, kind): return {"sync": ask_sync, "async": ask_async, …}[kind]
        def tool_agent(self): return use_tools

The agents get a text and put it into every prompt, with `ROLE=<the name the call must carry>` where the role is known.
The text holds `RID=<rollout id>`, so each request itself says where it belongs. Clients are made when the test module
is imported, as users do. A deviation is `xfail(reason=…)` on the overridden test, never a changed test.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, ClassVar, Self

from lightningrl import conventions
from lightningrl.call_origin import Adapter
from lightningrl.types import ToolStatus
from lightningrl_client.attribution.redirect import Redirection
from lightningrl_client.attribution.scope import ActiveRollout, RolloutScope
from lightningrl_client.runtime.telemetry import Telemetry
from lightningrl_testing._pytest import call_factories, pytest
from lightningrl_testing.scripted_server import RecordedCall, RecordedSpan, ScriptedServer

__all__ = ["KINDS", "AdapterConformance", "InstrumentedProcess", "play_tools"]

KINDS = ("sync", "async", "stream", "async_stream", "threads")
"""`sync` and `async` call the model; `stream` (sync) and `async_stream` stream; `threads` (sync) calls in threads."""

AgentFunction = Callable[[str], Any]


def play_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Play the model: ask for tools that the prompt names (`TOOL=add ARGS={"a": 1, "b": 2}`), then answer `done`."""
    messages = body["messages"]
    if any(message["role"] == "tool" for message in messages):
        return {"content": "done"}
    text = json.dumps([message["content"] for message in messages if message["role"] == "user"]).replace('\\"', '"')
    functions = [
        {"name": name, "arguments": arguments} for name, arguments in re.findall(r"TOOL=(\w+) ARGS=(\{.*?\})", text)
    ]
    calls = [{"id": f"call_{next(TOOL_CALL_NUMBERS)}", "type": "function", "function": asked} for asked in functions]
    return {"content": None, "tool_calls": calls} if calls else {"content": "one two three"}


TOOL_CALL_NUMBERS = itertools.count()


class InstrumentedProcess:
    """This process as a worker with in-process concurrency: redirected, instrumented, against a scripted server."""

    def __init__(self, *adapters: Adapter, max_delay_s: float = 0.02) -> None:
        self.server = ScriptedServer(play_tools, max_delay_s=max_delay_s)
        self.scope = RolloutScope(exclusive=False)
        self._adapters = adapters
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.server)
        self.redirection = Redirection(server_url=self.server.url, scope=self.scope)
        self.redirection.install()
        self._stack.callback(self.redirection.uninstall)
        self.telemetry = Telemetry(self.scope, self._adapters)
        self._stack.callback(self.telemetry.close)
        self.redirection.resolvers.extend(self.telemetry.resolvers)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run_many(self, agent: AgentFunction, rollouts: int, text: str = "") -> list[ActiveRollout]:
        """Run the agent on `RID=<id> <text>` in that many rollouts at once, of one loop or 16 threads, in order."""
        active = [self._open(f"{agent.__name__}-{number}") for number in range(rollouts)]

        async def run_async(rollout: ActiveRollout) -> None:
            with self.scope.entered(rollout), self.telemetry.attempt_span("agent"):
                await agent(f"RID={rollout.rollout_id} {text}")

        async def run_all() -> None:
            async with asyncio.TaskGroup() as group:
                for rollout in active:
                    group.create_task(run_async(rollout))

        def run(rollout: ActiveRollout) -> None:
            with self.scope.entered(rollout), self.telemetry.attempt_span("agent"):
                agent(f"RID={rollout.rollout_id} {text}")

        if inspect.iscoroutinefunction(agent):
            asyncio.run(run_all())
        else:
            with ThreadPoolExecutor(16) as threads:
                list(threads.map(run, active))
        return active

    def spans(self, rollout: ActiveRollout) -> list[RecordedSpan]:
        """Return what the attempt would export, by the wire format's own words."""
        return [
            RecordedSpan(
                name=span.name,
                span_id=f"{span.context.span_id:016x}",
                parent_id=f"{span.parent.span_id:016x}" if span.parent else "",
                trace_id=f"{span.context.trace_id:032x}",
                attributes={key: str(value) for key, value in (span.attributes or {}).items()},
                is_error=span.status.status_code.name == "ERROR",
            )
            for span in rollout.spans
        ]

    def _open(self, rollout_id: str) -> ActiveRollout:
        number, base_path, key = self.server.open_attempt(rollout_id)
        return ActiveRollout(rollout_id=rollout_id, attempt=number, base_path=base_path, key=key)


def said(call: RecordedCall, word: str) -> str | None:
    """Return what the prompt says about itself: `said(call, "RID")`."""
    match = re.search(rf"{word}=([\w/.-]+)", call.text)
    return None if match is None else match[1]


def by_operation(spans: list[RecordedSpan], operation: str) -> list[RecordedSpan]:
    return [span for span in spans if span.attributes.get(conventions.OPERATION_NAME) == operation]


class AdapterConformance:
    """The specification of an adapter, as tests."""

    ends_on_tool_error: ClassVar[bool] = False
    """True where the framework raises when a tool of `tool_agent` does; the tests then expect it."""
    rollouts: ClassVar[int] = 40
    """Rollouts that run at once where none may mix; fewer take less time."""

    def create_adapter(self) -> Adapter:
        raise NotImplementedError

    def agent(self, kind: str) -> AgentFunction:
        """Return an agent of that kind (see `KINDS`), named after it; calling in several roles if there are roles."""
        raise NotImplementedError

    def tool_agent(self) -> AgentFunction:
        """Return a sync agent that sends its text as the user's message. Its tools are `add(a: int, b: int)`, and
        `fail()`, which raises."""
        raise NotImplementedError

    def test_installed_factories_make_it(self) -> None:
        call_factories("lightningrl_adapters", self.create_adapter())

    @pytest.fixture
    def process(self) -> Iterator[InstrumentedProcess]:
        with InstrumentedProcess(self.create_adapter()) as process:
            yield process

    @pytest.mark.parametrize("kind", KINDS)
    def test_concurrent_rollouts_never_mix(self, process: InstrumentedProcess, kind: str) -> None:
        rollouts = process.run_many(self.agent(kind), self.rollouts)
        calls = process.server.calls
        assert [call.rollout_id for call in calls if call.rollout_id != said(call, "RID")] == []
        assert {call.rollout_id for call in calls} == {rollout.rollout_id for rollout in rollouts}

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_call_names_its_role(self, process: InstrumentedProcess, kind: str) -> None:
        process.run_many(self.agent(kind), 8)
        roles = [(call.agent, said(call, "ROLE")) for call in process.server.calls]
        assert [(named, role) for named, role in roles if named != role] == []

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_call_carries_a_chat_span_of_its_own(self, process: InstrumentedProcess, kind: str) -> None:
        rollouts = process.run_many(self.agent(kind), 8)
        for rollout in rollouts:
            calls = [call for call in process.server.calls if call.rollout_id == rollout.rollout_id]
            spans = by_operation(process.spans(rollout), conventions.CHAT)
            called = {call.span_id: call.agent for call in calls}
            assert called == {span.span_id: span.attributes.get(conventions.AGENT_NAME) for span in spans}
            assert len(spans) == len(calls) > 0

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_rollout_is_one_trace(self, process: InstrumentedProcess, kind: str) -> None:
        for rollout in process.run_many(self.agent(kind), 4):
            spans = process.spans(rollout)
            assert len({span.trace_id for span in spans}) == 1
            assert {span.parent_id for span in spans} - {span.span_id for span in spans} == {""}

    @pytest.mark.parametrize("kind", KINDS)
    def test_each_call_has_an_id_of_its_own(self, process: InstrumentedProcess, kind: str) -> None:
        process.run_many(self.agent(kind), 8)
        identities = [(call.rollout_id, call.call_id) for call in process.server.calls]
        assert all(call_id for _, call_id in identities)
        assert len(set(identities)) == len(identities)

    @pytest.mark.parametrize(
        ("asked", "status"),
        [
            ('TOOL=add ARGS={"a": 20, "b": 22}', ToolStatus.OK),
            ("TOOL=fail ARGS={}", ToolStatus.ERROR),
            ('TOOL=add ARGS={"a": "many"}', ToolStatus.INVALID_ARGUMENTS),
            ("TOOL=nonsense ARGS={}", ToolStatus.UNKNOWN_TOOL),
        ],
        ids=["ok", "raises", "invalid-arguments", "unknown-tool"],
    )
    def test_a_tool_reports_its_outcome(self, process: InstrumentedProcess, asked: str, status: ToolStatus) -> None:
        spans, _ = self.use_tools(process, asked)
        (tool,) = by_operation(spans, conventions.EXECUTE_TOOL)
        name, arguments = re.findall(r"TOOL=(\w+) ARGS=(.*)", asked)[0]
        assert tool.attributes[conventions.TOOL_NAME] == name
        assert json.loads(tool.attributes[conventions.TOOL_CALL_ARGUMENTS]) == json.loads(arguments)
        assert tool.attributes[conventions.TOOL_STATUS] == status.value
        assert tool.is_error == (status is not ToolStatus.OK)
        assert tool.is_error == (conventions.ERROR_TYPE in tool.attributes)
        assert tool.attributes[conventions.TOOL_CALL_RESULT]

    def test_a_tool_span_is_a_child_of_the_call_that_asked(self, process: InstrumentedProcess) -> None:
        asked = 'TOOL=add ARGS={"a": 1, "b": 2} and TOOL=add ARGS={"a": 3, "b": 4}'
        spans, calls = self.use_tools(process, asked)
        tools = by_operation(spans, conventions.EXECUTE_TOOL)
        assert sorted(tool.attributes[conventions.TOOL_CALL_RESULT] for tool in tools) == ["3", "7"]
        assert {tool.parent_id for tool in tools} == {calls[0].span_id}
        answered = {message["tool_call_id"] for message in calls[1].body["messages"] if message["role"] == "tool"}
        assert {tool.attributes[conventions.TOOL_CALL_ID] for tool in tools} == answered

    def test_an_uninstrumented_adapter_is_inert(self, process: InstrumentedProcess) -> None:
        adapter = self.create_adapter()
        adapter.uninstrument()
        (rollout,) = process.run_many(self.agent("sync"), 1)
        called = {call.rollout_id for call in process.server.calls}
        assert called == {rollout.rollout_id}, "redirection is not the adapter's"
        assert {call.agent for call in process.server.calls} == {None}
        assert by_operation(process.spans(rollout), conventions.CHAT) == []
        assert adapter.call_origin() is None
        adapter.instrument()  # so that the fixture finds what it left

    def test_instrumenting_again_reports_each_call_once(self, process: InstrumentedProcess) -> None:
        adapter = self.create_adapter()
        adapter.uninstrument()
        adapter.instrument(tracer_provider=process.telemetry.provider)
        (rollout,) = process.run_many(self.agent("sync"), 1)
        assert len(by_operation(process.spans(rollout), conventions.CHAT)) == len(process.server.calls)

    def use_tools(self, process: InstrumentedProcess, asked: str) -> tuple[list[RecordedSpan], list[RecordedCall]]:
        """Run the tool agent once; return its spans and its calls. Whether a tool's exception ends the run is the
        framework's choice."""
        agent = self.tool_agent()
        rollouts: list[ActiveRollout] = []

        def tools(text: str) -> None:
            rollout = process.scope.current()
            assert rollout is not None
            rollouts.append(rollout)
            try:
                agent(text)
            except Exception:
                if not self.ends_on_tool_error:
                    raise

        process.run_many(tools, 1, asked)
        return process.spans(rollouts[0]), process.server.calls
