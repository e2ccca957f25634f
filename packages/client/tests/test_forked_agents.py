"""Agents that fork: every process asks for itself, whoever else asks the same."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from lightningrl.types import Outcome
from lightningrl_credit.rewards import ReportedReward
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.store_conformance import make_spec

PROLOGUE = """
import json, multiprocessing, os, sys
import httpx
from lightningrl_client.attribution.redirect import Redirection
from lightningrl_client.attribution.scope import ActiveRollout, RolloutScope

server_url, base_path, key = sys.argv[1:]
scope = RolloutScope(exclusive=True)
Redirection(server_url=server_url, scope=scope).install()
rollout = ActiveRollout(rollout_id="r0", attempt=1, base_path=base_path, key=key)
BODY = {"model": "m", "messages": [{"role": "user", "content": "best of four"}]}

def ask(_=None):
    return httpx.post("https://api.openai.com/v1/chat/completions", json=BODY, timeout=None).raise_for_status().json()["id"]
"""
POOL = """
with scope.entered(rollout):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        forked = pool.map(ask, range(4), chunksize=1)
    print(json.dumps([*forked, ask()]))
"""

REPORT = """
from lightningrl import report_reward

with scope.entered(rollout):
    if os.fork() == 0:
        report_reward("seen", 1.0)
        os._exit(0)
    _, status = os.wait()
print(json.dumps([status, len(rollout.reports)]))
"""
LEDGER = """
import os
from lightningrl_client.attribution.scope import CallLedger

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


async def run_agent(agent: str, *arguments: str) -> list[Any]:
    """What a process of its own prints, which is redirected as a worker is."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROLOGUE + agent, *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    return list(json.loads(said))


async def test_forked_processes_that_ask_the_same_get_an_answer_each(tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt()
        answers = await run_agent(POOL, gateway.url, attempt.base_url.removeprefix(gateway.url), attempt.key)
        assert len(gateway.engine.requests) == 5
    assert len(set(answers)) == 5


async def test_what_a_forked_process_reports_is_not_lost_with_it(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, attach=False) as control:
        await control.store.create_rollouts([make_spec("r0")])
        lease = await control.store.lease("w", lease_s=60)
        assert lease is not None
        assert await run_agent(REPORT, control.url, lease.base_path, lease.key) == [0, 0]
        await control.store.finish_attempt("r0", lease.attempt, Outcome.SUCCEEDED, "done", None, 1.0)
        (trajectory,) = await control.store.trajectories(["r0"])
    assert ReportedReward(name="seen")(trajectory.task, trajectory.output, trajectory) == 1.0


def test_a_failed_call_is_retried_by_the_process_that_made_it_alone() -> None:
    ran = subprocess.run([sys.executable, "-c", LEDGER], capture_output=True, text=True, check=True)
    failed, child, child_again, parent = ran.stdout.split()
    assert child == child_again != failed
    assert parent == failed
