# dependencies = ["langsmith==0.14.17", "langchain==1.4.7", "langchain-openai==1.7.3"]
"""LangSmith's tracer of LangChain, which LANGSMITH_TRACING switches on."""

from agent_of_langchain import answer
from langchain_core.tracers.langchain import wait_for_all_tracers

answer()
wait_for_all_tracers()
