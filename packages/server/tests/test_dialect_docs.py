"""Every Python and TOML block of docs/reference/dialects.md runs."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from sizes import PATIENCE_S

from lightningrl.recipe_tables import PolicyConfig, UpstreamConfig
from lightningrl_server.settings import read_upstream
from lightningrl_testing.live_gateway import live_gateway

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "dialects.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [match.groups() for match in FENCE.finditer(PAGE.read_text(encoding="utf-8"))]


@pytest.mark.slow
async def test_the_python_blocks_run_with_the_two_environment_variables_alone(tmp_path: Path) -> None:
    programs = [body for language, body in BLOCKS if language == "python"]
    assert len(programs) == 2
    async with live_gateway(tmp_path) as gateway:
        for program in programs:
            gateway.engine.enqueue("forty-two", "quite sure")
            attempt = await gateway.attempt()
            environment = {
                **os.environ,
                "OPENAI_BASE_URL": attempt.base_url,
                "OPENAI_API_KEY": attempt.key,
                "ANTHROPIC_BASE_URL": attempt.base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": attempt.key,
            }
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            said, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
            assert process.returncode == 0, said.decode()
            transitions = await attempt.transitions()
            if "openai" in program:
                assert said.decode().replace("\n", " ") == "forty-two quite sure"
                assert transitions[1].parent_id == transitions[0].id
            else:
                assert said.decode().split() == ["end_turn", str(len(transitions[0].prompt_ids))]


def test_the_upstream_of_the_page_is_one() -> None:
    (block,) = [body for language, body in BLOCKS if language == "toml" and "[upstream]" in body]
    config = UpstreamConfig.model_validate(tomllib.loads(block)["upstream"])
    default, models = read_upstream(config, {"OPENAI_API_KEY": "a", "ANTHROPIC_API_KEY": "b"})
    assert default is not None and default.api_key == "a"
    assert {name: one.api_key for name, one in models.items()} == {"gpt-5*": "a", "claude-*": "b"}


def test_the_policy_of_the_page_is_one() -> None:
    (block,) = [body for language, body in BLOCKS if language == "toml" and "[policy]" in body]
    policy = PolicyConfig.model_validate(tomllib.loads(block)["policy"])
    assert policy.chat_template_kwargs == {"enable_thinking": False}


def test_every_block_is_of_a_language_that_runs() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "toml"}
