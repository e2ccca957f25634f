# dependencies = ["openinference-instrumentation-langchain==0.1.80", "langchain==1.4.7", "langchain-openai==1.7.3", "openai==3.51.0", "opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2"]
"""OpenInference's instrumentation of LangChain, around an agent of LangChain's."""

from agent_of_langchain import answer
from conversation import tracer_provider
from openinference.instrumentation.langchain import LangChainInstrumentor

provider = tracer_provider()
LangChainInstrumentor().instrument(tracer_provider=provider)
answer()
provider.shutdown()
