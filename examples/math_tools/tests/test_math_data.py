"""Problems, their splits, Calc-X's own records."""

import json
from pathlib import Path

import data
import pytest
from calc_x import calc_x_train_tasks, calc_x_validation_tasks, gadget_calls
from data import SHARES, TASKS, build_problems, development_tasks, split_structures, train_tasks, validation_tasks
from problems import KINDS
from reward import is_match

CALC_X = Path(__file__).with_name("calc_x.jsonl")


def test_no_structure_occurs_in_two_splits() -> None:
    structures = split_structures()
    seen = [structure for by_depth in structures.values() for depth in by_depth.values() for structure in depth]
    assert len(seen) == len(set(seen)) > 300
    assert all(structures[split][depth] for split in SHARES for depth in (2, 3))


def test_tasks_are_of_their_splits_structures_only() -> None:
    loaders = {
        "train": train_tasks,
        "development": development_tasks,
        "validation": validation_tasks,
        "test": data.test_tasks,
    }
    for split, tasks in loaders.items():
        allowed = {", ".join(structure) for depth in split_structures()[split].values() for structure in depth}
        listed = list(tasks())
        assert len(listed) == len({task["input"] for task in listed}) == TASKS[split]
        assert {task["metadata"]["structure"] for task in listed} <= allowed
        assert {task["metadata"]["depth"] for task in listed} == {2, 3}


def test_answers_are_whole_numbers_of_a_fair_size() -> None:
    for task in train_tasks():
        assert 1 <= int(task["answer"]) <= 99, task


def test_every_step_says_its_number_in_the_text() -> None:
    for problem in build_problems("starter", 300, 1):
        for step in problem.steps:
            assert (step.left if step.right == "x" else step.right) in problem.text
            assert step.sign == KINDS[step.kind].sign


def test_a_problem_is_what_its_sentences_say() -> None:
    first = next(problem for problem in build_problems("starter", 3000, 1) if problem.structure == ("missing", "share"))
    assert first.text.count(" brings what is missing.") == first.text.count(" shared equally by ") == 1
    goal, factor = int(first.steps[0].left), int(first.steps[1].right)
    assert int(first.answer) == (goal - int(first.start)) // factor


def test_the_same_seed_gives_the_same_tasks() -> None:
    assert list(validation_tasks()) == list(validation_tasks())


def test_records_of_calc_x_become_tasks() -> None:
    tasks = list(calc_x_train_tasks(CALC_X))
    assert tasks[0] == {
        "id": "gsm8k__a1",
        "input": "A baker sells 48 rolls on Monday and half as many on Tuesday. How many rolls are sold in both days?",
        "answer": "72",
        "metadata": {"depth": 2, "source": "calc_x.jsonl"},
    }
    assert [task["answer"] for task in tasks[1:]] == ["2/3", "1_250", "C"]


def test_the_calculator_agrees_with_the_outputs_of_calc_xs_own() -> None:
    from calculator import calculator

    records = [json.loads(line) for line in CALC_X.read_text(encoding="utf-8").splitlines()]
    pairs = [pair for record in records for pair in gadget_calls(record["chain"])]
    assert len(pairs) == 6
    assert all(is_match(output, calculator(expression)) for expression, output in pairs)


def test_a_folder_of_calc_x_is_read_by_split(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    lines = CALC_X.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "data" / "train.jsonl").write_text("".join(lines[:3]), encoding="utf-8")
    (tmp_path / "data" / "validation.jsonl").write_text(lines[3], encoding="utf-8")
    assert len(list(calc_x_train_tasks(tmp_path))) == 3
    assert [task["answer"] for task in calc_x_validation_tasks(tmp_path)] == ["C"]


@pytest.mark.parametrize("form", ["parquet", "folder"])
def test_parquet_and_folders_of_the_datasets_package_are_read(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([json.loads(line) for line in CALC_X.read_text(encoding="utf-8").splitlines()])
    if form == "parquet":
        data.to_parquet(tmp_path / "train-00000-of-00001.parquet")
    else:
        data.save_to_disk(tmp_path / "train")
    assert [task["answer"] for task in calc_x_train_tasks(tmp_path)] == ["72", "2/3", "1_250", "C"]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file of the split 'train'"):
        list(calc_x_train_tasks(tmp_path))
    (tmp_path / "train.jsonl").write_text('{"id": "1", "text": "?"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="lacks a question or a result; its fields are id, text"):
        list(calc_x_train_tasks(tmp_path))
