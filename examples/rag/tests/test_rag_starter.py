"""The starter policy: an ordinary transformers folder with a lossless tokenizer, and a call that stays short."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import data
from demonstrations import TOOLS, build_conversations
from starter import CALL_TOKENS, build_starter
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightningrl_server.rendering.renderer import PolicyRenderer

STARTER = Path(__file__).resolve().parent.parent / "starter"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STARTER)


def test_the_folder_loads_and_is_small() -> None:
    model = AutoModelForCausalLM.from_pretrained(STARTER)
    assert 500_000 < model.num_parameters() < 1_100_000
    assert sum(path.stat().st_size for path in STARTER.iterdir()) < 4_500_000


def test_every_text_round_trips(tokenizer: Any) -> None:
    texts = [question.text for question in data.build_splits()["validation"]]
    texts += [passage.text for passage in data.build_worlds()["validation"].passages]
    texts += ["Grüße  \t\n 'don't' 12345 3.14 日本語 \U0001f600 <b>", *CALL_TOKENS, ""]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_names_nothing_was_trained_on_are_two_known_words(tokenizer: Any) -> None:
    for fact in data.build_worlds()["validation"].facts:
        assert len(tokenizer.encode(f" {fact.object}")) == 2


def test_a_search_is_nine_tokens_and_is_read_back(tokenizer: Any) -> None:
    renderer = PolicyRenderer(tokenizer)
    prompt = renderer.render([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], TOOLS)
    completion = tokenizer.encode(
        '<tool_call>\n{"name": "search", "arguments": {"query": "author of Silent Harbor"}}\n</tool_call><|im_end|>'
    )
    assert len(completion) == 9
    (call,) = renderer.parse(completion, prompt).tool_calls
    assert call.name == "search"
    assert (json.loads(call.arguments) if isinstance(call.arguments, str) else call.arguments) == {
        "query": "author of Silent Harbor"
    }


def test_a_whole_conversation_is_short(tokenizer: Any) -> None:
    for messages in build_conversations(1, 200, 1, is_faulty=True):
        assert len(tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False)) < 400


def test_one_seed_builds_one_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_starter(tmp_path / name, read_worlds=1, right_worlds=1, faulty_worlds=1, questions=16)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert a == b
