# dependencies = ["openai==3.52.0"]
"""openai: a tool loop on the responses API, by `previous_response_id`."""

import json
import sys
from pathlib import Path

from openai import OpenAI

PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "name": "write_answer",
        "description": "Writes answer.txt.",
        "parameters": PARAMETERS,
        "strict": True,
    }
]

client = OpenAI()
response = client.responses.create(model="gpt-5", input=sys.argv[1], tools=TOOLS)
while calls := [item for item in response.output if item.type == "function_call"]:
    results = []
    for call in calls:
        Path("answer.txt").write_text(json.loads(call.arguments)["text"])
        results.append({"type": "function_call_output", "call_id": call.call_id, "output": "written"})
    response = client.responses.create(model="gpt-5", input=results, tools=TOOLS, previous_response_id=response.id)
print(response.output_text)
