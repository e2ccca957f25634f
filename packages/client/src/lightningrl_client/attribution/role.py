"""A role by name, for agents without a framework: two lines around the calls that it makes.

    with role("team"):
        with role("writer"):
            client.chat.completions.create(…)      ─►  the call's role is `team/writer`

It follows the context: awaited functions, tasks that are started inside, `ThreadPoolExecutor.submit`,
`asyncio.to_thread`. A bare `threading.Thread` starts without one. An adapter that names it, too, gives the span.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

__all__ = ["current_role", "role"]

_role: ContextVar[str | None] = ContextVar("lightningrl_role", default=None)


@contextmanager
def role(name: str) -> Iterator[None]:
    """Name the role of every model call and tool inside; nested names are joined by `/`. No effect outside a rollout.
    Raises ValueError for an empty name."""
    if not isinstance(name, str) or not name.strip("/ "):
        raise ValueError(f"role {name!r} is no name; give a text such as 'writer'")
    outer = _role.get()
    token = _role.set(name if outer is None else f"{outer}/{name}")
    try:
        yield
    finally:
        with suppress(ValueError):  # a generator that another context closes: this one's role was never that one's
            _role.reset(token)


def current_role() -> str | None:
    """The path of roles around the caller; None = nobody named one."""
    return _role.get()
