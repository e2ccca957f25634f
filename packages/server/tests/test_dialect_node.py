"""The official `openai` and `@anthropic-ai/sdk` packages for Node.js against the gateway, unmodified: agents in another
language."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sizes import PATIENCE_S

from lightningrl.types import BranchPoint, Outcome, Trajectory, Transition
from lightningrl_testing.live_gateway import LiveAttempt, LiveGateway, live_gateway
from lightningrl_testing.whole_path import repeated_calls

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

HELPERS = """
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
const client = new OpenAI({ maxRetries: 0 });
const Verdict = z.object({ answer: z.number() });
const messages = [{ role: "user", content: "What is 6*7?" }];
const search = zodFunction({ name: "search", parameters: z.object({ q: z.string() }), function: ({ q }) => `found ${q}` });
const chat = { model: "m", messages, response_format: zodResponseFormat(Verdict, "verdict") };
const responses = { model: "m", input: "What is 6*7?", text: { format: zodTextFormat(Verdict, "verdict") } };
const out = {};

out.chat = (await client.chat.completions.parse(chat)).choices[0].message.parsed;
out.chatStream = (await client.chat.completions.stream(chat).finalChatCompletion()).choices[0].message.parsed;
out.responses = (await client.responses.parse(responses)).output_parsed;
out.responsesStream = (await client.responses.stream(responses).finalResponse()).output_parsed;
out.tools = await client.chat.completions.runTools({ model: "m", messages, tools: [search] }).finalContent();
out.toolsStream = await client.chat.completions.runTools({ model: "m", messages, tools: [search], stream: true }).finalContent();
console.log(JSON.stringify(out));
"""

ANTHROPIC = """
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
const client = new Anthropic({ maxRetries: 0 });
const messages = [{ role: "user", content: "What is 6*7?" }];
const base = { model: "m", max_tokens: 200, messages };
const run = ({ q }) => `found ${q}`;
const search = betaZodTool({ name: "search", description: "d", inputSchema: z.object({ q: z.string() }), run });
const output_config = { format: zodOutputFormat(z.object({ answer: z.number() })) };
const text = (message) => message.content.map((block) => block.text ?? "").join("");
const out = {};

