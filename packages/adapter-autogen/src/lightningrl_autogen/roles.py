"""Speaker in this context: the agent that runs, or the team's manager while it selects the next speaker; and streams,
whose steps are run in such a context."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from autogen_core import MessageHandlerContext

from lightningrl.instrumentation import Args, Kwargs

__all__ = ["Roles", "role_of_agent_id", "set_within", "step_through"]

Item = TypeVar("Item")


@contextmanager
def set_within(variable: ContextVar[Item], value: Item) -> Iterator[None]:
    """Set a variable inside of the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


async def step_through(
    stream: AsyncGenerator[Item, None], inside: Callable[[], AbstractContextManager[Any]]
) -> AsyncGenerator[Item, None]:
    """The stream's items. It is closed with this generator."""
    try:
        while True:
            with inside():
                try:
                    item = await anext(stream)
                except StopAsyncIteration:
                    return
            yield item
    finally:
        await stream.aclose()


TEAM_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
GENERIC_MANAGER: Final = "group_chat_manager"
"""Name of every team's manager before AutoGen 0.4.9."""


class Roles:
    """The current role, and wrappers of the methods that change it."""

    def __init__(self, watch: Callable[[Any], None]) -> None:
        """`watch` sees each event that an agent yields, in the agent's context."""
        self._watch = watch
        self._current: ContextVar[str | None] = ContextVar("lightningrl_autogen_role", default=None)

    def current(self) -> str | None:
        return self._current.get()

    def entered(self, role: str) -> AbstractContextManager[None]:
        return set_within(self._current, role)

    @contextmanager
    def handling(self, agent: Any) -> Iterator[None]:
        """Handle a message as that agent of a runtime."""
        with MessageHandlerContext.populate_context(agent.id), self.entered(role_of_agent_id(agent.id, agent)):
            yield

    async def run(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Wraps a coroutine method of an agent."""
        with self.entered(instance.name):
            return await wrapped(*args, **kwargs)

    def stream(
        self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs
    ) -> AsyncGenerator[Any, None]:
        """Wraps a streaming method of an agent."""

        async def watched() -> AsyncGenerator[Any, None]:
            async with aclosing(step_through(wrapped(*args, **kwargs), lambda: self.entered(instance.name))) as items:
                async for item in items:
                    self._watch(item)
                    yield item

        return watched()


def role_of_agent_id(agent_id: Any, agent: Any) -> str:
    """The role behind a runtime's agent id: a team adds its own id to each name (`writer_6e1c…`), other agents go by
    their type."""
    name = str(agent_id.type)
    if TEAM_ID.fullmatch(agent_id.key):
        name = name.removesuffix(f"_{agent_id.key}")
    return type(agent).__name__ if name == GENERIC_MANAGER else name
