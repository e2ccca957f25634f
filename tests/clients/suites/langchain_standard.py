# dependencies = ["langchain-tests==1.1.9", "langchain-openai==1.7.4", "langchain-anthropic==1.7.10"]
"""LangChain's own standard tests of a chat model, against the gateway: by chat completions, by responses, by messages.

Run by scripts/try_suites.py, which sets SUITE_URL and SUITE_KEY."""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

BASE, KEY = os.environ["SUITE_URL"], os.environ["SUITE_KEY"]


class Suite(ChatModelIntegrationTests):
    """Settings that all forms share: text and tools; no images, no sound, no files."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "policy", "base_url": f"{BASE}/v1", "api_key": KEY, "stream_usage": True}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatCompletions(Suite):
    """`/chat/completions`."""


class TestResponses(Suite):
    """`/responses`, its answers in LangChain's first form."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class TestResponsesV1(Suite):
    """`/responses`, its answers as content blocks."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True, "output_version": "v1"}


class TestMessages(Suite):
    """Anthropic's `/messages`."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "policy", "base_url": BASE, "api_key": KEY}

    @property
    def supports_json_mode(self) -> bool:
        return False
