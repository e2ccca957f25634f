"""The starter policy: an ordinary transformers folder, a lossless tokenizer, demonstrations in the agent's own
words."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import data
from demonstrations import build_demonstrations
from prompts import write_prompt
from starter import build_starter
from transformers import AutoModelForCausalLM, AutoTokenizer

STARTER = Path(__file__).resolve().parent.parent / "starter"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STARTER)


def test_the_folder_loads_and_is_small() -> None:
    model = AutoModelForCausalLM.from_pretrained(STARTER)
    assert 500_000 < model.num_parameters() < 3_000_000
    assert sum(path.stat().st_size for path in STARTER.iterdir()) < 10_000_000


def test_every_text_round_trips(tokenizer: Any, cache: Path) -> None:
    texts = [write_prompt(task["input"]["schema"], task["input"]["question"]) for task in data.validation_tasks(cache)]
    texts += [item.messages[-1]["content"] for item in build_demonstrations(3, 8, 1, set())]
    texts += ["Grüße  \t\n 'don't' 12345 3.14 日本語 \U0001f600 <b>", ""]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_validation_prompts_are_known_words(tokenizer: Any, cache: Path) -> None:
    for task in data.validation_tasks(cache):
        ids = tokenizer.encode(write_prompt(task["input"]["schema"], task["input"]["question"]))
        assert len(ids) <= 100


def test_the_template_renders_the_form_of_the_cold_start(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_markup_is_one_token_each(tokenizer: Any) -> None:
    for markup in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"):
        assert len(tokenizer.encode(markup)) == 1


def test_one_seed_builds_one_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_starter(tmp_path / name, right_databases=2, faulty_databases=1)
    a, b = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert a == b


def test_the_template_is_what_the_qwen3_renderer_renders(tokenizer: Any) -> None:
    qwen3 = pytest.importorskip("renderers.qwen3").Qwen3Renderer(tokenizer)
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    ]
    for conversation, given in ((messages[:2], None), (messages, tools)):
        rendered = tokenizer.apply_chat_template(
            conversation, tools=given, add_generation_prompt=True, return_dict=False
        )
        assert qwen3.render_ids(conversation, tools=given, add_generation_prompt=True) == rendered
