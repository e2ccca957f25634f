"""Ways in which byte-level vocabularies cut a text before they merge its bytes, by llama.cpp's name of them.

A GGUF file has no tokenizer.json: `tokenizer.ggml.pre` alone says how texts are cut. The names and what they mean are
those of llama.cpp's `llama-vocab.cpp`; the expressions are those of the models' own tokenizer.json.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final

from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

__all__ = ["IGNORES_MERGES", "STARTS_WITH_BOS", "is_known", "make_pre_tokenizer", "name_of"]

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
IGNORES_MERGES: Final = frozenset(
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split()  # noqa: SIM905
)
"""Names whose vocabularies take a piece that is a token whole, whatever the merges are."""
STARTS_WITH_BOS: Final = IGNORES_MERGES
"""Names whose texts begin with the BOS token where the file does not say."""


def is_known(name: str) -> bool:
    """True where llama.cpp's name of a way to cut texts is one that we know, too."""
    return name in _FAMILY_OF


def make_pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of that name. Raises KeyError."""
    cuts = _FAMILIES[_FAMILY_OF[name]]
    uses_gpt2 = cuts[-1] == _GPT2  # ByteLevel's own expression
    return Sequence(
        [
            *(Split(Regex(cut), "isolated") for cut in (cuts[:-1] if uses_gpt2 else cuts)),
            ByteLevel(add_prefix_space=False, use_regex=uses_gpt2),
        ]
    )


_PROBE: Final = (
    "Hello world! I'm HERE, you'Ll see: don't 1234567 x12 3.14\n\n  two  spaces \t tab\r\nnext/line//\n"
    "camelCaseWORDS naïve Ünïcode ÉCOLE 東京の天気は晴れ 안녕하세요 Привет мир नमस्ते cafe\u0301 ١٢٣ ½ ² Ⅷ "
    "👩‍💻🎉 <tag> $5+=^~|`\n"
    "a_b(c)[d]{e} 'quoted' \"x\" .word #hash @at (paren …。，、 \u00a0nbsp \u3000wide   end  "
)
"""Text that every two of the families cut differently."""


@cache
def _cut_by(family: str) -> tuple[Any, ...]:
    return _cut(make_pre_tokenizer(family))


def _cut(pre_tokenizer: PreTokenizer) -> tuple[Any, ...]:
    return tuple(place for _, place in pre_tokenizer.pre_tokenize_str(_PROBE))


def name_of(tokenizer: Tokenizer) -> str | None:
    """llama.cpp's name of the way in which a byte-level tokenizer cuts texts; None where it has none that we know.

    It is known by what it does to a text of every sort: one way is written in several forms in tokenizer.json.
    """
    pre_tokenizer = tokenizer.pre_tokenizer
    if pre_tokenizer is None or "ByteLevel" not in str(json.loads(tokenizer.to_str())["pre_tokenizer"]):
        return None
    cut = _cut(pre_tokenizer)
    return next((family for family in _FAMILIES if _cut_by(family) == cut), None)
