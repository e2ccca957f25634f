"""The `opentelemetry` adapter meets the specification of an adapter, in both vocabularies, with a provider of the
user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sizes import sized

from lightningrl import conventions
from lightningrl.call_origin import Adapter, CallOrigin, resolve_origin
from lightningrl.loading import load_callable
from lightningrl_client.runtime.telemetry import load_adapter
from lightningrl_testing.adapter_conformance import AdapterConformance, InstrumentedProcess, by_operation

pytestmark = pytest.mark.slow


def load(name: str) -> Callable[..., Any]:
    return load_callable(f"otel_agents.py:{name}", Path(__file__).parent)


@pytest.fixture(autouse=True, scope="module")
def _agents_are_imported_once() -> None:
    """As in a worker; what is imported within a test is gone after it."""
    load("use")


class Spanned(AdapterConformance):
    rollouts: ClassVar[int] = sized(16, 40)

    vocabulary: str

    def create_adapter(self) -> Adapter:
        if not hasattr(self, "_adapter"):
            self._adapter = load_adapter("opentelemetry")
        return self._adapter

    @pytest.fixture
    def process(self) -> Iterator[InstrumentedProcess]:
        with InstrumentedProcess(self.create_adapter()) as process:
            self.seen = InMemorySpanExporter()
            provider = TracerProvider()
            provider.add_span_processor(SimpleSpanProcessor(self.seen))
            load("use")(provider, self.vocabulary)
            yield process

    def agent(self, kind: str) -> Callable[[str], Any]:
        return load({"async": "asynchronous"}.get(kind, kind))

    def tool_agent(self) -> Callable[[str], Any]:
        return load("use_tools")

    def test_a_bare_client_inside_of_an_agent_is_named_after_it(self, process: InstrumentedProcess) -> None:
        process.run_many(load("bare"), 8)
        assert {(call.agent, call.span_id) for call in process.server.calls} == {("draft", None)}

    def test_the_users_exporter_sees_each_span_as_it_was(self, process: InstrumentedProcess) -> None:
        (rollout,) = process.run_many(load("sync"), 1)
        theirs = {span.name: dict(span.attributes or {}) for span in self.seen.get_finished_spans()}
        assert set(theirs) == {"invoke_agent draft", "invoke_agent review", "chat gpt-4o-mini"}
        assert (conventions.AGENT_NAME in theirs["invoke_agent draft"]) == (self.vocabulary == "genai")
        assert len(rollout.spans) == 1 + len(self.seen.get_finished_spans())


class TestGenAiConventions(Spanned):
    vocabulary = "genai"

    def test_an_uninstrumented_adapter_is_inert(self, process: InstrumentedProcess) -> None:
        adapter = self.create_adapter()
        adapter.uninstrument()
        (rollout,) = process.run_many(self.agent("sync"), 1)
        assert {call.agent for call in process.server.calls} == {None}
        chats = by_operation(process.spans(rollout), conventions.CHAT)  # the framework's own, as they are
        assert [conventions.AGENT_NAME in chat.attributes for chat in chats] == [False, False]
        assert adapter.call_origin() is None


class TestOpenInference(Spanned):
    vocabulary = "openinference"


def test_a_span_without_a_name_takes_the_name_that_another_adapter_knows() -> None:
    def spanned() -> CallOrigin:
        return CallOrigin(trace_id=1, span_id=2)

    def named() -> CallOrigin:
        return CallOrigin(agent="node")

    whole = CallOrigin(agent="node", trace_id=1, span_id=2)
    assert resolve_origin([named, spanned]) == resolve_origin([spanned, named]) == whole
    assert resolve_origin([spanned]) == spanned()
    assert resolve_origin([named, lambda: None]) == named()
    assert resolve_origin([named, lambda: whole, spanned]) == whole
