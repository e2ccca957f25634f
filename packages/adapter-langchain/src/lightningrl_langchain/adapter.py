"""The instrumentor: one callback handler in every LangChain callback manager, of all threads and tasks."""

from __future__ import annotations

from collections.abc import Collection
from contextvars import ContextVar
from typing import Any

from langchain_core.tracers.context import register_configure_hook
from opentelemetry import trace
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]

from lightningrl.call_origin import CallOrigin
from lightningrl_langchain.handler import Handler

__all__ = ["LangChainAdapter"]


class LangChainAdapter(BaseInstrumentor):  # type: ignore[misc]
    """Names the role of each call, nests the spans, reports tools. `uninstrument` makes it inert."""

    _handler: Handler | None = None

    def instrumentation_dependencies(self) -> Collection[str]:
        return ("langchain-core >= 1.4, < 2",)

    def call_origin(self) -> CallOrigin | None:
        """Name the caller: the running chat model, or, for a bare client inside of a node, the node."""
        return None if self._handler is None else self._handler.call_origin()

    def _instrument(self, **kwargs: Any) -> None:
        provider = kwargs.get("tracer_provider") or trace.get_tracer_provider()
        if self._handler is None:
            self._handler = Handler()
            # The default of the variable is what makes it active in every context; a hook cannot be unregistered.
            variable: ContextVar[Any] = ContextVar("lightningrl_langchain_handler", default=self._handler)
            register_configure_hook(variable, inheritable=True)
        self._handler.activate(provider.get_tracer("lightningrl_langchain"))

    def _uninstrument(self, **kwargs: Any) -> None:
        if self._handler is not None:
            self._handler.deactivate()