out.plain = text(await client.messages.create(base));
out.stream = await client.messages.stream(base).finalText();
out.parsed = (await client.messages.parse({ ...base, output_config })).parsed_output;
out.tools = text(await client.beta.messages.toolRunner({ ...base, tools: [search] }));
const runner = client.beta.messages.toolRunner({ ...base, tools: [search], stream: true });
for await (const stream of runner) out.toolsStream = text(await stream.finalMessage());
try {
  await client.messages.create({ ...base, messages: [{ role: "user", content: "x".repeat(200000) }] });
} catch (error) {
  out.error = [error.constructor.name, error.status, error.error.error.type, error.message.includes("prompt is too long")];
}
console.log(JSON.stringify(out));
"""


@pytest.fixture(scope="module")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages, from `LIGHTNINGRL_NODE_MODULES` where that names one, else installed for this
    test."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not on this machine")
    folder = tmp_path_factory.mktemp("node")
    (folder / "package.json").write_text('{"type": "module", "private": true}', encoding="utf-8")
    installed = os.environ.get("LIGHTNINGRL_NODE_MODULES")
    if installed:
        (folder / "node_modules").symlink_to(installed)
        return folder
    command = ["npm", "install", "--no-audit", "--no-fund", "openai@6", "zod@4", "@anthropic-ai/sdk@1"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    if ran.returncode != 0:
        pytest.skip(f"npm could not install the packages: {ran.stderr.strip()[-200:]}")
    return folder


async def run_node(folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        "node",
        "agent.mjs",
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, error = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 0, error.decode()
    said: dict[str, Any] = json.loads(out)
    return said


ANSWERS = ("chat", "chatStream", "runTools", "responses", "responsesStream")


async def branch_node(
    gateway: LiveGateway, folder: Path, recorded: LiveAttempt, calls: int
) -> tuple[Trajectory, dict[str, Any]]:
    """The agent again, its first so many calls answered as they were."""
    attempt = await gateway.attempt(
        branch=BranchPoint(rollout_id=recorded.rollout_id, attempt=recorded.attempt, calls=calls)
    )
    said = await run_node(folder, {"OPENAI_BASE_URL": attempt.base_url, "OPENAI_API_KEY": attempt.key})
    await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
    (trajectory,) = await gateway.store.trajectories([attempt.rollout_id])
    return trajectory, said


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
        await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
        branches = [await branch_node(gateway, node_folder, attempt, calls) for calls in range(7)]
    for calls, (branch, again) in enumerate(branches):
        assert (branch.outcome, repeated_calls(branch, transitions)) == (Outcome.SUCCEEDED, calls), branch.error
        assert [again[key] == said[key] for key in ANSWERS] == [calls > last for last in (0, 1, 3, 4, 5)]
    assert said["deltas"] > 5
    assert said["error"] == ["BadRequestError", 400, "previous_response_not_found"]
    assert {key: said[key] for key in ANSWERS} == {
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


CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "ü"}}\n</tool_call>'


def assert_alike(whole: Sequence[Transition], streamed: Sequence[Transition]) -> None:
    """Two histories of the same words are the same records."""
    for left, right in zip(whole, streamed, strict=True):
        for name in ("prompt_ids", "completion_ids", "logprobs"):
            assert getattr(left, name).tolist() == getattr(right, name).tolist()
        assert (left.finish_reason, left.is_break, len(left.tool_call_ids)) == (
            right.finish_reason,
            False,
            len(right.tool_call_ids),
        )


@pytest.mark.slow
async def test_parsers_and_tool_runners_in_javascript_record_alike_whole_and_streamed(
    tmp_path: Path, node_folder: Path
) -> None:
    (node_folder / "agent.mjs").write_text(HELPERS, encoding="utf-8")
    async with live_gateway(tmp_path) as gateway:
        gateway.engine.enqueue(*['{"answer": 42}'] * 4, *[CALL, "It is 42."] * 2)
        attempt = await gateway.attempt()
        said = await run_node(node_folder, {"OPENAI_BASE_URL": attempt.base_url, "OPENAI_API_KEY": attempt.key})
        transitions = await attempt.transitions()
    parsed = {name: {"answer": 42} for name in ("chat", "chatStream", "responses", "responsesStream")}
    assert said == {**parsed, "tools": "It is 42.", "toolsStream": "It is 42."}
    assert_alike([*transitions[0:3:2], *transitions[4:6]], [*transitions[1:4:2], *transitions[6:8]])
    assert transitions[5].parent_id == transitions[4].id and transitions[7].parent_id == transitions[6].id


@pytest.mark.slow
async def test_the_anthropic_sdk_for_javascript_is_recorded_like_any_other(tmp_path: Path, node_folder: Path) -> None:
    (node_folder / "agent.mjs").write_text(ANTHROPIC, encoding="utf-8")
    async with live_gateway(tmp_path) as gateway:
        gateway.engine.enqueue("été 🙂", "été 🙂", '{"answer": 42}', *[CALL, "It is 42."] * 2)
        attempt = await gateway.attempt()
        environment = {"ANTHROPIC_BASE_URL": attempt.base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": attempt.key}
        said = await run_node(node_folder, environment)
        transitions = await attempt.transitions()
    assert said == {
        "plain": "été 🙂",
        "stream": "été 🙂",
        "parsed": {"answer": 42},
        "tools": "It is 42.",
        "toolsStream": "It is 42.",
        "error": ["BadRequestError", 400, "invalid_request_error", True],
    }
    assert_alike([transitions[0], *transitions[3:5]], [transitions[1], *transitions[5:7]])
    assert transitions[4].parent_id == transitions[3].id and transitions[6].parent_id == transitions[5].id
