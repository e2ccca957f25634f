# dependencies = ["openinference-instrumentation-openai==0.1.66", "openai==3.51.0", "opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2"]
"""OpenInference's instrumentation of OpenAI's SDK, as Phoenix and Arize have it."""

from conversation import converse, tracer_provider
from openinference.instrumentation.openai import OpenAIInstrumentor

provider = tracer_provider()
OpenAIInstrumentor().instrument(tracer_provider=provider)
converse()
provider.shutdown()
