"""Agents that fork: every process asks for itself, whoever else asks the same."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

from lightningrl.testing.live_gateway import LiveGateway, live_gateway

PROLOGUE = """
import json, multiprocessing, os, sys
import httpx
from lightningrl.tracing.redirect import Redirection
from lightningrl.tracing.scope import ActiveRollout, RolloutScope

server_url, base_path, key = sys.argv[1:]
scope = RolloutScope(exclusive=True)
Redirection(server_url=server_url, scope=scope).install()
rollout = ActiveRollout(rollout_id="r0", attempt=1, base_path=base_path, key=key)
BODY = {"model": "m", "messages": [{"role": "user", "content": "best of four"}]}

def ask(_=None):
    return httpx.post("https://api.openai.com/v1/chat/completions", json=BODY, timeout=30).raise_for_status().json()["id"]
"""
POOL = """
with scope.entered(rollout):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        forked = pool.map(ask, range(4), chunksize=1)
    print(json.dumps([*forked, ask()]))
"""

LEDGER = """
import os
from lightningrl.tracing.calls import CallLedger

ledger = CallLedger()
failed = ledger.claim(b"body")
ledger.give_back(failed)
print(failed.id, flush=True)
if os.fork() == 0:
    print(ledger.claim(b"body").id, ledger.claim(b"body", is_retry=True).id, flush=True)
    os._exit(0)
os.wait()
print(ledger.claim(b"body").id)
"""


async def run_agent(gateway: LiveGateway, agent: str) -> list[str]:
    """What a process of its own prints, which is redirected as a worker is."""
    attempt = await gateway.attempt()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROLOGUE + agent, gateway.url, attempt.base_url.removeprefix(gateway.url), attempt.key),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return list(map(str, json.loads(said)))


async def test_forked_processes_that_ask_the_same_get_an_answer_each(tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as gateway:
        answers = await run_agent(gateway, POOL)
        assert len(gateway.engine.requests) == 5
    assert len(set(answers)) == 5


def test_a_failed_call_is_retried_by_the_process_that_made_it_alone() -> None:
    ran = subprocess.run([sys.executable, "-c", LEDGER], capture_output=True, text=True, check=True)
    failed, child, child_again, parent = ran.stdout.split()
    assert child == child_again != failed
    assert parent == failed
