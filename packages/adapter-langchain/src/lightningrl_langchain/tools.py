"""Outcome of a tool: its status, and its arguments and result as text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import LLMResult
from langgraph.errors import GraphBubbleUp
from opentelemetry.trace import Span
from pydantic import ValidationError
from pydantic.v1 import ValidationError as ValidationErrorV1

from lightningrl.instrumentation import AskedTool
from lightningrl.sanitize import as_text
from lightningrl.types import ToolStatus
from lightningrl_langchain.runs import Run

__all__ = [
    "AskedTools",
    "GraphTool",
    "answer_of",
    "asked_tools",
    "has_structured_response",
    "iterate_tool_messages",
    "offered_names",
    "status_of_error",
    "status_of_output",
    "text_of",
]

MOST_ASKED: Final = 10_000


@dataclass(kw_only=True, slots=True)
class GraphTool(AskedTool):
    """A tool call that a model of a chain or graph asked for."""

    is_valid: bool
    """False: the arguments were no JSON object, so that LangChain runs nothing."""
    node: Run | None
    """The node whose model asked."""


class AskedTools:
    """Tool calls by id, the latest ones: from the model's answer until the tool has run."""

    def __init__(self) -> None:
        self._asked: OrderedDict[str, GraphTool] = OrderedDict()

    def add(self, tool: GraphTool) -> None:
        self._asked[tool.id] = tool
        while len(self._asked) > MOST_ASKED:
            self._asked.popitem(last=False)

    def get(self, tool_call_id: str | None) -> GraphTool | None:
        return None if tool_call_id is None else self._asked.get(tool_call_id)

    def clear(self) -> None:
        self._asked.clear()


def asked_tools(response: LLMResult, chat_span: Span, run: Run) -> Iterator[GraphTool]:
    """The tool calls in the answer of a model's run."""
    node = None if run.parent is None else run.parent.host
    for generations in response.generations:
        for generation in generations:
            message = getattr(generation, "message", None)
            if not isinstance(message, AIMessage):
                continue
            for call, is_valid in [
                *((call, True) for call in message.tool_calls),
                *((call, False) for call in message.invalid_tool_calls),
            ]:
                if call["id"]:
                    yield GraphTool(
                        id=call["id"],
                        name=call["name"] or "",
                        arguments=text_of(call["args"]),
                        chat_span=chat_span,
                        role=run.role,
                        is_valid=is_valid,
                        is_offered=call["name"] in run.offered,
                        node=node,
                    )


def offered_names(invocation_params: Mapping[str, Any]) -> frozenset[str]:
    """The names of the tools in a model's request, in OpenAI's format (`{"type": "function", "function": {"name": …}}`)
    or bare."""
    tools = [tool for tool in invocation_params.get("tools") or () if isinstance(tool, Mapping)]
    described = [tool.get(str(tool.get("type")), tool) for tool in tools]
    return frozenset(str(tool.get("name")) for tool in described if isinstance(tool, Mapping))


def answer_of(output: Any, tool_call_id: str | None) -> Any:
    """The tool message for that call where a tool returned it inside of a command or a list, which may hold others;
    else the output."""
    messages = iterate_tool_messages(output)
    return next(
        (message for message in messages if tool_call_id is not None and message.tool_call_id == tool_call_id), output
    )


def status_of_output(output: Any) -> ToolStatus:
    """`ToolMessage(status="error")` is how a handled failure looks; text that merely says "Error" is a result."""
    return ToolStatus.ERROR if isinstance(output, ToolMessage) and output.status == "error" else ToolStatus.OK


def status_of_error(error: BaseException) -> ToolStatus:
    """Outcome of a tool that raised."""
    # an interrupt, a command to the parent graph: control flow; cancelled, as where the rollout's time is over
    if isinstance(error, GraphBubbleUp) or not isinstance(error, Exception):
        return ToolStatus.UNKNOWN
    if isinstance(error, ValidationError | ValidationErrorV1) and is_raised_in(error.__traceback__, "_parse_input"):
        return ToolStatus.INVALID_ARGUMENTS
    return ToolStatus.TIMEOUT if isinstance(error, TimeoutError) else ToolStatus.ERROR


def is_raised_in(trace: TracebackType | None, function: str) -> bool:
    while trace is not None:
        if trace.tb_frame.f_code.co_name == function:
            return True
        trace = trace.tb_next
    return False


def iterate_tool_messages(outputs: Any) -> Iterator[ToolMessage]:
    """The tool messages that a node returned: in its state update, in a list, in commands."""
    if isinstance(outputs, ToolMessage):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            if isinstance(value, ToolMessage | list | tuple):
                yield from iterate_tool_messages(value)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str | bytes):
        for value in outputs:
            if not isinstance(value, str | BaseMessage) or isinstance(value, ToolMessage):
                yield from iterate_tool_messages(value)
    elif hasattr(outputs, "update") and hasattr(outputs, "goto"):
        yield from iterate_tool_messages(outputs.update)


def has_structured_response(outputs: Any) -> bool:
    """True if a node's update of the state holds the structured answer of `create_agent(response_format=…)`."""
    updates = outputs if isinstance(outputs, list | tuple) else [outputs]
    updates = [getattr(update, "update", update) if hasattr(update, "goto") else update for update in updates]
    return any(isinstance(update, Mapping) and update.get("structured_response") is not None for update in updates)


def text_of(value: Any) -> str:
    """Text as it is, the content of a message, anything else as JSON (or as Python prints it)."""
    return as_text(value.content if isinstance(value, ToolMessage) else value)
