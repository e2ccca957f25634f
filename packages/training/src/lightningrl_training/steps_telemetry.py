"""The trainer's own work as OpenTelemetry spans, for whoever has configured an exporter; otherwise they cost nothing.

step 7 ─┬ collect        rollouts and their rewards
        ├ score          credit and rows
        ├ learn policy ─► swap policy       one optimisation step; calls go on with the new weights
        ├ validate
        └ checkpoint
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import NoOpTracer, Span, Tracer

from lightningrl.keys import Mask
from lightningrl.recipe_tables import TelemetryConfig

__all__ = ["NO_SPANS", "StepSpans", "open_spans"]

logger = logging.getLogger(__name__)

NAME: Final = "lightningrl.training"
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
CLOSE_S: Final = 3.0
"""For what is left when the run ends."""


class StepSpans:
    """Makes them; a span that raises says what."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @contextmanager
    def span(self, name: str, **attributes: str | float) -> Iterator[Span]:
        """One, and what is made within it lies below it. Attributes are `lightningrl.NAME`."""
        with self._tracer.start_as_current_span(f"lightningrl.{name}") as span:
            note(span, attributes)
            yield span


NO_SPANS: Final = StepSpans(NoOpTracer())


def note(span: Span, attributes: Mapping[str, str | float]) -> None:
    """Add what is known by now."""
    for name, value in attributes.items():
        span.set_attribute(f"lightningrl.{name}", value)


@contextmanager
def open_spans(config: TelemetryConfig | None, environment: Mapping[str, str], *, run: str) -> Iterator[StepSpans]:
    """To this process's provider; else to the recipe's `telemetry.forward`; else where OpenTelemetry's variables say;
    else nowhere. `run` names it in the resource. Raises ConfigError for a header whose variable is not set."""
    from opentelemetry.sdk.trace import TracerProvider

    from lightningrl_client.telemetry.spans import WorkerTracerProvider

    existing = trace.get_tracer_provider()
    if isinstance(existing, TracerProvider) and not isinstance(existing, WorkerTracerProvider):
        yield StepSpans(existing.get_tracer(NAME))
        return
    if (config is None or config.forward is None) and not any(environment.get(name) for name in ENDPOINTS):
        yield NO_SPANS
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    place = None if config is None else config.target(environment)
    mask = Mask(() if place is None else place[1].values())

    def hide_keys(record: logging.LogRecord) -> bool:
        """Have the exporter's lines say no key that a collector said again."""
        record.msg, record.args = mask.text(record.getMessage()), ()
        return True

    exporter_log = logging.getLogger(OTLPSpanExporter.__module__)
    exporter_log.addFilter(hide_keys)
    exporter = OTLPSpanExporter() if place is None else OTLPSpanExporter(endpoint=place[0], headers=place[1])
    service = environment.get("OTEL_SERVICE_NAME", "lightningrl")
    resource = Resource.create({"service.name": service, "lightningrl.run": run})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    processor = BatchSpanProcessor(exporter)
    provider.add_span_processor(processor)
    try:
        yield StepSpans(provider.get_tracer(NAME))
    finally:
        flushing = threading.Thread(target=provider.force_flush, daemon=True)
        flushing.start()
        flushing.join(CLOSE_S)
        if flushing.is_alive():
            logger.warning("telemetry: the last spans of the run did not reach their collector within %.0f s", CLOSE_S)
        # The exporter first, so that what is being sent again and again is given up.
        exporter.shutdown()  # type: ignore[no-untyped-call]
        provider.shutdown()
        exporter_log.removeFilter(hide_keys)
