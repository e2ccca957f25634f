"""Origin of a model call: its role and its span, as an adapter knows them before the request leaves.

A nested role is a path, "team/writer"; naming a role names what lies below it too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol
from urllib.parse import quote

__all__ = ["LONGEST_ROLE", "Adapter", "CallOrigin", "OriginResolver", "is_role_among", "resolve_origin"]

LONGEST_ROLE: Final = 200
"""Characters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallOrigin:
    """The role that makes a call, and the call's span."""

    agent: str | None = None
    """Name of the agent or graph node; None = nobody said."""
    trace_id: int = 0
    span_id: int = 0
    """0 = no span."""

    def headers(self) -> dict[str, str]:
        """The request headers that carry the origin to the gateway."""
        headers: dict[str, str] = {}
        if self.agent:
            is_plain = (
                self.agent.isascii()
                and self.agent.isprintable()
                and self.agent == self.agent.strip()
                and "%" not in self.agent
            )
            headers["x-lightningrl-agent"] = self.agent if is_plain else quote(self.agent)
        if self.span_id:
            headers["traceparent"] = f"00-{self.trace_id:032x}-{self.span_id:016x}-01"
        return headers


OriginResolver = Callable[[], CallOrigin | None]
"""Asked in the context of the HTTP request; None = this adapter knows nothing of the call."""


class Adapter(Protocol):
    """An agent framework's hook: an OpenTelemetry `BaseInstrumentor` that can also say who makes the current call."""

    def instrument(self, **kwargs: Any) -> None:
        """Hook the framework; spans go to `tracer_provider=`."""
        ...

    def uninstrument(self, **kwargs: Any) -> None:
        """Become inert."""
        ...

    def call_origin(self) -> CallOrigin | None: ...


def resolve_origin(resolvers: Iterable[OriginResolver]) -> CallOrigin | None:
    """The first origin that has a span, else the first that has a name: a framework inside another one knows better.

    A span whose adapter knows no name is called what another adapter calls the caller.
    """
    spanned: CallOrigin | None = None
    named: CallOrigin | None = None
    for resolve in resolvers:
        origin = resolve()
        if origin is None:
            continue
        if origin.span_id and origin.agent:
            return origin
        spanned = spanned or (origin if origin.span_id else None)
        named = named or (origin if origin.agent else None)
    if spanned is not None and named is not None:
        return replace(spanned, agent=named.agent)
    return spanned or named


def is_role_among(agent: str, roles: Collection[str]) -> bool:
    """True where `agent` ("write", or nested "team/write") is one of `roles` or lies below one."""
    parts = agent.split("/")
    return any("/".join(parts[:length]) in roles for length in range(1, len(parts) + 1))
