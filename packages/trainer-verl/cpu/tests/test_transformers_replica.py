"""The transformers replica generates, pauses, aborts and takes weights as verl's vLLM server does; all but one test
without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightningrl.errors import BackendError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Ray state API is no longer experimental:DeprecationWarning"
)  # verl's import

PROMPT = [5, 6, 7, 8]


@pytest.fixture
async def server(make_policy: Callable[[bool], str]) -> AsyncIterator[Any]:
    from lightningrl_verl_cpu.rollout import TransformersServer

    path = make_policy(True)
    config = SimpleNamespace(
        max_model_len=None, seed=0, max_num_seqs=8, response_length=16, prompt_length=32, ignore_eos=False
    )
    model_config = SimpleNamespace(path=path, local_path=path, tokenizer=AutoTokenizer.from_pretrained(path))
    server = TransformersServer(config, model_config, 0)
    yield server
    server.close()


def sampling(**overrides: Any) -> dict[str, Any]:
    return {"temperature": 0.8, "max_tokens": 6, "logprobs": True, "ignore_eos": True, **overrides}


async def test_logprobs_are_those_of_the_scaled_softmax_and_seeds_repeat(server: Any) -> None:
    first, again, other = await asyncio.gather(
        *(server.generate(PROMPT, sampling(seed=seed), f"r{number}") for number, seed in enumerate((1, 1, 2)))
    )
    assert first.token_ids == again.token_ids != other.token_ids
    assert (len(first.token_ids), first.stop_reason, first.extra_fields["global_steps"]) == (6, "completed", None)
    model = AutoModelForCausalLM.from_pretrained(server.path)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + first.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(first.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(first.log_probs), expected, atol=1e-5)


async def test_a_stop_token_ends_the_completion_and_stays_in_it(server: Any) -> None:
    whole = await server.generate(PROMPT, sampling(seed=1), "whole")
    stopped = await server.generate(PROMPT, sampling(seed=1, stop_token_ids=[whole.token_ids[2]]), "stopped")
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[2]) + 1]


async def test_new_weights_carry_the_trainers_step_and_change_what_is_said(server: Any) -> None:
    before = await server.generate(PROMPT, sampling(temperature=0.0), "before")
    weights = {
        name: value * 1.5 for name, value in AutoModelForCausalLM.from_pretrained(server.path).state_dict().items()
    }
    await server.update_weights(list(weights.items()), 3)
    after = await server.generate(PROMPT, sampling(temperature=0.0), "after")
    assert after.extra_fields["global_steps"] == 3
    assert after.log_probs != before.log_probs


async def test_a_weight_that_the_model_does_not_have_is_refused(server: Any) -> None:
    with pytest.raises(BackendError, match=r"no weight 'lora_A'; for LoRA set model\.lora\.merge=true"):
        await server.update_weights([("lora_A", torch.zeros(1))], 1)


async def test_abort_returns_what_there_is_and_later_calls_wait_for_resume(server: Any) -> None:
    running = asyncio.ensure_future(server.generate(PROMPT, sampling(max_tokens=120), "running"))
    await asyncio.sleep(0.05)
    await server.abort_all_requests()
    aborted = await running
    assert aborted.stop_reason == "aborted"
    assert len(aborted.token_ids) == len(aborted.log_probs) < 120
    waiting = asyncio.ensure_future(server.generate(PROMPT, sampling(), "waiting"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await server.resume_generation()
    assert (await waiting).stop_reason == "completed"


async def test_a_replica_that_leaves_turns_calls_away_also_those_that_wait(server: Any) -> None:
    await server.abort_all_requests()
    waiting = asyncio.ensure_future(server.generate(PROMPT, sampling(), "waiting"))
    await asyncio.sleep(0.01)
    await server.abort_all_requests(reject_request=True)
    late = await server.generate(PROMPT, sampling(), "late")
    assert [(await waiting).stop_reason, late.stop_reason] == ["aborted", "aborted"]
    assert late.token_ids == []


async def test_calls_wait_while_the_replica_sleeps_and_waking_only_the_weights_opens_nothing(server: Any) -> None:
    await server.sleep()
    waiting = asyncio.ensure_future(server.generate(PROMPT, sampling(), "waiting"))
    await server.wake_up(["weights"])
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await server.update_weights([], 7)
    await server.wake_up(["kv_cache"])
    assert (await waiting).extra_fields["global_steps"] == 7


@pytest.mark.parametrize("unknown", [{"min_p": 0.1}, {"repetition_penalty": 1.2}])
async def test_a_sampling_parameter_that_it_cannot_honour_is_refused(server: Any, unknown: dict[str, float]) -> None:
    with pytest.raises(BackendError, match=f"cannot honour sampling parameter '{next(iter(unknown))}'"):
        await server.generate(PROMPT, sampling(**unknown), "r")


@pytest.mark.slow
def test_verl_reaches_it_through_ray_and_sends_it_weights(
    run_process: Callable[..., str], make_policy: Callable[[bool], str]
) -> None:
    before, after = json.loads(run_process("process_replica.py", make_policy(False)).splitlines()[-1])
    assert (before[0], before[2], before[3]) == (4, "completed", {"global_steps": None})
    assert (after[0], after[2], after[3]) == (4, "completed", {"global_steps": 4})
    assert before[1] != after[1]
