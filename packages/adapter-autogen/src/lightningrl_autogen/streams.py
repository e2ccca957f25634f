"""An asynchronous generator's steps, each run inside of a context manager that is left before the item is handed out.

A variable that a generator sets and leaves set would be seen by whoever consumes it, between the items.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

__all__ = ["set_within", "step_through"]

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
