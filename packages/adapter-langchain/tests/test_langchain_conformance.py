"""The LangChain adapter meets the specification of an adapter, and names roles in nested graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from opentelemetry.sdk.trace import Tracer
from sizes import sized

from lightningrl import conventions
from lightningrl.loading import load_callable
from lightningrl_langchain import LangChainAdapter
from lightningrl_testing.adapter_conformance import AdapterConformance, InstrumentedProcess, by_operation

KINDS = {"sync": "synchronous", "async": "asynchronous"}


def load(name: str) -> Callable[[str], Any]:
    return load_callable(f"graph_agents.py:{name}", Path(__file__).parent)


@pytest.fixture(autouse=True, scope="module")
def _agents_are_imported_once() -> None:
    """As in a worker; what is imported within a test is gone after it."""
    load("use_tools")


class TestLangChainAdapter(AdapterConformance):
    rollouts: ClassVar[int] = sized(16, 40)
    ends_on_tool_error: ClassVar[bool] = True

    def create_adapter(self) -> LangChainAdapter:
        return LangChainAdapter()

    def agent(self, kind: str) -> Callable[[str], Any]:
        return load(KINDS.get(kind, kind))

    def tool_agent(self) -> Callable[[str], Any]:
        return load("use_tools")

    @pytest.mark.parametrize(
        ("inner", "roles"), [("graph", ["work/draft", "work/review"]), ("agent", ["work/model"]), ("named", ["writer"])]
    )
    def test_nested_graphs_are_named_by_their_path_or_their_agents_name(
        self, process: InstrumentedProcess, inner: str, roles: list[str]
    ) -> None:
        (rollout,) = process.run_many(load("nested"), 1, f"NEST={inner}")
        assert [call.agent for call in process.server.calls] == roles
        names = {
            span.span_id: span.attributes.get(conventions.AGENT_NAME, "")
            for span in by_operation(process.spans(rollout), conventions.INVOKE_AGENT)
        }
        chats = by_operation(process.spans(rollout), conventions.CHAT)
        assert [names[chat.parent_id] for chat in chats] == roles

    def test_an_agent_called_by_a_tool_speaks_for_itself(self, process: InstrumentedProcess) -> None:
        (rollout,) = process.run_many(load("consulting"), 1, 'TOOL=consult ARGS={"question": "RID=consulting-0 why?"}')
        assert [call.agent for call in process.server.calls] == ["boss", "writer", "boss"]
        (tool,) = by_operation(process.spans(rollout), conventions.EXECUTE_TOOL)
        assert tool.attributes[conventions.AGENT_NAME] == "boss"

    def test_a_bare_client_in_a_node_is_named_after_the_node(self, process: InstrumentedProcess) -> None:
        process.run_many(load("bare_client"), 8)
        assert {(call.agent, call.span_id is None) for call in process.server.calls} == {
            ("draft", True),
            ("review", False),
        }

    def test_calls_that_begin_at_once_in_threads_of_a_node_hang_below_its_one_span(
        self, process: InstrumentedProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start = Tracer.start_span

        def slow_for_nodes(tracer: Tracer, name: str, *args: Any, **kwargs: Any) -> Any:
            if name.startswith(conventions.INVOKE_AGENT):
                time.sleep(0.1)
            return start(tracer, name, *args, **kwargs)

        monkeypatch.setattr(Tracer, "start_span", slow_for_nodes)
        (rollout,) = process.run_many(load("threads"), 1)
        spans = process.spans(rollout)
        assert {span.parent_id for span in spans} - {span.span_id for span in spans} == {""}
