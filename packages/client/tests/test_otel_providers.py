"""Whatever provider the agent's own code makes, its spans are seen and its exporters stay."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from sizes import PATIENCE_S

HEAD = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from lightningrl_client.runtime.telemetry import Telemetry, load_adapter
from lightningrl_client.attribution.scope import ActiveRollout, RolloutScope

seen = InMemorySpanExporter()

def own():
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(seen))
    return provider

scope = RolloutScope()

def check(tracer, theirs, ours=("work",)):
    rollout = ActiveRollout(rollout_id="r", attempt=1, base_path="/r", key="k")
    with scope.entered(rollout), telemetry.attempt_span("agent"):
        with tracer.start_as_current_span("work"):
            pass
    assert [span.name for span in seen.get_finished_spans()] == list(theirs), seen.get_finished_spans()
    assert [span.name for span in rollout.spans] == [*ours, "invoke_workflow agent"], rollout.spans
"""

SCENES = {
    "set before the worker looks": """
        telemetry = Telemetry(scope, [load_adapter("opentelemetry")])
        trace.set_tracer_provider(own())
        telemetry.watch_agent()
        check(trace.get_tracer("agent"), ["work"])
    """,
    "set before everything": """
        trace.set_tracer_provider(own())
        telemetry = Telemetry(scope, [load_adapter("opentelemetry")])
        telemetry.watch_agent()
        check(trace.get_tracer("agent"), ["work"])
    """,
    "set while a rollout runs": """
        telemetry = Telemetry(scope, [load_adapter("opentelemetry")])
        tracer = trace.get_tracer("agent")
        telemetry.watch_agent()
        provider = own()
        trace.set_tracer_provider(provider)
        assert trace.get_tracer_provider() is provider
        check(tracer, ["work"])
    """,
    "never set": """
        telemetry = Telemetry(scope, [load_adapter("opentelemetry")])
        tracer = trace.get_tracer("agent")
        telemetry.watch_agent()
        check(tracer, [])
    """,
    "not global": """
        telemetry = Telemetry(scope, [load_adapter("opentelemetry")])
        telemetry.watch_agent()
        check(own().get_tracer("agent"), ["work"])
    """,
    "global and listened to once": """
        telemetry = Telemetry(scope, [load_adapter("opentelemetry")])
        provider = own()
        trace.set_tracer_provider(provider)
        telemetry.watch_agent()
        telemetry.watch_agent()
        check(provider.get_tracer("agent"), ["work"])
    """,
    "shut down by the agent": """
        telemetry = Telemetry(scope, [load_adapter("opentelemetry")])
        telemetry.watch_agent()
        rollout = ActiveRollout(rollout_id="r", attempt=1, base_path="/r", key="k")
        with scope.entered(rollout), telemetry.attempt_span("agent"):
            own().shutdown()
        assert len(rollout.spans) == 1
    """,
    "of a class that drops its default processors": """
        class Vendor(TracerProvider):
            def __init__(self):
                super().__init__()
                self.is_default = True
            def add_span_processor(self, processor):
                if self.is_default:
                    self._active_span_processor._span_processors = ()
                    self.is_default = False
                super().add_span_processor(processor)
        telemetry = Telemetry(scope, [load_adapter("opentelemetry")])
        provider = Vendor()
        provider.add_span_processor(SimpleSpanProcessor(seen))
        check(provider.get_tracer("agent"), ["work"])
    """,
    "made after the end": """
        telemetry = Telemetry(scope, [load_adapter("opentelemetry")])
        telemetry.close()
        check(own().get_tracer("agent"), ["work"], [])
        assert TracerProvider.__init__.__class__.__name__ == "function"
    """,
    "sampled away by the user's own choice": """
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
        telemetry = Telemetry(scope, [load_adapter("opentelemetry")])
        check(TracerProvider(sampler=ALWAYS_OFF).get_tracer("agent"), [], [])
    """,
}


@pytest.mark.parametrize("scene", SCENES)
def test_a_provider(scene: str) -> None:
    """Each in a process of its own: a global provider can be set only once."""
    program = HEAD + textwrap.dedent(SCENES[scene])
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (ran.returncode, ran.stderr) == (0, "")
