"""The adapter meets the specification of an adapter, in both wire formats, whatever the user does to the SDK's
tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import agents
import pytest
from sizes import sized

from lightningrl.loading import load_callable
from lightningrl_openai_agents import OpenAIAgentsAdapter
from lightningrl_testing.adapter_conformance import AdapterConformance

pytestmark = pytest.mark.slow
KINDS = {"sync": "synchronous", "async": "asynchronous"}


def load(name: str) -> Callable[[str], Any]:
    return load_callable(f"sdk_agents.py:{name}", Path(__file__).parent)


@pytest.fixture(autouse=True, scope="module")
def _agents_are_imported_once() -> None:
    """As in a worker; what is imported within a test is gone after it."""
    load("answer")


class SpeakingConformance(AdapterConformance):
    """With agents whose models are made, at each run, for the SDK's default API."""

    rollouts: ClassVar[int] = sized(16, 40)
    ends_on_tool_error: ClassVar[bool] = True  # an unknown tool ends the run
    api: ClassVar[Literal["chat_completions", "responses"]]

    @pytest.fixture(autouse=True)
    def speaking(self) -> Iterator[None]:
        agents.set_default_openai_api(self.api)
        yield
        agents.set_default_openai_api("responses")

    def create_adapter(self) -> OpenAIAgentsAdapter:
        return OpenAIAgentsAdapter()

    def agent(self, kind: str) -> Callable[[str], Any]:
        return load(KINDS.get(kind, kind))

    def tool_agent(self) -> Callable[[str], Any]:
        return load("use_tools")


class TestResponses(SpeakingConformance):
    api = "responses"


class TestChatCompletions(SpeakingConformance):
    api = "chat_completions"


class TestTracingSwitchedOffByTheRun(SpeakingConformance):
    api = "responses"

    @pytest.fixture(autouse=True)
    def switched_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRACING", "run")


class TestTracingSwitchedOffForAll(SpeakingConformance):
    """As `OPENAI_AGENTS_DISABLE_TRACING=1` does."""

    api = "chat_completions"

    @pytest.fixture(autouse=True)
    def switched_off(self) -> Iterator[None]:
        agents.set_tracing_disabled(True)
        yield
        agents.set_tracing_disabled(False)
