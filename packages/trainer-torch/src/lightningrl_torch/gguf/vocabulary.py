"""The vocabulary of a fast tokenizer as a GGUF file keeps it: tokens, their types, merges or scores, and how texts are
cut."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gguf import GGUFWriter, TokenType
from tokenizers import Tokenizer

from lightningrl.errors import ConfigError
from lightningrl_torch.gguf.pre_tokenizers import IGNORES_MERGES, name_of
from lightningrl_torch.gguf.tokenizer import ENDS

__all__ = ["Vocabulary", "read_vocabulary"]

_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")
_BLANK: Final = "▁"


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


def _kind_of(data: Mapping[str, Any], tokenizer: Tokenizer, folder: Path) -> tuple[str, str]:
    model = data["model"]
    if (
        model["type"] == "BPE"
        and model.get("byte_fallback")
        and _BLANK in json.dumps([data.get("normalizer"), data.get("pre_tokenizer")], ensure_ascii=False)
    ):
        return "llama", "default"
    pre = name_of(tokenizer) if model["type"] == "BPE" else None
    if pre is None or data.get("normalizer") not in (None, {"type": "NFC"}):
        raise ConfigError(
            f"model folder {str(folder)!r} has a tokenizer that llama.cpp has no name for ({model['type']}, an own way "
            "to cut texts), so that no GGUF file would give its tokens; serve the transformers folder (vLLM reads it)"
        )
    if bool(model.get("ignore_merges")) != (pre in IGNORES_MERGES) and pre in ("llama-bpe", "tekken"):
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
