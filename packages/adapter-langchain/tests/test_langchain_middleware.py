"""Middleware that calls a model is not the agent: it has a role of its own, so that it can be left out of the
training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest
from langchain_openai import ChatOpenAI

from lightningrl_langchain import LangChainAdapter
from lightningrl_testing.adapter_conformance import InstrumentedProcess

model = ChatOpenAI(model="gpt-4o-mini", api_key="sk-the-users-own")  # type: ignore[arg-type]


class Reflection(AgentMiddleware[Any, Any]):
    """Calls a model in a node of its own, as LangChain's summarization does."""

    def before_model(self, state: Any, runtime: Any) -> None:
        model.invoke("reflect")


class Selection(AgentMiddleware[Any, Any]):
    """Calls a model in the agent's own node, marked as LangChain's tool selection marks its calls."""

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        model.invoke("select", config={"metadata": {"lc_source": "tool_selection"}})
        return handler(request)


@pytest.fixture
def process() -> Iterator[InstrumentedProcess]:
    with InstrumentedProcess(LangChainAdapter()) as process:
        yield process


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("writer", ["writer.Reflection", "writer.tool_selection", "writer"]),
        (None, ["Reflection.before_model", "model.tool_selection", "model"]),
    ],
)
def test_middleware_that_calls_a_model_has_a_role_of_its_own(
    process: InstrumentedProcess, name: str | None, roles: list[str]
) -> None:
    agent = create_agent(model, [], name=name, middleware=[Reflection(), Selection()])
    process.run_many(lambda text: agent.invoke({"messages": [{"role": "user", "content": text}]}), 1)
    assert [call.agent for call in process.server.calls] == roles
