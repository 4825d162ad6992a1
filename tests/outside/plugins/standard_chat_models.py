"""LangChain's standard integration tests, for the chat models of its OpenAI and Anthropic packages."""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL = os.environ.get("ATTACHED_URL", "")
MODEL = os.environ.get("ATTACHED_NAME", "")
COMMON = {"model": MODEL, "api_key": "unused", "temperature": 0, "max_tokens": 96, "timeout": 120, "max_retries": 0}


class TestChatCompletions(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**COMMON, "base_url": f"{URL}/v1", "stream_usage": True}


class TestResponses(TestChatCompletions):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**COMMON, "base_url": f"{URL}/v1", "use_responses_api": True}


class TestMessages(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatAnthropic]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**COMMON, "base_url": URL}
