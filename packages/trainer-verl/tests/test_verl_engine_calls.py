"""The engine's side of a call: vLLM's parameters, and stop strings that keep whole tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lightningrl.types import SamplingSettings
from lightningrl_verl.engine import cut_at_stop, sampling_parameters


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
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(text: str, stops: tuple[str, ...], kept: str) -> None:
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
