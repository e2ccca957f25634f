"""A server that speaks the wire of OpenEnv 0.10 without openenv: the environments of `sums_server.py`, the same words.

`python wire_server.py PORT [sums|unrewarded|action] [SESSIONS]`. What both answer is compared in `test_openenv_wire.py`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

SIZES = {"train": 300, "test": 250}
TOOLS = {
    "add": ("Add two numbers.", {"a": "integer", "b": "integer"}),
    "answer": ("Answer the question.", {"text": "string"}),
    "wait": ("Wait.", {"seconds": "number"}),
}
GUESS = {
    "type": "object",
    "title": "Guess",
    "properties": {"metadata": {"type": "object"}, "number": {"title": "Number", "type": "integer"}},
    "required": ["number"],
}


def make_task(split: str, index: int) -> dict[str, Any]:
    rng = random.Random(f"{split}/{index}")
    first, second = rng.randrange(1000), rng.randrange(1000)
    return {
        "id": f"{split}-{index}",
        "index": index,
        "question": f"What is {first} + {second}?",
        "answer": first + second,
    }


def observe(fields: dict[str, Any], reward: float | None = None, done: bool = False, **metadata: Any) -> dict[str, Any]:
    data = {"observation": {"metadata": metadata, **fields}, "reward": reward, "done": done}
    return {"type": "observation", "data": {**data, **({"metadata": metadata} if metadata else {})}}


def refuse(code: str, message: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


class Sums:
    def __init__(self, is_rewarded: bool) -> None:
        self.is_rewarded = is_rewarded

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        self.task = make_task(data.get("split", "train"), data.get("index", 0))
        return observe({}, prompt=self.task["question"])

    def tools(self) -> dict[str, Any]:
        listed = [
            {
                "name": name,
                "description": description,
                "inputSchema": {
                    "additionalProperties": False,
                    "properties": {argument: {"type": kind} for argument, kind in arguments.items()},
                    "required": list(arguments),
                    "type": "object",
                },
            }
            for name, (description, arguments) in TOOLS.items()
        ]
        return {"jsonrpc": "2.0", "id": 1, "result": {"tools": listed}}

    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        if "tool_name" not in data:
            return refuse(
                "VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["tool_name"], "msg": "Field required"}]
            )
        name, arguments = data["tool_name"], data["arguments"]
        try:
            value = await self.call(name, arguments)
        except LookupError as error:
            kind = "tool_not_found" if name not in TOOLS else "invalid_args"
            return observe({"tool_name": name, "result": None, "error": {"error_type": kind, "message": str(error)}})
        content = [{"type": "text", "text": str(value), "annotations": None, "meta": None}]
        result = {"content": content, "structured_content": {"result": value}, "data": value, "is_error": False}
        reward = {"add": 0.1, "answer": float(value == "right")}.get(name) if self.is_rewarded else None
        is_done = self.is_rewarded and name == "answer"
        return observe({"tool_name": name, "result": result, "error": None}, reward, is_done)

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if name not in TOOLS:
            raise LookupError(f"Unknown tool: {name!r}")
        kinds = {"integer": int, "string": str, "number": int | float}
        for argument, kind in TOOLS[name][1].items():
            if not isinstance(arguments.get(argument), kinds[kind]):
                raise LookupError(f"1 validation error for call[{name}]: {argument}")
        if name == "wait":
            await asyncio.sleep(arguments["seconds"])
            return "waited"
        if name == "add":
            return arguments["a"] + arguments["b"]
        return "right" if arguments["text"].strip() == str(self.task["answer"]) else "wrong"


class Guesses:
    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        self.number = random.Random(data.get("seed")).randrange(8)
        return observe({"question": "Which number from 0 to 7?", "verdict": ""})

    def tools(self) -> dict[str, Any]:
        error = {"code": -32603, "message": "Environment does not support MCP", "data": None}
        return {"jsonrpc": "2.0", "id": 1, "error": error}

    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(data.get("number"), int):
            return refuse("VALIDATION_ERROR", "Invalid message", errors=[{"loc": ["number"], "msg": "Field required"}])
        is_right = data["number"] == self.number
        return observe({"question": "", "verdict": "right" if is_right else "wrong"}, float(is_right), is_right)


class Server:
    def __init__(self, kind: str, sessions: int) -> None:
        self.kind, self.sessions, self.active, self.most, self.opened = kind, sessions, 0, 0, 0
        self.name = "guesses" if kind == "action" else "sums"

    async def ask(self, request: Request) -> Response:
        what = request.path_params["what"]
        if self.kind == "action":
            name = "list_splits" if what == "splits" else what
            return JSONResponse({"detail": f"{name} is not supported for this environment"}, 501)
        if what == "splits":
            return JSONResponse([{"name": name, "type": name} for name in SIZES])
        body = await request.json()
        if what == "num_tasks":
            return JSONResponse({"num_tasks": SIZES[body["split"]]})
        tasks = [make_task(body["split"], index) for index in range(body["start"], body["stop"])]
        return JSONResponse({"tasks": tasks})

    async def schema(self, request: Request) -> Response:
        return JSONResponse({"action": GUESS if self.kind == "action" else {"type": "object"}})

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "healthy"})

    async def counts(self, request: Request) -> Response:
        """Sessions: of now, most at once, opened."""
        return JSONResponse([self.active, self.most, self.opened])

    async def environments(self, request: Request) -> Response:
        return JSONResponse([self.name])

    async def session(self, socket: WebSocket) -> None:
        await socket.accept()
        if self.active >= self.sessions:
            await socket.send_text(json.dumps(refuse("CAPACITY_REACHED", "Server at capacity")))
            await socket.close()
            return
        self.active += 1
        self.opened += 1
        self.most = max(self.most, self.active)
        environment = Guesses() if self.kind == "action" else Sums(self.kind != "unrewarded")
        try:
            while True:
                message = json.loads(await socket.receive_text())
                if message["type"] == "close":
                    break
                if message["type"] == "reset":
                    answer = environment.reset(message["data"])
                elif message["type"] == "mcp":
                    answer = {"type": "mcp", "data": environment.tools()}
                else:
                    answer = await environment.step(message["data"])
                await socket.send_text(json.dumps(answer))
        except WebSocketDisconnect:
            pass
        finally:
            self.active -= 1


def main(port: str, kind: str = "sums", sessions: str = "8") -> None:
    server = Server(kind, int(sessions))
    routes = [
        Route("/health", server.health),
        Route("/counts", server.counts),
        Route("/schema", server.schema),
        Route("/list_environments", server.environments),
        Route("/{name}/{what}", server.ask, methods=["GET", "POST"]),
        WebSocketRoute("/ws", server.session),
    ]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=int(port), log_level="error")


if __name__ == "__main__":
    main(*sys.argv[1:4])
