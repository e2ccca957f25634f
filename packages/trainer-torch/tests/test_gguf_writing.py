"""Transformers folders become GGUF files that llama.cpp answers with as our engine does, or that are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import FAMILIES, save_family, smollm2_file
from llama_cpp import running
from sizes import sized
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightningrl.errors import ConfigError
from lightningrl_torch.gguf.format import GgufFormat


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    model = save_family(family, tmp_path / "folder")
    GgufFormat().write(tmp_path / "folder", tmp_path / "model.gguf", "f32")
    prompt = [5, 9, 200, 31, 77, 12, 130, 8]
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    with running(tmp_path / "model.gguf") as server:
        theirs = server.logprobs(prompt)
    assert {token: pytest.approx(float(logprobs[token]), abs=2e-3) for token in theirs} == theirs


@pytest.mark.parametrize("precision", ["f32", "f16", "bf16", "q8_0"])
def test_each_precision_is_read_by_llama_cpp(precision: str, tmp_path: Path) -> None:
    model = save_family("llama", tmp_path / "folder")
    GgufFormat().write(tmp_path / "folder", tmp_path / "model.gguf", precision)
    prompt = [5, 9, 200, 31, 77]
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    with running(tmp_path / "model.gguf") as server:
        theirs = server.logprobs(prompt, most=3)
    assert max(abs(float(logprobs[token]) - value) for token, value in theirs.items()) < 0.3


@pytest.mark.long
def test_a_changed_smollm2_answers_in_llama_cpp_as_it_does_here(tmp_path: Path) -> None:
    # in, a step that changes all weights, out as f32, llama.cpp's greedy answers
    folder, file = tmp_path / "in", tmp_path / "out.gguf"
    folder.mkdir()
    GgufFormat().read(smollm2_file(), folder, lambda share: None)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-4)
    model.save_pretrained(folder)
    GgufFormat().write(folder, file, "f32")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"What is {first} plus {second}?"}], add_generation_prompt=True
        )["input_ids"]
        for first, second in [(number * 7 % 90 + 3, number * 13 % 70 + 5) for number in range(sized(4, 50))]
    ]
    same = 0
    with running(file) as server:
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                answer = model.generate(ids, max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(ids))
            mine = [token for token in answer[0, len(prompt) :].tolist() if token not in (0, 2)]
            theirs = [token for token in server.greedy(prompt, 16) if token not in (0, 2)]
            same += mine == theirs
    assert same == len(prompts)


# ------------------------------------------------------------------ refused before weights are read


def test_a_kind_of_model_that_is_not_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="a model of type 'bloom' is not written as GGUF; these are: llama, "):
        GgufFormat().write(tmp_path, None, "f16")


def test_a_precision_that_is_not_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is written as f32, f16, bf16, q8_0, not as 'q4_k'"):
        GgufFormat().write(tmp_path, None, "q4_k")


def test_a_tokenizer_beyond_the_embeddings_is_refused(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 290}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"has a tokenizer of \d+ tokens, but 290 embeddings"):
        GgufFormat().write(tmp_path, None, "f16")


def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused(policy: str) -> None:
    with pytest.raises(ConfigError, match=r"a tokenizer that llama\.cpp has no name for"):
        GgufFormat().write(Path(policy), None, "f16")
