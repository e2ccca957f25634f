"""The generated corpus and its questions: split by name, the same every time, telling; and MuSiQue's own format."""

import json
import random
from pathlib import Path

import corpus
import data
import pytest
from musique import FILES, musique_train_tasks, musique_validation_tasks
from retriever import PASSAGES, open_retriever


def names(split: str) -> set[str]:
    return {name for fact in data.build_worlds()[split].facts for name in (fact.subject, fact.object)}


def test_no_name_of_validation_occurs_in_training_or_in_the_starters_worlds() -> None:
    assert {corpus.split_of(name) for name in names("train")} == {"train"}
    assert {corpus.split_of(name) for name in names("validation")} == {"validation"}


def test_no_name_of_the_test_set_occurs_in_any_other_split(cache: Path) -> None:
    assert not names("test") & (names("train") | names("validation"))
    assert "starter" not in {corpus.split_of(name) for name in names("test")}
    tasks = list(data.test_tasks(cache))
    assert len({task["input"]["question"] for task in tasks}) == len({task["id"] for task in tasks}) == 320
    assert {task["metadata"]["hops"] for task in tasks} == {2, 3}
    retriever = open_retriever(tasks[0]["input"]["index"])
    for question in data.build_splits()["test"]:
        for hop in question.hops:
            assert hop.passage in retriever.search(hop.query, PASSAGES)


def test_names_of_all_splits_are_made_of_the_same_words() -> None:
    words = {word for name in names("train") for word in name.split()}
    assert {word for name in names("validation") for word in name.split()} <= words


def test_there_are_160_validation_tasks_of_two_and_three_hops(cache: Path) -> None:
    tasks = list(data.validation_tasks(cache))
    assert len(tasks) == 160
    assert {task["metadata"]["hops"] for task in tasks} == {2, 3}
    assert len({task["id"] for task in tasks}) == len({task["input"]["question"] for task in tasks}) == 160


def test_the_right_searches_lead_to_the_answer_and_the_question_alone_does_not(cache: Path) -> None:
    task = next(data.validation_tasks(cache))
    retriever = open_retriever(task["input"]["index"])
    found = 0
    for question in data.build_splits()["validation"]:
        for hop in question.hops:
            assert hop.passage in retriever.search(hop.query, PASSAGES)
        found += question.hops[-1].passage in retriever.search(question.text, PASSAGES)
    assert found < 16


def test_passages_of_other_names_stand_before_the_right_one_sometimes(cache: Path) -> None:
    retriever = open_retriever(next(data.train_tasks(cache))["input"]["index"])
    hops = [hop for question in data.build_splits()["validation"] for hop in question.hops]
    first = sum(retriever.search(hop.query, 1) == [hop.passage] for hop in hops) / len(hops)
    assert 0.5 < first < 0.95


def test_no_two_names_of_a_question_share_a_word() -> None:
    for question in data.build_splits()["train"]:
        said = [question.hops[0].subject, *(hop.object for hop in question.hops)]
        words = " ".join(said).split()
        assert len(words) == len(set(words))


def test_one_seed_gives_one_data_set() -> None:
    before = data.build_splits()
    data.build_worlds.cache_clear()
    data.build_splits.cache_clear()
    assert data.build_splits() == before


def test_a_world_larger_than_its_names_is_refused() -> None:
    with pytest.raises(ValueError, match=r"split 'validation' has 1.. names for 'person', not 9999"):
        corpus.build_world("validation", {"person": 9999}, random.Random(0))


def record(identity: str, **changes: object) -> dict[str, object]:
    """One line as in musique_ans_v1.0_train.jsonl."""
    paragraphs = [
        {
            "idx": 0,
            "title": "Silent Harbor",
            "paragraph_text": "Silent Harbor is a novel by Mara Holt.",
            "is_supporting": True,
        },
        {"idx": 1, "title": "Mara Holt", "paragraph_text": "Mara Holt was born in Port Alder.", "is_supporting": True},
        {"idx": 2, "title": "Cold Harbor", "paragraph_text": "Cold Harbor is a film.", "is_supporting": False},
    ]
    decomposition = [
        {"id": 1, "question": "Silent Harbor >> author", "answer": "Mara Holt", "paragraph_support_idx": 0},
        {"id": 2, "question": "#1 >> place of birth", "answer": "Port Alder", "paragraph_support_idx": 1},
    ]
    whole = {
        "id": identity,
        "paragraphs": paragraphs,
        "question": "Where was the author of Silent Harbor born?",
        "question_decomposition": decomposition,
        "answer": "Port Alder",
        "answer_aliases": ["Alder"],
        "answerable": True,
    }
    return {**whole, **changes}


def write(folder: Path, train: list[dict[str, object]], dev: list[dict[str, object]]) -> None:
    for name, records in (("train", train), ("dev", dev)):
        (folder / FILES[name]).write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def test_musiques_questions_are_tasks_over_all_its_paragraphs(tmp_path: Path) -> None:
    other = [{"idx": 0, "title": "Basil Falk", "paragraph_text": "Basil Falk is a pilot.", "is_supporting": True}]
    write(
        tmp_path, [record("2hop__1_2"), record("2hop__3_4", answerable=False)], [record("2hop__5_6", paragraphs=other)]
    )
    (task,) = musique_train_tasks(tmp_path, cache=tmp_path / "cache")
    assert (task["id"], task["answer"], task["metadata"]) == ("musique/2hop__1_2", ["Port Alder", "Alder"], {"hops": 2})
    (held_out,) = musique_validation_tasks(tmp_path, cache=tmp_path / "cache")
    assert held_out["input"]["index"] == task["input"]["index"]
    retriever = open_retriever(task["input"]["index"])
    assert [passage.title for passage in retriever.search("where was Mara Holt born", 1)] == ["Mara Holt"]
    assert [passage.title for passage in retriever.search("pilot", 2)] == ["Basil Falk"]


def test_a_musique_folder_that_is_not_whole_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file '.*musique_ans_v1\.0_train\.jsonl'; give the folder"):
        next(musique_train_tasks(tmp_path))
    without = {key: value for key, value in record("2hop__1_2").items() if key != "answer"}
    write(tmp_path, [without], [])
    with pytest.raises(ValueError, match=r"musique_ans_v1\.0_train\.jsonl, line 1: no 'answer'"):
        next(musique_train_tasks(tmp_path))
