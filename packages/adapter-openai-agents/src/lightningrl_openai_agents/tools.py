"""Outcome of a tool: its status, and its arguments and result as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from agents import exceptions
from pydantic import BaseModel

from lightningrl.conventions import AskedCall
from lightningrl.sanitize import as_text
from lightningrl.types import ToolStatus

__all__ = ["HostedTool", "asked_tools", "hosted_tools", "status_of_error", "text_of"]

HOSTED: Final = frozenset(
    {"web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_call"}
)
"""Items of the Responses API for tools that ran at the provider."""
RESULTS: Final = ("output", "outputs", "results", "result", "error")
BARE: Final = frozenset({"id", "type", "status"})


@dataclass(frozen=True, kw_only=True, slots=True)
class HostedTool:
    """A tool call that the provider has carried out before it answered."""

    id: str
    name: str
    arguments: str
    result: str
    status: ToolStatus


def asked_tools(output: Iterable[Any]) -> Iterator[AskedCall]:
    """The calls of local tools in a model's answer, handoffs among them."""
    for item in output:
        kind = field_of(item, "type")
        if kind in {"function_call", "custom_tool_call"} and field_of(item, "call_id"):
            arguments = text_of(field_of(item, "arguments" if kind == "function_call" else "input") or "")
            call_id, name = str(field_of(item, "call_id")), str(field_of(item, "name") or "")
            yield AskedCall(id=call_id, name=name, arguments=arguments)


def hosted_tools(output: Iterable[Any]) -> Iterator[HostedTool]:
    """The calls of hosted tools in a model's answer."""
    for item in output:
        kind = str(field_of(item, "type"))
        if kind not in HOSTED:
            continue
        if isinstance(item, BaseModel):
            item = item.model_dump(mode="json", exclude_none=True, warnings=False)
        asked = {name: value for name, value in item.items() if name not in {*BARE, *RESULTS}}
        has_failed = item.get("status") in {"failed", "incomplete"} or item.get("error")
        yield HostedTool(
            id=str(item.get("id") or ""),
            name=str(item.get("name") or kind.removesuffix("_call")),
            arguments=text_of(item.get("arguments") or asked),
            result=text_of(next((item[name] for name in RESULTS if item.get(name)), "")),
            status=ToolStatus.ERROR if has_failed else ToolStatus.OK,
        )


def status_of_error(error: BaseException, tool: str) -> ToolStatus:
    """Outcome of a tool of that name that raised."""
    if not isinstance(error, Exception):  # cancelled, as where the rollout's time is over
        return ToolStatus.UNKNOWN
    timeout = getattr(exceptions, "ToolTimeoutError", TimeoutError)  # the SDK has timeouts for tools since 0.9
    if isinstance(error, TimeoutError | timeout):
        return ToolStatus.TIMEOUT
    is_invalid = str(error).startswith(f"Invalid JSON input for tool {tool}")
    is_invalid = is_invalid and isinstance(error, exceptions.ModelBehaviorError)
    return ToolStatus.INVALID_ARGUMENTS if is_invalid else ToolStatus.ERROR


def field_of(item: Any, name: str) -> Any:
    """Items come as the openai package's types, or, from other providers, as dictionaries."""
    return item.get(name) if isinstance(item, dict) else getattr(item, name, None)


def text_of(value: Any) -> str:
    """Text as it is, anything else as JSON (or as Python prints it)."""
    return value.model_dump_json() if isinstance(value, BaseModel) else as_text(value)
