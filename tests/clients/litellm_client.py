# dependencies = ["litellm==1.110.2"]
"""litellm: a tool loop on chat completions."""

import json
import sys
from pathlib import Path

import litellm

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "write_answer", "description": "Writes answer.txt.", "parameters": PARAMETERS},
    }
]

messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    message = litellm.completion(model="openai/gpt-5", messages=messages, tools=TOOLS).choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        Path("answer.txt").write_text(json.loads(call.function.arguments)["text"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "written"})
    if not message.tool_calls:
        break
print(message.content)
