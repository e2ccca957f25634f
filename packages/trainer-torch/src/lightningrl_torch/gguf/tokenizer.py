"""The tokenizer of a GGUF file: made anew from the file's vocabulary, with the ids that llama.cpp gives, and written as
one: tokens, their types, merges or scores, and how texts are cut.

A GGUF file has no tokenizer.json: `tokenizer.ggml.pre` alone says how a byte-level vocabulary cuts a text before it
merges its bytes. The names and what they mean are those of llama.cpp's `llama-vocab.cpp`; the expressions are those of
the models' own tokenizer.json.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.processors import TemplateProcessing

from lightningrl.errors import ConfigError
from lightningrl_torch.gguf.header import GgufHeader

__all__ = [
    "ADDED",
    "Vocabulary",
    "check_tokenizer",
    "make_tokenizer",
    "read_vocabulary",
    "special_tokens",
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
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")
_BLANK: Final = "▁"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_LETTERS_OF_DEEPSEEK = (
    (
        r"\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
        r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
        r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
        r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
        r"\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
        r"\u1ff2-\u1ff4"
        r"\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
        r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
        r"\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
        r"\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
        r"\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+"
    )
    .encode("ascii")
    .decode("unicode_escape")
)
"""Letters that have a case, as DeepSeek's first tokenizers list them."""


def _cased(short_forms: str, digits: str) -> str:
    """Words that end where lower case turns to upper, as in o200k and tekken."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{short_forms}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{short_forms}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
    )


_FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (rf"{_SHORT_FORMS}|{_WORDS}|\p{{N}}{{1,3}}|{_MARKS}|{_END}",),
    "qwen2": (rf"{_SHORT_FORMS}|{_WORDS}|\p{{N}}|{_MARKS}|{_END}",),
    "qwen35": (
        rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_END}",
    ),
    "gpt-4o": (_cased(f"{_SHORT_FORMS}?", r"\p{N}{1,3}"),),
    "tekken": (_cased("", r"\p{N}"),),
    "deepseek-llm": (
        r"[\r\n]",
        _LETTERS_OF_DEEPSEEK,
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        r"[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        rf"{_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}",
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    "bloom": (r" ?[^(\s|.,!?…。，、।۔،)]+",),
    "viking": (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "seed-coder": (rf"{_SHORT_FORMS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}",),
}
"""Expressions that cut one after the other, by the first name that has them."""
_ALIKE: Final[dict[str, str]] = {
    "gpt-2": "phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2 bailingmoe"
    " bailingmoe2 llada-moe",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "bloom": "poro-chat gpt3-finnish",
}
"""Other names of the same."""
_FAMILY_OF: Final = {name: name for name in _FAMILIES} | {
    name: family for family, names in _ALIKE.items() for name in names.split()
}
_IGNORES_MERGES: Final = frozenset(
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split()  # noqa: SIM905
)
"""Names whose vocabularies take a piece that is a token whole, whatever the merges are."""
_STARTS_WITH_BOS: Final = _IGNORES_MERGES
"""Names whose texts begin with the BOS token where the file does not say."""
_PROBE: Final = (
    "Hello world! I'm HERE, you'Ll see: don't 1234567 x12 3.14\n\n  two  spaces \t tab\r\nnext/line//\n"
    "camelCaseWORDS naïve Ünïcode ÉCOLE 東京の天気は晴れ 안녕하세요 Привет мир नमस्ते cafe\u0301 ١٢٣ ½ ² Ⅷ "
    "👩‍💻🎉 <tag> $5+=^~|`\n"
    "a_b(c)[d]{e} 'quoted' \"x\" .word #hash @at (paren …。，、 \u00a0nbsp \u3000wide   end  "
)
"""Text that every two of the families cut differently."""


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
    if kind == "gpt2" and str(pre) not in _FAMILY_OF:
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
    if bos is not None and _starts_with_bos(header):
        made.post_processor = TemplateProcessing(
            single=f"{_escaped(tokens[bos])} $A",
            pair=f"{_escaped(tokens[bos])} $A {_escaped(tokens[bos])}:1 $B:1",
            special_tokens=[(tokens[bos], bos)],
        )
    return made


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Everything of a tokenizer that goes into a file."""

    kind: str
    """`gpt2` = byte-level BPE, `llama` = SentencePiece's BPE."""
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    """Merges of a byte-level vocabulary, the first made first."""
    scores: tuple[float, ...] = ()
    """Scores of SentencePiece's tokens: the highest is merged first."""
    starts_with_blank: bool = False
    starts_with_bos: bool = False
    special: Mapping[str, int]
    """Ids by llama.cpp's name: `bos`, `eos`, `unknown`, `padding`."""
    stops: tuple[int, ...]
    """Tokens at which an answer ends."""
    template: str | None

    def add_to(self, writer: GGUFWriter) -> None:
        """Write it all as metadata."""
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.kind == "gpt2":
            writer.add_token_merges(self.merges)
        else:
            writer.add_token_scores(self.scores)
        writer.add_add_space_prefix(self.starts_with_blank)
        writer.add_add_bos_token(self.starts_with_bos)
        for name, token in self.special.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        for name, token in zip(("eos", "eot", "eom"), self.named_stops, strict=False):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        if self.template is not None:
            writer.add_chat_template(self.template)

    @property
    def named_stops(self) -> list[int]:
        """Ends that llama.cpp must be told of, those that it knows by their text last."""
        texts = {token for token in self.stops if self.tokens[token] in ENDS and self.types[token] == TokenType.CONTROL}
        return [self.stops[0], *sorted(self.stops[1:], key=lambda token: token in texts)] if self.stops else []


