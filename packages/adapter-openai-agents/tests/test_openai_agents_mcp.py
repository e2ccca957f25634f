"""Tools of MCP servers: what the server calls an error is one, though the SDK hands it to the model as any other
result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import agents
import openai
import pytest
from agents import Agent, Runner
from agents.mcp import MCPServer
from mcp.types import CallToolResult, GetPromptResult, ListPromptsResult, Tool

from lightningrl import conventions
from lightningrl_openai_agents import OpenAIAgentsAdapter
from lightningrl_testing.adapter_conformance import InstrumentedProcess, by_operation


class Shop(MCPServer):
    """A server with one tool, which is sold out of everything but tea."""

    async def connect(self) -> None: ...

    @property
    def name(self) -> str:
        return "shop"

    async def cleanup(self) -> None: ...

    async def list_tools(self, *args: Any, **kwargs: Any) -> list[Tool]:
        return [
            Tool.model_validate(
                {"name": "buy", "inputSchema": {"type": "object", "properties": {"what": {"type": "string"}}}}
            )
        ]

    async def call_tool(
        self, tool_name: str, arguments: dict[str, Any] | None, *args: Any, **kwargs: Any
    ) -> CallToolResult:
        is_error = (arguments or {}).get("what") != "tea"
        content = [{"type": "text", "text": "sold out" if is_error else "bought"}]
        return CallToolResult.model_validate({"content": content, "isError": is_error})

    async def list_prompts(self, *args: Any, **kwargs: Any) -> ListPromptsResult:
        raise NotImplementedError

    async def get_prompt(self, *args: Any, **kwargs: Any) -> GetPromptResult:
        raise NotImplementedError


@pytest.fixture
def process() -> Iterator[InstrumentedProcess]:
    agents.set_trace_processors([])
    agents.set_default_openai_client(openai.AsyncOpenAI(api_key="sk-the-users-own"), use_for_tracing=False)
    with InstrumentedProcess(OpenAIAgentsAdapter()) as process:
        yield process


def buy(text: str) -> Any:
    return Runner.run_sync(Agent(name="buyer", model="gpt-4o-mini", mcp_servers=[Shop()]), text).final_output


@pytest.mark.parametrize(
    ("what", "status", "error_type", "result"),
    [("gold", "error", "McpToolError", "sold out"), ("tea", "ok", None, "bought")],
)
def test_a_tool_that_an_mcp_server_says_has_failed_is_an_error(
    process: InstrumentedProcess, what: str, status: str, error_type: str | None, result: str
) -> None:
    rollouts: list[Any] = []

    def go(text: str) -> None:
        rollouts.append(process.scope.current())
        buy(text)

    process.run_many(go, 1, f"TOOL=buy ARGS={json.dumps({'what': what})}")
    (tool,) = by_operation(process.spans(rollouts[0]), conventions.EXECUTE_TOOL)
    assert (tool.attributes[conventions.TOOL_STATUS], tool.attributes.get(conventions.ERROR_TYPE)) == (
        status,
        error_type,
    )
    assert result in tool.attributes[conventions.TOOL_CALL_RESULT]
