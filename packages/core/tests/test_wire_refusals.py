"""Bytes that are no trajectories are refused with a sentence, whatever is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from lightningrl.wire import decode_trajectories, encode_trajectories
from lightningrl_testing.groups import make_trajectory, make_transition


def sent(**changed: Any) -> bytes:
    calls = [make_transition(f"r/{index}", index=index) for index in range(3)]
    (trajectory,) = json.loads(encode_trajectories([make_trajectory("r", calls)]))
    trajectory["transitions"][1] |= changed
    return json.dumps([trajectory]).encode()


@pytest.mark.parametrize("parent", ["r/1", "r/2", "nobody", ""], ids=["its own", "a later", "unknown", "empty"])
def test_a_parent_that_does_not_come_before_its_call_is_named(parent: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"'r/1' goes on from {parent!r}, which does not come before it"):
        decode_trajectories(sent(parent_id=parent))
    (read,) = decode_trajectories(sent(parent_id="r/0"))
    assert read.transitions[1].parent_id == "r/0"


@pytest.mark.parametrize("text", ["!!!", "AAAA====", "AAA", "AAAA", "ä"])
def test_what_is_no_base64_of_whole_tokens_is_no_empty_prompt(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_trajectories(sent(prompt_ids=text))
