"""Passages, and the two ways of finding them: by words (BM25, from the bm25s library) or by meaning (a transformers
encoder).

build_index(passages, folder)                     folder/passages.jsonl, folder/bm25/
build_index(passages, folder, encoder="NAME")     folder/passages.jsonl, folder/dense.json, folder/dense.npy
open_retriever(folder).search("author of Silent Harbor", 2)  ->  [Passage, Passage]
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import bm25s
import numpy as np

__all__ = ["PASSAGES", "Bm25Retriever", "DenseRetriever", "Passage", "Retriever", "build_index", "open_retriever"]

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it logs each index it builds

PASSAGES = 2
"""How many passages a search shows."""


@dataclass(frozen=True, slots=True)
class Passage:
    title: str
    text: str


class Retriever(Protocol):
    def search(self, query: str, count: int) -> list[Passage]:
        """The `count` best passages, best first; fewer where fewer match."""
        ...


class Bm25Retriever:
    """Okapi BM25 over title and text; passages without any word of the query are never found."""

    def __init__(self, passages: Sequence[Passage], index: bm25s.BM25 | None = None) -> None:
        self.passages = list(passages)
        self.index = index or _index_words(self.passages)

    def search(self, query: str, count: int) -> list[Passage]:
        words = [word for word in _words([query])[0] if word in self.index.vocab_dict]
        if not words:
            return []
        scores = self.index.get_scores(words)
        found = np.flatnonzero(scores > 0)
        best = found[np.argsort(-scores[found], kind="stable")[:count]]
        return [self.passages[number] for number in best]


class DenseRetriever:
    """Cosine similarity of embeddings: the encoder's last hidden states, averaged over tokens."""

    def __init__(self, passages: Sequence[Passage], encoder: str, embeddings: np.ndarray | None = None) -> None:
        """`encoder` is a folder or hub name; `embeddings[passage]` have length 1 and are computed where they are not
        given."""
        from transformers import AutoModel, AutoTokenizer

        self.passages = list(passages)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(encoder)
        self.model: Any = AutoModel.from_pretrained(encoder).eval()
        self.embeddings = (
            self.embed([f"{one.title}: {one.text}" for one in self.passages]) if embeddings is None else embeddings
        )

    def search(self, query: str, count: int) -> list[Passage]:
        scores = self.embeddings @ self.embed([query])[0]
        return [self.passages[number] for number in np.argsort(-scores, kind="stable")[:count]]

    def embed(self, texts: Sequence[str], batch: int = 64) -> np.ndarray:
        """`embeddings[text]`, float32, each of length 1."""
        import torch

        rows: list[np.ndarray] = []
        for start in range(0, len(texts), batch):
            tokens = self.tokenizer(
                list(texts[start : start + batch]), padding=True, truncation=True, return_tensors="pt"
            )
            with torch.no_grad():
                hidden = self.model(**tokens).last_hidden_state  # [text][token][feature]
            mask = tokens["attention_mask"].unsqueeze(-1)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            rows.append(torch.nn.functional.normalize(mean, dim=-1).numpy())
        return np.concatenate(rows).astype(np.float32)


def build_index(passages: Iterable[Passage], folder: str | Path, encoder: str | None = None) -> None:
    """Write what `open_retriever` reads. With `encoder` (a folder or hub name) the index is dense, else BM25."""
    passages = list(passages)
    if not passages:
        raise ValueError(f"there are no passages to index in {str(folder)!r}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "passages.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(passage)) + "\n" for passage in passages)
    if encoder is None:
        _index_words(passages).save(str(folder / "bm25"), show_progress=False)
        return
    np.save(folder / "dense.npy", DenseRetriever(passages, encoder).embeddings)
    (folder / "dense.json").write_text(json.dumps({"encoder": encoder}), encoding="utf-8")


@functools.cache
def open_retriever(folder: str) -> Retriever:
    """The retriever over an index; a process opens each index once. Raises `FileNotFoundError` where there is none."""
    path = Path(folder)
    if not (path / "passages.jsonl").is_file():
        raise FileNotFoundError(f"no index in {folder!r}; build_index(passages, {folder!r}) makes one")
    with (path / "passages.jsonl").open(encoding="utf-8") as file:
        passages = [Passage(**json.loads(line)) for line in file]
    if (path / "dense.json").is_file():
        encoder = json.loads((path / "dense.json").read_text(encoding="utf-8"))["encoder"]
        return DenseRetriever(passages, encoder, np.load(path / "dense.npy"))
    return Bm25Retriever(passages, bm25s.BM25.load(str(path / "bm25"), show_progress=False))


def _index_words(passages: Sequence[Passage]) -> bm25s.BM25:
    index = bm25s.BM25()
    index.index(_words([f"{one.title} {one.text}" for one in passages]), show_progress=False)
    return index


def _words(texts: list[str]) -> list[list[str]]:
    words: list[list[str]] = bm25s.tokenize(texts, return_ids=False, show_progress=False)
    return words
