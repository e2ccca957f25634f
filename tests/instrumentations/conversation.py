"""One conversation with a tool by OpenAI's SDK, two calls, in each way that it can be held, and the SDK's exporters.

python NAME.py chat | stream | responses | responses-stream | chat-ids | stream-ids
"""

import json
import sys

from openai import OpenAI
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

SYSTEM = "Answer in a word."
TASK = "What is the word of the day?"
PARAMETERS = {
    "type": "object",
    "properties": {"day": {"type": "string"}},
    "required": ["day"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look_up", "description": "Look a day's word up.", "parameters": PARAMETERS}


def tracer_provider() -> TracerProvider:
    """Spans to OTEL_EXPORTER_OTLP_ENDPOINT."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
    return provider


def converse(client: OpenAI | None = None) -> None:
    """Hold the conversation that the command line names."""
    client = client or OpenAI()
    how, _, more = sys.argv[1].partition("-")
    if how == "responses":
        hold_responses(client, streamed=more == "stream")
    else:
        hold_chat(client, streamed=how == "stream", with_ids=more == "ids")


def hold_chat(client: OpenAI, *, streamed: bool, with_ids: bool) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    settings = {
        "model": "policy",
        "temperature": 0.7,
        "seed": 7,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    if with_ids:  # as vLLM takes it
        settings |= {"logprobs": True, "extra_body": {"return_token_ids": True}}
    for _ in range(2):
        if streamed:
            message = joined(client.chat.completions.create(messages=messages, stream=True, **settings))
        else:
            message = client.chat.completions.create(messages=messages, **settings).choices[0].message
            message = message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        messages.append(message)
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "serendipity"})


def joined(stream) -> dict:
    """The message that a stream's pieces make."""
    message = {"role": "assistant", "content": ""}
    for chunk in stream:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                calls = message.setdefault("tool_calls", [])
                if len(calls) <= piece.index:
                    calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
                call = calls[piece.index]
                call["id"] += piece.id or ""
                call["function"]["name"] += piece.function.name or ""
                call["function"]["arguments"] += piece.function.arguments or ""
    return message


def hold_responses(client: OpenAI, *, streamed: bool) -> None:
    items = [{"role": "user", "content": TASK}]
    settings = {
        "model": "policy",
        "instructions": SYSTEM,
        "temperature": 0.7,
        "tools": [{"type": "function", "strict": True, **FUNCTION}],
    }
    for _ in range(2):
        if streamed:
            done = [
                event.response
                for event in client.responses.create(input=items, stream=True, **settings)
                if event.type == "response.completed"
            ]
            output = done[-1].output
        else:
            output = client.responses.create(input=items, **settings).output
        for item in output:
            items.append(json.loads(item.model_dump_json(exclude_none=True, exclude={"status"})))
            if item.type == "function_call":
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": "serendipity"})
