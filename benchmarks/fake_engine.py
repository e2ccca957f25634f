"""One engine that samples nothing and answers both gateways alike: ours over its engine link, theirs as vLLM's HTTP
server would.

    lightningrl server       ── engine link ──┐
                                              ├─ one process, one answer, its token ids and logprobs
    agent-lightning server   ── HTTP ─────────┘

`hold(n)` keeps every call until `n` are there (or nobody came for a while), as an engine does that takes a large batch.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any, Final, Self

__all__ = ["ANSWER", "FakeEngine"]

ANSWER: Final = ("SELECT name FROM singer WHERE age > 20 " * 3)[:99]
"""A token each character, and one that ends it: a hundred."""
QUIET_S: Final = 20.0
"""A gateway that hands over no further call for so long hands over no more."""


class FakeEngine:
    """The engine's process, from outside.

    with FakeEngine() as engine:
        engine.link("http://127.0.0.1:8000", run_key)     # ours
        engine.url                                        # for theirs
    """

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=run, args=(there,), daemon=True)
        self._process.start()
        self.url = f"http://127.0.0.1:{self._pipe.recv()}/v1"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def link(self, url: str, key: str) -> None:
        """Serve a server of ours; returns once it knows the engine."""
        self._ask("link", url, key)

    def unlink(self) -> None:
        self._ask("unlink")

    def hold(self, calls: int) -> None:
        self._ask("hold", calls)

    def most_held(self) -> int:
        """How many calls were here at once since `hold`."""
        return int(self._ask("most_held"))

    def _ask(self, *message: Any) -> Any:
        self._pipe.send(message)
        return self._pipe.recv()


class Gate:
    """Open, or closed until so many have come."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._wanted = 0
        self._quiet: asyncio.TimerHandle | None = None
        self.most = 0

    def close(self, wanted: int) -> None:
        self._open.clear()
        self._wanted, self.most = wanted, 0

    async def enter(self) -> None:
        if self._open.is_set():
            return
        self.most += 1
        if self._quiet is not None:
            self._quiet.cancel()
        self._quiet = asyncio.get_running_loop().call_later(QUIET_S, self._open.set)
        if self.most >= self._wanted:
            self._open.set()
        await self._open.wait()


def run(pipe: Connection) -> None:
    asyncio.run(serve(pipe))


async def serve(pipe: Connection) -> None:
    from lightningrl.backends import EngineInfo, GenerateRequest, TokenChunk
    from lightningrl.types import FinishReason
    from lightningrl_server.engines.link import EngineLink
    from lightningrl_testing.scripted_engine import pseudo_logprobs
    from lightningrl_testing.tokenizers import tiny_tokenizer

    gate = Gate()
    tokenizer = tiny_tokenizer()
    token_ids = (*tokenizer.encode(ANSWER, add_special_tokens=False), tokenizer.eos_token_id)
    logprobs = pseudo_logprobs(token_ids)
    chunk = TokenChunk(token_ids=token_ids, logprobs=logprobs, policy_version=0, finish_reason=FinishReason.STOP)
    before, after = (part.encode() for part in completion(token_ids, logprobs))

    class Engine:
        policy = "policy"
        version = 0
        info = EngineInfo(policy="policy", version=0, context_length=32_768)

        async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
            await gate.enter()
            yield chunk

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection of a client that speaks to vLLM."""
        try:
            while True:
                headers = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(headers.partition(b"content-length:")[2].partition(b"\r\n")[0])
                messages = json.loads(await reader.readexactly(length))["messages"]
                await gate.enter()
                prompt_ids = list("".join(message["content"] for message in messages).encode())
                body = b"%b%b%b" % (before, json.dumps(prompt_ids).encode(), after)
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(body), body)
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096, limit=2**24)
    pipe.send(server.sockets[0].getsockname()[1])
    links = []
    while True:
        match await asyncio.to_thread(pipe.recv):
            case ("link", url, key):
                links.append(EngineLink(Engine(), url, key))
                await links[-1].start()
                pipe.send(None)
            case ("unlink",):
                while links:
                    await links.pop().close()
                pipe.send(None)
            case ("hold", calls):
                gate.close(calls)
                pipe.send(None)
            case ("most_held",):
                pipe.send(gate.most)


def completion(token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> tuple[str, str]:
    """A chat completion as vLLM writes it with `return_token_ids` and `logprobs`: what stands before and after the
    prompt's ids."""
    content = [
        {"token": letter, "logprob": logprob, "bytes": list(letter.encode()), "top_logprobs": []}
        for letter, logprob in zip((*ANSWER, "<|im_end|>"), logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER, "refusal": None, "tool_calls": [], "reasoning": None},
        "logprobs": {"content": content},
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": token_ids,
    }
    usage = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": len(token_ids), "prompt_tokens_details": None}
    whole = json.dumps(
        {
            "id": "chatcmpl-0",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [choice],
            "usage": usage,
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "prompt_token_ids": "HERE",
        }
    )
    before, _, after = whole.partition('"HERE"')
    return before, after
