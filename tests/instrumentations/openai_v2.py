# dependencies = ["opentelemetry-instrumentation-openai-v2==2.4b0", "opentelemetry-util-genai==0.4b0", "httpx", "openai==3.51.0", "opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2"]
"""OpenTelemetry's own instrumentation of OpenAI's SDK: spans, and log records of the messages."""

from conversation import converse, tracer_provider
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor

provider, logs = tracer_provider(), LoggerProvider()
logs.add_log_record_processor(SimpleLogRecordProcessor(OTLPLogExporter()))
OpenAIInstrumentor().instrument(tracer_provider=provider, logger_provider=logs)
converse()
provider.shutdown()
logs.shutdown()
