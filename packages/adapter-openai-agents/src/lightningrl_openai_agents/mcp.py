"""Results of MCP servers: what a server calls an error is the tool's failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import wrapt

from lightningrl_openai_agents.recorder import Recorder

__all__ = ["McpToolError", "WatchedServer"]


class McpToolError(Exception):
    """An MCP server's result says `isError`. Never raised: it stands for what the server said."""


if TYPE_CHECKING:
    Proxy: TypeAlias = wrapt.ObjectProxy[Any]
else:
    Proxy = wrapt.ObjectProxy  # older versions know no type arguments


class WatchedServer(Proxy):
    """An MCP server, for one call of one of its tools."""

    def __init__(self, server: Any, recorder: Recorder) -> None:
        super().__init__(server)
        self._self_recorder = recorder

    async def call_tool(self, *args: Any, **kwargs: Any) -> Any:
        """The server's own answer."""
        result = await self.__wrapped__.call_tool(*args, **kwargs)
        if getattr(result, "isError", None) or getattr(result, "is_error", None):  # by the version of the `mcp` package
            self._self_recorder.note_error(McpToolError())
        return result
