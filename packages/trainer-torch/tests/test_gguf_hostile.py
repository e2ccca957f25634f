"""GGUF files of somebody who means harm, or that were damaged: each is read, or refused with one sentence, and what
their heads promise is not built."""

from __future__ import annotations

import random
import resource
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from gguf_models import save_family

from lightningrl.errors import ConfigError
from lightningrl_torch.gguf.format import GgufFormat
from lightningrl_torch.gguf.header import read_header

HOSTILE: list[Any] = [
    0,
    -1,
    -32,
    1,
    10**5,
    4 * 10**9,
    2**63 - 1,
    float("inf"),
    float("nan"),
    "text",
    [],
    [0],
    [[["a"]]],
]
KEYS = (
    *("general.architecture", "general.alignment", "general.type", "split.count", "tokenizer.chat_template"),
    *(f"llama.{name}" for name in ("block_count", "context_length", "embedding_length", "feed_forward_length")),
    *(f"llama.attention.{name}" for name in ("head_count", "head_count_kv", "layer_norm_rms_epsilon", "key_length")),
    *(f"llama.{name}" for name in ("rope.freq_base", "rope.dimension_count", "expert_count", "vocab_size")),
    *("llama.rope.scaling.type", "llama.rope.scaling.factor"),
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "merges", "scores")),
    *(f"tokenizer.ggml.{name}" for name in ("bos_token_id", "eos_token_id", "padding_token_id", "add_bos_token")),
)


def encode(value: Any) -> bytes:
    """A value of metadata, with its type before it."""
    if isinstance(value, list):
        kind = encode(value[0])[:4] if value else struct.pack("<I", 5)
        return (
            struct.pack("<I", 9) + kind + struct.pack("<Q", len(value)) + b"".join(encode(item)[4:] for item in value)
        )
    if isinstance(value, str):
        return struct.pack("<IQ", 8, len(value.encode())) + value.encode()
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    return struct.pack("<IB", 7, value) if isinstance(value, bool) else struct.pack("<Iq", 11, value)


def write(path: Path, source: Path, changes: dict[str, Any], types: int | None = None) -> Path:
    """A copy of a file with other values in its head, and its first tensor of another type."""
    header, data = read_header(source), source.read_bytes()
    metadata = {**header.metadata, **changes}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(header.tensors), len(metadata))
    head += b"".join(struct.pack("<Q", len(key)) + key.encode() + encode(value) for key, value in metadata.items())
    first = min(tensor.start for tensor in header.tensors.values())
    for number, tensor in enumerate(header.tensors.values()):
        kind = types if types is not None and number == 0 else int(tensor.type)
        head += struct.pack("<Q", len(tensor.name)) + tensor.name.encode() + struct.pack("<I", len(tensor.shape))
        head += struct.pack(f"<{len(tensor.shape)}QIQ", *reversed(tensor.shape), kind, tensor.start - first)
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data[first:])
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    save_family("llama", folder)
    GgufFormat().write(folder, folder / "model.gguf", "f32")
    return folder / "model.gguf"


def outcome(file: Path, folder: Path) -> str:
    """What becomes of a file: `read`, or the sentence. Any other error fails the test."""
    folder.mkdir(exist_ok=True)
    try:
        GgufFormat().describe(file)
        GgufFormat().read(file, folder, lambda share: None)
    except ConfigError as error:
        assert "\n" not in str(error), error
        return str(error)
    return "read"


def test_a_head_that_is_copied_unchanged_is_read(sound: Path, tmp_path: Path) -> None:
    assert outcome(write(tmp_path / "model.gguf", sound, {}), tmp_path / "read") == "read"


def test_hostile_heads_are_read_or_refused_with_a_sentence_and_build_nothing(sound: Path, tmp_path: Path) -> None:
    chance = random.Random(11)
    outcome(write(tmp_path / "warm.gguf", sound, {}), tmp_path / "read")  # imports
    memory, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    cases = [(key, value) for key in KEYS for value in HOSTILE]
    ends = {}
    for key, value in chance.sample(cases, 140):
        ends[key, str(value)] = outcome(write(tmp_path / "model.gguf", sound, {key: value}), tmp_path / "read")
    data = sound.read_bytes()
    for number in range(60):
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(12_000)] = chance.randrange(256)
        (tmp_path / "model.gguf").write_bytes(changed)
        ends["bytes", str(number)] = outcome(tmp_path / "model.gguf", tmp_path / "read")
    assert len(ends) == 200
    assert sum(end == "read" for end in ends.values()) < 100
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300_000
    assert time.process_time() - began < 120


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"llama.block_count": 10**5}, "block_count, 100000, is more than the 2 layers that it has tensors of"),
        ({"llama.block_count": "2"}, "block_count, 2, is not a number that a model can have"),
        ({"llama.attention.head_count": 0}, "attention.head_count, 0, is not a number that a model can have"),
        ({"llama.embedding_length": 10**8}, "embedding_length, 100000000, does not fit its embeddings"),
        ({"llama.context_length": "long"}, "context_length, long, is not a number"),
        ({"general.alignment": 0}, "aligns its tensors to 0 bytes, which is no power of two"),
        ({"general.alignment": -32}, "aligns its tensors to -32 bytes"),
        ({"general.alignment": 48}, "aligns its tensors to 48 bytes"),
        ({"general.alignment": [32]}, r"aligns its tensors to \[32\] bytes"),
        ({"general.alignment": float("inf")}, "aligns its tensors to inf bytes"),
        ({"split.count": [2]}, r"is one of \[2\] parts"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "1000000 for its bos_token_id, which is none of its"),
        ({"tokenizer.chat_template": ["a"]}, r"\['a'\] for its tokenizer.chat_template, which must be a text"),
        ({"tokenizer.chat_template": 7}, "7 for its tokenizer.chat_template, which must be a text"),
        ({"tokenizer.ggml.tokens": [["a"], ["b"]]}, "has tokenizer.ggml.tokens that do not fit"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1] * 3}, "the token 'a' twice"),
    ],
)
def test_a_head_that_the_file_does_not_bear_out_is_refused_by_name(
    sound: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    file = write(tmp_path / "model.gguf", sound, changes)
    with pytest.raises(ConfigError, match=problem):
        GgufFormat().describe(file)


def test_weights_of_a_type_that_nobody_reads_are_refused(sound: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", sound, {}, types=24)
    assert "I8" in outcome(file, tmp_path / "read")


def test_tensors_that_lie_over_each_other_make_no_large_model_of_a_small_file(tmp_path: Path) -> None:
    def text(word: str) -> bytes:
        return struct.pack("<Q", len(word)) + word.encode()

    head = (
        b"GGUF" + struct.pack("<IQQ", 3, 100, 1) + text("general.architecture") + struct.pack("<I", 8) + text("llama")
    )
    for number in range(100):
        head += text(f"blk.{number}.w") + struct.pack("<IQQIQ", 2, 64, 64, 0, 0)
    file = tmp_path / "model.gguf"
    file.write_bytes(head + b"\0" * (-len(head) % 32 + 64 * 64 * 4))
    with pytest.raises(ConfigError, match="is damaged: its head cannot be read"):
        read_header(file)