def read_vocabulary(folder: Path, rows: int) -> Vocabulary:
    """The vocabulary of a transformers folder whose model has embeddings of `rows` tokens. Raises ConfigError for a
    tokenizer that llama.cpp has no name for."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"model folder {str(folder)!r} has no tokenizer.json, of which a GGUF file's vocabulary would be made"
        )
    tokenizer = Tokenizer.from_file(str(path))
    data = json.loads(path.read_text(encoding="utf-8"))
    kind, pre = _kind_of(data, tokenizer, folder)
    ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if max(ids.values()) >= rows:
        raise ConfigError(
            f"model folder {str(folder)!r} has a tokenizer of {max(ids.values()) + 1} tokens, but {rows} embeddings; "
            "save both with save_pretrained after resize_token_embeddings"
        )
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [int(TokenType.UNUSED)] * rows
    for token, number in ids.items():
        tokens[number] = token
        types[number] = TokenType.BYTE if kind == "llama" and _BYTE.fullmatch(token) else TokenType.NORMAL
    for added in data.get("added_tokens", ()):
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        if kind == "llama" and not added["special"]:  # llama.cpp finds them in the text as it was written
            tokens[added["id"]] = tokens[added["id"]].replace(_BLANK, " ")
    unknown = data["model"].get("unk_token")
    if unknown in ids and kind == "llama":
        types[ids[unknown]] = TokenType.UNKNOWN
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in data["model"]["merges"]]
    special = _special_ids(folder, ids)
    return Vocabulary(
        kind=kind,
        pre=pre,
        tokens=tuple(tokens),
        types=tuple(int(number) for number in types),
        merges=tuple(" ".join(merge) for merge in merges) if kind == "gpt2" else (),
        scores=_scores(merges, tokens, folder) if kind == "llama" else (),
        starts_with_blank=_starts_with_blank(data, folder) if kind == "llama" else False,
        starts_with_bos=special.get("bos") in tokenizer.encode("a").ids[:1],
        special={name: token for name, token in special.items() if name != "eos"},
        stops=_stops(folder, special),
        template=_template(folder),
    )


def _escaped(token: str) -> str:
    return token.replace(" ", "▁")


def _byte_level(metadata: dict[str, Any], tokens: Sequence[str]) -> Tokenizer:
    pre = metadata["tokenizer.ggml.pre"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in _IGNORES_MERGES))
    made.pre_tokenizer = _make_pre_tokenizer(pre)
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


def _starts_with_bos(header: GgufHeader) -> bool:
    """True where a plain text begins with the BOS token."""
    metadata = header.metadata
    usual = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in _STARTS_WITH_BOS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", usual))


def _make_pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that name. Raises KeyError."""
    cuts = _FAMILIES[_FAMILY_OF[name]]
    uses_gpt2 = cuts[-1] == _GPT2  # ByteLevel's own expression
    return pre_tokenizers.Sequence(
        [
            *(Split(Regex(cut), "isolated") for cut in (cuts[:-1] if uses_gpt2 else cuts)),
            ByteLevel(add_prefix_space=False, use_regex=uses_gpt2),
        ]
    )


