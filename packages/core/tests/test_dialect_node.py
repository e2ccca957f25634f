"""The official `openai` package for Node.js against the gateway, unmodified: an agent in another language."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightningrl.testing.live_gateway import live_gateway

AGENT = """
import OpenAI from "openai";
const client = new OpenAI({ maxRetries: 0 });
const messages = [{ role: "user", content: "What is 6*7?" }];
const parameters = { type: "object", properties: { q: { type: "string" } } };
const out = {};

out.chat = (await client.chat.completions.create({ model: "gpt-4o", messages })).choices[0].message.content;

const stream = client.chat.completions.stream({ model: "gpt-4o", messages });
out.deltas = 0;
stream.on("content", () => { out.deltas += 1; });
out.chatStream = (await stream.finalChatCompletion()).choices[0].message.content;

const search = async ({ q }) => `found ${q}`;
const tool = { type: "function", function: { name: "search", function: search, parse: JSON.parse, parameters, description: "d" } };
out.runTools = await client.chat.completions.runTools({ model: "gpt-4o", messages, tools: [tool] }).finalContent();

const first = await client.responses.create({ model: "gpt-4o", input: "a", instructions: "X" });
out.responses = first.output_text;
const second = client.responses.stream({ model: "gpt-4o", input: "b", instructions: "X", previous_response_id: first.id });
out.responsesStream = (await second.finalResponse()).output_text;

try {
  await client.responses.create({ model: "gpt-4o", input: "c", previous_response_id: "resp_x" });
} catch (error) {
  out.error = [error.constructor.name, error.status, error.code];
}
console.log(JSON.stringify(out));
"""


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, from `LIGHTNINGRL_NODE_MODULES` where that names one, else installed for this test."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not on this machine")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"type": "module", "private": true}', encoding="utf-8")
    installed = os.environ.get("LIGHTNINGRL_NODE_MODULES")
    if installed:
        (folder / "node_modules").symlink_to(installed)
        return folder
    command = ["npm", "install", "--no-audit", "--no-fund", "openai@6"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    if ran.returncode != 0:
        pytest.skip(f"npm could not install the package: {ran.stderr.strip()[-200:]}")
    return folder


async def run_node(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        "node", "agent.mjs", cwd=folder, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, error = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, error.decode()
    said: dict[str, Any] = json.loads(out)
    return said


@pytest.mark.slow
async def test_an_agent_in_javascript_is_recorded_like_any_other(tmp_path: Path, node_folder: Path) -> None:
    (node_folder / "agent.mjs").write_text(AGENT, encoding="utf-8")
    async with live_gateway(tmp_path) as gateway:
        call = '<tool_call>\n{"name": "search", "arguments": {"q": "ü"}}\n</tool_call>'
        gateway.engine.enqueue("zweiundvierzig 🙂", "Grüße aus der Stadt", call, "found it", "one", "two")
        attempt = await gateway.attempt()
        said = await run_node(node_folder, {"OPENAI_BASE_URL": attempt.base_url, "OPENAI_API_KEY": attempt.key})
        transitions = await attempt.transitions()
        prompt = gateway.engine.tokenizer.decode(transitions[3].prompt_ids.tolist())
    assert said["deltas"] > 5
    assert said["error"] == ["BadRequestError", 400, "previous_response_not_found"]
    assert {key: said[key] for key in ("chat", "chatStream", "runTools", "responses", "responsesStream")} == {
        "chat": "zweiundvierzig 🙂",
        "chatStream": "Grüße aus der Stadt",
        "runTools": "found it",
        "responses": "one",
        "responsesStream": "two",
    }
    assert len(transitions) == 6
    assert transitions[3].parent_id == transitions[2].id and "found ü" in prompt
    assert transitions[5].parent_id == transitions[4].id
    assert not any(transition.is_break for transition in transitions)
