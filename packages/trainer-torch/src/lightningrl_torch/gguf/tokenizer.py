"""The tokenizer of a GGUF file, made anew from its vocabulary: a fast tokenizer with the ids that llama.cpp gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from lightningrl.errors import ConfigError
from lightningrl_torch.gguf.header import GgufHeader
from lightningrl_torch.gguf.pre_tokenizers import IGNORES_MERGES, STARTS_WITH_BOS, is_known, make_pre_tokenizer

__all__ = [
    "ADDED",
    "ENDS",
    "check_tokenizer",
    "make_tokenizer",
    "special_tokens",
    "starts_with_bos",
    "stop_token_ids",
    "token_id",
]

CONTROL, USER_DEFINED = 3, 4
"""Token types of llama.cpp: special tokens, and texts that are always one token."""
ADDED: Final = frozenset({CONTROL, USER_DEFINED})
KINDS: Final = ("gpt2", "llama")
"""`tokenizer.ggml.model`: byte-level BPE, and SentencePiece's BPE."""
ENDS: Final = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    ]
)
"""Control tokens at which llama.cpp ends an answer, whatever the file names as its end."""
_LISTS: Final[dict[str, Any]] = {"tokens": str, "scores": (int, float), "token_type": int, "merges": str}
_IDS: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def check_tokenizer(header: GgufHeader) -> None:
    """Raise ConfigError for a vocabulary that cannot be read as the model was trained with it."""
    metadata, file = header.metadata, str(header.file)
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ConfigError(f"model file {file!r} has no vocabulary; give a file that llama.cpp's converter made")
    if kind not in KINDS:
        raise ConfigError(
            f"model file {file!r} has a tokenizer of kind {kind!r}; {' and '.join(map(repr, KINDS))} are read: take "
            "the model's transformers folder"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if kind == "gpt2" and pre is None:
        raise ConfigError(
            f"model file {file!r} does not say how its tokenizer cuts texts (tokenizer.ggml.pre), as files of early "
            "2024 do not; convert the model again, or take its transformers folder"
        )
    if kind == "gpt2" and not is_known(str(pre)):
        raise ConfigError(
            f"model file {file!r} cuts texts by pre-tokenizer {pre!r}, which is unknown here; take the model's "
            "transformers folder"
        )
    if kind == "gpt2" and not metadata.get("tokenizer.ggml.merges"):
        raise ConfigError(f"model file {file!r} has a byte-level vocabulary without merges; convert the model again")
    for key, kinds in _LISTS.items():
        values = metadata.get(f"tokenizer.ggml.{key}")
        is_list = isinstance(values, list) and all(isinstance(value, kinds) for value in values)
        if values is not None and (not is_list or (key != "merges" and len(values) != len(tokens))):
            raise ConfigError(
                f"model file {file!r} has tokenizer.ggml.{key} that do not fit its {len(tokens)} tokens; convert it "
                "again"
            )
    for key in ("bos", "eos", "unknown"):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and token_id(header, key) is None:
            raise ConfigError(
                f"model file {file!r} has {str(number)[:40]} for its {key}_token_id, which is none of its "
                f"{len(tokens)} tokens; convert it again"
            )
    if len(set(tokens)) != len(tokens):
        twice = next(token for token, count in Counter(tokens).items() if count > 1)
        raise ConfigError(f"model file {file!r} has the token {twice!r} twice in its vocabulary; convert it again")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] != len(tokens):
        raise ConfigError(
            f"model file {file!r} has {len(tokens)} tokens in its vocabulary, but embeddings of {embedding.shape[0]}; "
            "one of them was cut: convert the model again"
        )


def make_tokenizer(header: GgufHeader) -> Tokenizer:
    """The file's tokenizer. Raises ConfigError where its merges do not fit its tokens."""
    metadata = header.metadata
    tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(metadata["tokenizer.ggml.tokens"])]
    try:
        made = (
            _byte_level(metadata, tokens)
            if metadata["tokenizer.ggml.model"] == "gpt2"
            else _sentencepiece(metadata, tokens)
        )
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(
            f"model file {str(header.file)!r} has a vocabulary that does not hold together "
            f"({' '.join(str(error).split())[:200]}); convert it again"
        ) from error
    types = metadata.get("tokenizer.ggml.token_type") or ()
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in ADDED
    ]
    made.add_tokens(added)
    if made.get_vocab_size() != len(tokens):
        raise ConfigError(
            f"model file {str(header.file)!r} has a vocabulary that becomes {made.get_vocab_size()} tokens in place of "
            f"{len(tokens)}; take the model's transformers folder"
        )
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and starts_with_bos(header):
        made.post_processor = TemplateProcessing(
            single=f"{_escaped(tokens[bos])} $A",
            pair=f"{_escaped(tokens[bos])} $A {_escaped(tokens[bos])}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
    return made


def _escaped(token: str) -> str:
    return token.replace(" ", "▁")


def _byte_level(metadata: dict[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = metadata["tokenizer.ggml.pre"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in IGNORES_MERGES))
    made.pre_tokenizer = make_pre_tokenizer(pre)
    made.decoder = decoders.ByteLevel()
    return made


def _pair(merge: str) -> tuple[str, str]:
    """The halves of a merge; a byte-level token has no blank, and one that begins with it is of another kind."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _sentencepiece(metadata: dict[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Blanks are `▁`, but in tokens that a text is cut at before (user-defined ones); what is no token is its bytes;
    two neighbours are merged if together they are a token, the best score first."""
    scores = metadata.get("tokenizer.ggml.scores") or [-number for number in range(len(tokens))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = []
    for token, number in vocabulary.items():
        if types[number] in (CONTROL, 6):  # 6 = a byte
            continue
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[number], pair) for pair in pairs]
    merges.sort(key=lambda scored: scored[0], reverse=True)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    made = Tokenizer(
        BPE(
            vocabulary,
            [pair for _, pair in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_text: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        to_text.append(decoders.Strip(" ", 1, 0))
    else:
        made.normalizer = normalizers.Replace(" ", "▁")
    made.decoder = decoders.Sequence(to_text)
    return made


def starts_with_bos(header: GgufHeader) -> bool:
    """True where a plain text begins with the BOS token."""
    metadata = header.metadata
    usual = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in STARTS_WITH_BOS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", usual))


def special_tokens(header: GgufHeader) -> dict[str, str]:
    """Texts of the special tokens by transformers' names; those that the file does not name are absent."""
    metadata = header.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: token_id(header, key) for name, key in _IDS.items()}
    return {name: tokens[token] for name, token in ids.items() if token is not None}


def token_id(header: GgufHeader, key: str) -> int | None:
    """The id of `bos`, `eos`, `padding` …; None where the file names none, or one that is no token."""
    token = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return token if type(token) is int and 0 <= token < len(header.metadata["tokenizer.ggml.tokens"]) else None


def stop_token_ids(header: GgufHeader) -> list[int]:
    """Tokens at which llama.cpp ends an answer: those that the file names, and control tokens whose text says so."""
    metadata = header.metadata
    named = [token_id(header, key) for key in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type") or ()
    ends = [
        number
        for number, (token, kind) in enumerate(zip(metadata["tokenizer.ggml.tokens"], types, strict=False))
        if kind == CONTROL and token in ENDS
    ]
    return list(dict.fromkeys([*(token for token in named if token is not None), *ends]))
