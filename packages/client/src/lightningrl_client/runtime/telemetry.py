"""A worker's adapters and its tracer: instrument once, one root span per attempt, one export at its end."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind

from lightningrl import conventions
from lightningrl.call_origin import Adapter, OriginResolver
from lightningrl.errors import PluginError
from lightningrl.instrumentation import make_tracer
from lightningrl_client.attribution.scope import ActiveRollout, RolloutScope
from lightningrl_client.telemetry.spans import ProviderWatch, RolloutSpanProcessor, WorkerTracerProvider, encode_otlp

__all__ = ["Telemetry", "instrument", "load_adapter"]


class Telemetry:
    """The instrumented side of a worker."""

    def __init__(self, scope: RolloutScope, adapters: Sequence[Adapter]) -> None:
        self._processor = RolloutSpanProcessor(scope)
        self.provider = WorkerTracerProvider(self._processor)
        self._tracer = make_tracer(self.provider, "lightningrl")
        self._adapters = tuple(sorted(adapters, key=lambda adapter: bool(getattr(adapter, "is_fallback", False))))
        self._watch = ProviderWatch(self.provider)
        self._watch.install()
        for adapter in self._adapters:
            instrument(adapter, self.provider)

    @property
    def resolvers(self) -> tuple[OriginResolver, ...]:
        return tuple(adapter.call_origin for adapter in self._adapters)

    def watch_agent(self) -> None:
        """After the agent's import: see its own spans as well, whichever provider they come from."""
        self._watch.take_global()

    @contextmanager
    def attempt_span(self, agent: str) -> Iterator[None]:
        """The attempt's root span, so that all of it is one trace."""
        attributes = {conventions.OPERATION_NAME: conventions.INVOKE_WORKFLOW, conventions.WORKFLOW_NAME: agent}
        span = self._tracer.start_span(
            f"{conventions.INVOKE_WORKFLOW} {agent}", otel_context.Context(), SpanKind.INTERNAL, attributes
        )
        with trace.use_span(span, end_on_exit=True):
            yield

    def collect(self, rollout: ActiveRollout) -> bytes | None:
        """The attempt's spans as OTLP; None where nothing but its root span was seen, and nothing was told on that."""
        self._processor.forget(rollout)
        is_bare = len(rollout.spans) <= 1 and not any(span.events for span in rollout.spans)
        return None if is_bare else encode_otlp(rollout.spans)

    def close(self) -> None:
        for adapter in self._adapters:
            adapter.uninstrument()
        self._watch.uninstall()


def load_adapter(name: str) -> Adapter:
    """An installed adapter by its plugin name, or any by `"module:factory"`. Raises PluginError."""
    if ":" in name:
        module, _, factory = name.partition(":")
        try:
            adapter = getattr(importlib.import_module(module), factory)()
        except (ImportError, AttributeError) as error:
            raise PluginError(f"adapter {name!r} cannot be loaded: {error}; write 'module:factory'") from error
    else:
        from lightningrl.plugins import load_plugins

        plugin = load_plugins().find("lightningrl_adapters", name)
        try:
            adapter = plugin.build()
        except PluginError as error:
            if not isinstance(error.__cause__, ImportError):
                raise
            raise PluginError(
                f"adapter {name!r} cannot find its framework: {error.__cause__}; install it, or the versions that the "
                f"adapter was tested with: pip install '{plugin.distribution.partition(' ')[0]}[instruments]'"
            ) from error
    methods = "instrument", "uninstrument", "call_origin"
    missing = [method for method in methods if not callable(getattr(adapter, method, None))]
    if missing:
        raise PluginError(f"adapter {name!r} has no {', '.join(missing)}; see lightningrl.call_origin.Adapter")
    return adapter  # type: ignore[no-any-return]


def instrument(adapter: Adapter, provider: TracerProvider) -> None:
    """Hook it in. Raises PluginError, where OpenTelemetry would log another version and run the agent without roles."""
    try:
        adapter.instrument(tracer_provider=provider, raise_exception_on_conflict=True)
    except Exception as error:  # whatever an instrumentor refuses with
        problem = f"adapter {type(adapter).__name__} cannot be hooked in: {error}"
        raise PluginError(f"{problem}; install what it instruments") from error
