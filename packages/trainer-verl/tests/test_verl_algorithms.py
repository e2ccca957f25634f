"""What else verl brings to a recipe: a critic, a reference KL, GSPO over several updates, LoRA. Each learns what its
advantages say."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightningrl.backends import Backend, LearnReport
from lightningrl_testing.backend_conformance import generate, make_row
from lightningrl_verl.plugin import create_backend
from lightningrl_verl.runner import MEETING_PORTS

PROMPT = (65, 66, 67, 68)
MERGED = {"actor_rollout_ref.model.lora.merge": True}
"""Adapters are merged into the weights that are sent; vLLM on the CPU cannot take them apart."""


@pytest.fixture(scope="module", autouse=True)
def one_ray(cpu_ray: None) -> Iterator[None]:
    yield


async def train(backend: Backend, steps: int = 4) -> list[LearnReport]:
    """Reward even tokens."""
    reports = []
    for _ in range(steps):
        made = await asyncio.gather(*(generate(backend, PROMPT, max_tokens=1) for _ in range(32)))
        rows = [make_row(PROMPT, one, 1.0 if one.token_ids[0] % 2 == 0 else -1.0, 1 / len(made)) for one in made]
        reports.append(await asyncio.to_thread(backend.learn, rows))
    return reports


async def even_share(backend: Backend) -> float:
    made = await asyncio.gather(*(generate(backend, PROMPT, max_tokens=1) for _ in range(100)))
    return sum(one.token_ids[0] % 2 == 0 for one in made) / len(made)


def listening() -> set[int]:
    """TCP ports of this machine on which somebody waits for connections."""
    return {place.laddr.port for place in psutil.net_connections("tcp") if place.status == psutil.CONN_LISTEN}


def run(policy: str, steps: int = 4, **settings: Any) -> tuple[float, float, list[LearnReport]]:
    backend = create_backend(policy=policy, name="policy", dtype="float32", learning_rate=1e-2, **settings)
    try:

        async def scene() -> tuple[float, float, list[LearnReport]]:
            elsewhere = listening()
            before = await even_share(backend)
            assert any(port in MEETING_PORTS for port in listening() - elsewhere), (
                "no outgoing connection takes the ranks' port meanwhile"
            )
            reports = await train(backend, steps)
            return before, await even_share(backend), reports

        return asyncio.run(scene())
    finally:
        backend.close()


def test_ppo_with_a_critic_and_a_reference_kl(policy: str) -> None:
    before, after, reports = run(
        policy, steps=6, critic={"learning_rate": 1e-2}, kl_coef=1e-3, engine="transformers", gpus_per_node=2
    )
    assert after > before + 0.2
    values = [report.metrics["value_loss"] for report in reports]
    assert np.isfinite(values).all()
    assert reports[0].metrics["kl_reference"] == pytest.approx(0.0, abs=1e-5), "the reference is the starting policy"
    assert reports[-1].metrics["kl_reference"] > 1e-3, "and the policy has moved away from it"


def test_gspo_in_several_minibatches_and_epochs(policy: str) -> None:
    before, after, reports = run(
        policy, loss="gspo", minibatches=2, epochs=2, clip_low=0.5, clip_high=0.5, engine="transformers"
    )
    assert after > before + 0.2
    assert all(report.metrics["rows"] == 32 for report in reports)


OWN_LOSS = """
from lightningrl_torch.losses import TokenBatch, TokenLosses


def pulled(batch: TokenBatch, *, pull: float) -> TokenLosses:
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    away = (ratio - 1).square()
    return TokenLosses(losses=pull * away - ratio * batch.advantages, metrics={"away": away}, has_other_terms=True)
"""


def test_a_users_own_loss_in_rays_processes(policy: str, tmp_path: Path) -> None:
    """Not proportional to the advantage, with a term that stays where that is 0: verl averages it, and keeps every
    row."""
    (tmp_path / "verl_pulled.py").write_text(OWN_LOSS, encoding="utf-8")
    options: dict[str, Any] = {
        "loss": f"{tmp_path / 'verl_pulled.py'}:pulled",
        "loss_options": {"pull": 0.01},
        "minibatches": 2,
        "engine": "transformers",
    }
    before, after, reports = run(policy, **options)
    assert after > before + 0.2
    assert all(report.metrics["away"] > 0 and report.metrics["kl_rollout"] >= 0 for report in reports)
    assert all(report.metrics["rows"] == 32 for report in reports)


def test_lora_is_served_by_vllm_and_merged_on_export(policy: str, tmp_path: Path) -> None:
    backend = create_backend(
        policy=policy, name="policy", dtype="float32", learning_rate=3e-2, lora={"rank": 4}, verl=MERGED
    )
    try:

        async def scene() -> tuple[float, float, Any, list[LearnReport]]:
            before = await even_share(backend)
            reports = await train(backend)
            after = await even_share(backend)
            made = await generate(backend, PROMPT, max_tokens=6, temperature=0.0)
            await asyncio.to_thread(backend.export, tmp_path / "merged")
            return before, after, made, reports

        before, after, made, reports = asyncio.run(scene())
    finally:
        backend.close()
    assert after > before + 0.2
    # verl sends merged adapters in bfloat16 (workers/engine/fsdp/transformer_impl.py:1082), so replica and trainer
    # agree to its precision
    assert all(report.metrics["probability_gap_max"] < 2e-2 for report in reports)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([[*PROMPT, *made.token_ids]])
    with torch.no_grad():
        logprobs = merged(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert logprobs.gather(1, torch.tensor(made.token_ids)[:, None])[:, 0].tolist() == pytest.approx(
        list(made.logprobs), abs=5e-2
    )
