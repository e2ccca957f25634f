"""The engine's side of a call: vLLM's parameters, and stop strings that keep whole tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from lightningrl.types import SamplingSettings
from lightningrl_verl.engine import VerlEngine, cut_at_stop, sampling_parameters


def text_of(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens)


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("hello world", ("o w",), "hello w"),
        ("hello", ("x",), "hello"),
        ("aaa", ("a",), "a"),
        ("abcabc", ("ca", "b"), "ab"),
        ("", ("a",), ""),
    ],
)
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(
    text: str, stops: tuple[str, ...], kept: str
) -> None:
    tokens = [ord(character) for character in text]
    assert text_of(tokens[: cut_at_stop(tokens, stops, text_of)]) == kept


def test_sampling_settings_become_vllms() -> None:
    found = sampling_parameters(SamplingSettings(temperature=0.7, max_tokens=50, seed=3, stop_token_ids=(9,)), room=20)
    assert found == {
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 20,
        "logprobs": True,
        "stop_token_ids": [9],
        "seed": 3,
    }


async def test_a_call_that_is_cancelled_while_it_waits_for_new_weights_leaves_the_others_waiting() -> None:
    client = SimpleNamespace(_load_balancer=None)
    engine = VerlEngine(client, policy="policy", version=0, context_length=8, eos_ids=(), text_of=text_of)
    with engine.held():
        cancelled, other = (asyncio.create_task(engine._admitted()) for _ in range(2))
        await asyncio.sleep(0)  # both wait
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert not other.done()
    await other
    engine._leave()
    with engine.held():
        pass
