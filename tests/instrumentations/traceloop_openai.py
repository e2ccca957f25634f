# dependencies = ["opentelemetry-instrumentation-openai==0.62.4", "openai==3.51.0", "opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2"]
"""Traceloop's instrumentation of OpenAI's SDK (OpenLLMetry)."""

from conversation import converse, tracer_provider
from opentelemetry.instrumentation.openai import OpenAIInstrumentor

provider = tracer_provider()
OpenAIInstrumentor().instrument(tracer_provider=provider)
converse()
provider.shutdown()
