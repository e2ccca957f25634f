# dependencies = ["anthropic==2.11.0"]
"""anthropic: the SDK's tool runner."""

import sys
from pathlib import Path

from anthropic import Anthropic, beta_tool


@beta_tool
def write_answer(text: str) -> str:
    """Writes answer.txt.

    Args:
        text: what stands in it
    """
    Path("answer.txt").write_text(text)
    return "written"


messages = [{"role": "user", "content": sys.argv[1]}]
runner = Anthropic().beta.messages.tool_runner(
    model="claude-sonnet-4-5", max_tokens=1000, tools=[write_answer], messages=messages
)
print(runner.until_done().content[0].text)
