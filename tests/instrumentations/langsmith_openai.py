# dependencies = ["langsmith==0.14.17", "openai==3.51.0", "opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2"]
"""LangSmith's wrapper of OpenAI's SDK."""

from conversation import converse
from langsmith import Client
from langsmith.wrappers import wrap_openai
from openai import OpenAI

client = Client()
converse(wrap_openai(OpenAI(), tracing_extra={"client": client}))
client.flush()