@cache
def _cut_by(family: str) -> tuple[Any, ...]:
    return _cut(_make_pre_tokenizer(family))


def _cut(pre_tokenizer: PreTokenizer) -> tuple[Any, ...]:
    return tuple(place for _, place in pre_tokenizer.pre_tokenize_str(_PROBE))


def _name_of(tokenizer: Tokenizer) -> str | None:
    """llama.cpp's name of the way in which a byte-level tokenizer cuts texts; None where it has none that we know.

    It is known by what it does to a text of every sort: one way is written in several forms in tokenizer.json.
    """
    pre_tokenizer = tokenizer.pre_tokenizer
    if pre_tokenizer is None or "ByteLevel" not in str(json.loads(tokenizer.to_str())["pre_tokenizer"]):
        return None
    cut = _cut(pre_tokenizer)
    return next((family for family in _FAMILIES if _cut_by(family) == cut), None)


def _kind_of(data: Mapping[str, Any], tokenizer: Tokenizer, folder: Path) -> tuple[str, str]:
    model = data["model"]
    if (
        model["type"] == "BPE"
        and model.get("byte_fallback")
        and _BLANK in json.dumps([data.get("normalizer"), data.get("pre_tokenizer")], ensure_ascii=False)
    ):
        return "llama", "default"
    pre = _name_of(tokenizer) if model["type"] == "BPE" else None
    if pre is None or data.get("normalizer") not in (None, {"type": "NFC"}):
        raise ConfigError(
            f"model folder {str(folder)!r} has a tokenizer that llama.cpp has no name for ({model['type']}, an own way "
            "to cut texts), so that no GGUF file would give its tokens; serve the transformers folder (vLLM reads it)"
        )
    if bool(model.get("ignore_merges")) != (pre in _IGNORES_MERGES) and pre in ("llama-bpe", "tekken"):
        raise ConfigError(
            f"model folder {str(folder)!r} has a tokenizer that cuts texts as llama.cpp's {pre!r} but merges otherwise "
            "(ignore_merges); serve the transformers folder (vLLM reads it)"
        )
    return "gpt2", pre


def _scores(merges: Sequence[tuple[str, ...]], tokens: Sequence[str], folder: Path) -> tuple[float, ...]:
    """A score for each token, by which llama.cpp merges in the order of the merges. Raises ConfigError where it could
    not: a token that is made of some pairs early and of others late."""
    ranks: dict[str, int] = {}
    last = ""
    for left, right in merges:
        merged = left + right
        if merged != last and merged in ranks:
            raise ConfigError(
                f"model folder {str(folder)!r} has merges that llama.cpp cannot order by token ({merged!r}); serve the "
                "transformers folder (vLLM reads it)"
            )
        ranks.setdefault(merged, len(ranks))
        last = merged
    return tuple(-float(ranks[token]) if token in ranks else -1e6 for token in tokens)


def _starts_with_blank(data: Mapping[str, Any], folder: Path) -> bool:
    """True where each text begins with a blank that nobody wrote."""
    parts = [*_parts(data.get("normalizer"), "normalizers"), *_parts(data.get("pre_tokenizer"), "pretokenizers")]
    schemes = {part.get("prepend_scheme") for part in parts if part["type"] == "Metaspace"}
    if "first" in schemes:
        raise ConfigError(
            f"model folder {str(folder)!r} has a tokenizer that puts a blank before the first word of a text alone, as "
            "llama.cpp does not; serve the transformers folder (vLLM reads it)"
        )
    return "always" in schemes or any(part["type"] == "Prepend" for part in parts)


def _parts(part: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return [inner for each in part[name] for inner in _parts(each, name)] if part["type"] == "Sequence" else [part]


def _special_ids(folder: Path, ids: Mapping[str, int]) -> dict[str, int]:
    settings = _json(folder / "tokenizer_config.json")
    special = {}
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{theirs}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text in ids:
            special[ours] = ids[text]
    return special


def _stops(folder: Path, special: Mapping[str, int]) -> tuple[int, ...]:
    """Ends of an answer, the tokenizer's own first where the model names it, too."""
    named: list[int] = []
    for file in ("generation_config.json", "config.json"):
        ids = _json(folder / file).get("eos_token_id")
        named += [ids] if isinstance(ids, int) else list(ids or ())
    own = special.get("eos")
    first = [own] if own is not None else []
    return tuple(dict.fromkeys([*first, *named]))


def _template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
