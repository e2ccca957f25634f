"""Agents without a framework, as users write them: plain clients, made at import, with a key and a model of the user's
own.

Each kind gets a prompt and asks a model once. An agent plans, then asks two critics at once. The prompt names the role
that each call must have, and the rollout that it must belong to.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import anthropic
import httpx
import httpx2
import openai
import requests

from lightningrl import role

CHAT = "https://api.openai.com/v1/chat/completions"
MESSAGES = "https://api.anthropic.com/v1/messages"
KEY = {"Authorization": "Bearer sk-the-users-own"}
ANTHROPIC_KEY = {"x-api-key": "sk-the-users-own", "anthropic-version": "2023-06-01"}

sync_openai = openai.OpenAI(api_key="sk-the-users-own")
async_openai = openai.AsyncOpenAI(api_key="sk-the-users-own")
sync_anthropic = anthropic.Anthropic(api_key="sk-the-users-own")
async_anthropic = anthropic.AsyncAnthropic(api_key="sk-the-users-own")
sync_httpx = httpx.Client(headers=KEY, timeout=None)
session = requests.Session()


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": prompt}], **fields}


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def text_of_event(line: str) -> str:
    """A line of a stream, read by hand."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return ""
    choices = json.loads(data)["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


def ask_openai(prompt: str) -> str:
    return sync_openai.chat.completions.create(**body(prompt)).choices[0].message.content or ""


def ask_openai_stream(prompt: str) -> str:
    chunks = sync_openai.chat.completions.create(**body(prompt), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def ask_responses(prompt: str) -> str:
    return sync_openai.responses.create(model="gpt-5", input=prompt).output_text


def ask_anthropic(prompt: str) -> str:
    return str(sync_anthropic.messages.create(max_tokens=50, **body(prompt)).content[0].text)


def ask_anthropic_stream(prompt: str) -> str:
    with sync_anthropic.messages.stream(max_tokens=50, **body(prompt)) as stream:
        return "".join(stream.text_stream)


def ask_httpx(prompt: str) -> str:
    return text_of(sync_httpx.post(CHAT, json=body(prompt)).raise_for_status().json())


def ask_httpx2(prompt: str) -> str:
    return text_of(httpx2.post(CHAT, json=body(prompt), headers=KEY, timeout=None).raise_for_status().json())


def ask_requests(prompt: str) -> str:
    answer = session.post(CHAT, json=body(prompt), headers=KEY, timeout=None)
    answer.raise_for_status()
    return text_of(answer.json())


def ask_requests_messages(prompt: str) -> str:
    answer = session.post(MESSAGES, json=body(prompt, max_tokens=50), headers=ANTHROPIC_KEY, timeout=None)
    answer.raise_for_status()
    return str(answer.json()["content"][0]["text"])


def ask_httpx_stream(prompt: str) -> str:
    with sync_httpx.stream("POST", CHAT, json=body(prompt, stream=True)) as answer:
        return "".join(map(text_of_event, answer.iter_lines()))


def ask_requests_stream(prompt: str) -> str:
    with session.post(CHAT, json=body(prompt, stream=True), headers=KEY, timeout=None, stream=True) as answer:
        return "".join(text_of_event(line.decode()) for line in answer.iter_lines())


async def ask_openai_async(prompt: str) -> str:
    return (await async_openai.chat.completions.create(**body(prompt))).choices[0].message.content or ""


async def ask_openai_async_stream(prompt: str) -> str:
    said = ""
    async for chunk in await async_openai.chat.completions.create(**body(prompt), stream=True):
        said += chunk.choices[0].delta.content or "" if chunk.choices else ""
    return said


async def ask_responses_async(prompt: str) -> str:
    return (await async_openai.responses.create(model="gpt-5", input=prompt)).output_text


async def ask_anthropic_async(prompt: str) -> str:
    return str((await async_anthropic.messages.create(max_tokens=50, **body(prompt))).content[0].text)


async def ask_httpx_async(prompt: str) -> str:
    async with httpx.AsyncClient(headers=KEY, timeout=None) as client:
        return text_of((await client.post(CHAT, json=body(prompt))).raise_for_status().json())


async def ask_aiohttp(prompt: str) -> str:
    async with aiohttp.ClientSession(headers=KEY) as client, client.post(CHAT, json=body(prompt)) as answer:
        return text_of(json.loads(await answer.text()))


async def ask_httpx_async_stream(prompt: str) -> str:
    async with (
        httpx.AsyncClient(headers=KEY, timeout=None) as client,
        client.stream("POST", CHAT, json=body(prompt, stream=True)) as answer,
    ):
        return "".join([text_of_event(line) async for line in answer.aiter_lines()])


async def ask_aiohttp_stream(prompt: str) -> str:
    async with (
        aiohttp.ClientSession(headers=KEY) as client,
        client.post(CHAT, json=body(prompt, stream=True)) as answer,
    ):
        return "".join([text_of_event(line.decode().strip()) async for line in answer.content])


async def ask_anthropic_async_stream(prompt: str) -> str:
    async with async_anthropic.messages.stream(max_tokens=50, **body(prompt)) as stream:
        return "".join([text async for text in stream.text_stream])


SYNC: dict[str, Callable[[str], str]] = {
    "openai": ask_openai,
    "openai_stream": ask_openai_stream,
    "responses": ask_responses,
    "anthropic": ask_anthropic,
    "anthropic_stream": ask_anthropic_stream,
    "httpx": ask_httpx,
    "httpx_stream": ask_httpx_stream,
    "httpx2": ask_httpx2,
    "requests": ask_requests,
    "requests_stream": ask_requests_stream,
    "requests_messages": ask_requests_messages,
}
ASYNC: dict[str, Callable[[str], Awaitable[str]]] = {
    "openai": ask_openai_async,
    "openai_stream": ask_openai_async_stream,
    "responses": ask_responses_async,
    "anthropic": ask_anthropic_async,
    "anthropic_stream": ask_anthropic_async_stream,
    "httpx": ask_httpx_async,
    "httpx_stream": ask_httpx_async_stream,
    "aiohttp": ask_aiohttp,
    "aiohttp_stream": ask_aiohttp_stream,
}


def act(task: dict[str, str]) -> list[str]:
    """Sync: the critics are asked in threads."""
    ask, rid = SYNC[task["client"]], task["rid"]
    with role("team"):
        with role("planner"):
            said = [ask(f"RID={rid} ROLE=team/planner plan")]
        with ThreadPoolExecutor(2) as threads:
            with role("critic"):
                asked = [threads.submit(ask, f"RID={rid} ROLE=team/critic {number}") for number in range(2)]
            said += [one.result() for one in asked]
    return [*said, ask(f"RID={rid} ROLE= last")]


async def act_async(task: dict[str, str]) -> list[str]:
    """Async: the critics are asked in tasks."""
    ask, rid = ASYNC[task["client"]], task["rid"]

    async def criticise(number: int) -> str:
        with role("critic"):
            await asyncio.sleep(0)
            return await ask(f"RID={rid} ROLE=team/critic {number}")

    with role("team"):
        with role("planner"):
            said = [await ask(f"RID={rid} ROLE=team/planner plan")]
        said += await asyncio.gather(criticise(0), criticise(1))
    return [*said, await ask(f"RID={rid} ROLE= last")]
