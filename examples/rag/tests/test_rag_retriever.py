"""Both retrievers over the same passages; the dense one with a tiny encoder of random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from retriever import DenseRetriever, Passage, build_index, open_retriever

PASSAGES = [
    Passage("Mara Holt", "The birthplace of this painter is Port Alder."),
    Passage("Mara Velden", "The birthplace of this singer is Alder Falls."),
    Passage("Silent Harbor", "The author of this novel is Mara Holt."),
]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT of 16 features over the words of the passages."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = sorted({word for one in PASSAGES for word in f"{one.title} : {one.text}".replace(".", " .").split()})
    core = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}, unk_token="[UNK]")
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("encoder")
    build: Any = PreTrainedTokenizerFast
    build(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32).save_pretrained(folder)
    torch.manual_seed(0)
    size: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    BertModel(BertConfig(vocab_size=len(words) + 2, max_position_embeddings=32, **size)).save_pretrained(folder)
    return str(folder)


def test_words_find_the_passage_about_both_name_and_relation(tmp_path: Path) -> None:
    build_index(PASSAGES, tmp_path)
    retriever = open_retriever(str(tmp_path))
    assert retriever.search("birthplace of Mara Holt", 2) == PASSAGES[:2]
    assert retriever.search("author of Silent Harbor", 1) == [PASSAGES[2]]


def test_passages_without_a_word_of_the_query_are_not_found(tmp_path: Path) -> None:
    build_index(PASSAGES, tmp_path)
    retriever = open_retriever(str(tmp_path))
    assert retriever.search("author", 2) == [PASSAGES[2]]
    for query in ("", "of the", "nobody knows", "\U0001f600"):
        assert retriever.search(query, 2) == []


def test_a_dense_index_finds_by_the_encoders_cosine(tmp_path: Path, encoder: str) -> None:
    build_index(PASSAGES, tmp_path, encoder)
    retriever = open_retriever(str(tmp_path))
    assert isinstance(retriever, DenseRetriever)
    assert np.linalg.norm(retriever.embeddings, axis=1) == pytest.approx(1.0)
    for passage in PASSAGES:
        assert retriever.search(f"{passage.title}: {passage.text}", 1) == [passage]


def test_padding_does_not_change_an_embedding(encoder: str) -> None:
    retriever = DenseRetriever(PASSAGES, encoder)
    alone = retriever.embed(["Mara Holt"])
    beside = retriever.embed(["Mara Holt", "The birthplace of this painter is Port Alder."])
    assert beside[0] == pytest.approx(alone[0], abs=1e-5)


def test_an_index_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no index in '.*'; build_index\(passages"):
        open_retriever(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="there are no passages to index"):
        build_index([], tmp_path)
