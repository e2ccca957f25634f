"""Tasks from files and data sets: what a recipe names, what `eval --tasks` names, and what is refused with its line."""

from __future__ import annotations

import datetime
import decimal
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow
import pytest
from pyarrow import parquet

from lightningrl.errors import ConfigError
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import PolicyConfig, RewardConfig, TasksConfig
from lightningrl.types import Task
from lightningrl_client.recipe_file import load_recipe
from lightningrl_training.evaluation.examination import Examination
from lightningrl_training.task_files import FORMATS, task_source
from lightningrl_training.tasks import TaskSets

GSM = [{"question": "1 + 1", "answer": "2", "level": 3}, {"question": "2 + 1", "answer": "3", "level": 4}]
RIGHT = (
    Task(id="train-0", input="1 + 1", answer="2", metadata={"level": 3}),
    Task(id="train-1", input="2 + 1", answer="3", metadata={"level": 4}),
)


def load(folder: Path, train: Any, **tasks: Any) -> tuple[Task, ...]:
    recipe = Recipe(
        agent="agent.py:answer",
        tasks=TasksConfig(train=train, **tasks),
        policy=PolicyConfig(model="m"),
        rewards={"right": RewardConfig(use="exact")},
    ).model_copy(update={"folder": folder})
    return TaskSets.load(recipe, lambda reference: task_source(reference, folder)).train


def refused(folder: Path, train: Any, **tasks: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, train, **tasks)
    return str(caught.value)


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text(lines(*GSM))
    (tmp_path / "data.json").write_text(json.dumps(GSM))
    pd.DataFrame(GSM).to_parquet(tmp_path / "data.parquet")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text(lines(*GSM))
    datasets.DatasetDict(train=datasets.Dataset.from_list(GSM)).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "loader.py").write_text(f"def load(): return {GSM!r}\n")
    return tmp_path


@pytest.mark.parametrize("train", ["data.jsonl", "data.json", "data.parquet", "hf:hub:train", "hf:saved:train"])
def test_a_file_beside_the_recipe_is_a_source_of_tasks(folder: Path, train: str) -> None:
    assert load(folder, train) == RIGHT
    path = folder / train
    assert load(folder / "elsewhere", str(path)) == RIGHT if path.is_file() else True


def test_a_split_of_a_data_set_may_be_a_part_of_it(folder: Path) -> None:
    assert [task.input for task in load(folder, "hf:hub:train[1:]")] == ["2 + 1"]


def test_cells_of_a_table_that_json_lacks_are_text_or_none(tmp_path: Path) -> None:
    day, price = datetime.date(2026, 1, 2), decimal.Decimal("1.50")
    rows = {
        "input": ["a", "b"],
        "day": [day, None],
        "price": [price, None],
        "score": [0.5, float("nan")],
        "deep": [{"at": [day]}, None],
    }
    parquet.write_table(pyarrow.table(rows), tmp_path / "d.parquet")
    datasets.Dataset.from_dict(rows, split="train").save_to_disk(str(tmp_path / "saved"))
    first = {"day": "2026-01-02", "price": "1.50", "score": 0.5, "deep": {"at": ["2026-01-02"]}}
    for train in ("d.parquet", "hf:saved:train"):
        assert [task.metadata for task in load(tmp_path, train)] == [
            first,
            {"day": None, "price": None, "score": None, "deep": None},
        ]


def test_a_source_may_be_named_by_a_path_and_a_data_frame_is_told_how_it_gives_rows(folder: Path) -> None:
    assert load(folder, Path("data.jsonl")) == RIGHT
    tasks = TasksConfig(train=Path("data.jsonl"))
    assert json.loads(tasks.model_dump_json())["train"] == "data.jsonl"
    lines_of = f"pd.read_json({str(folder / 'data.jsonl')!r}, lines=True)"
    (folder / "frame.py").write_text(f"import pandas as pd\ndef load(): return {lines_of}\n")
    assert refused(folder, "frame.py:load") == (
        "tasks.train 'frame.py:load' returned DataFrame; return an iterable of Task or of dicts with its fields, of a data frame: "
        "frame.to_dict('records')"
    )
    assert refused(folder, "loader.py:load").endswith("or name the columns: tasks.input, tasks.answer")
    assert load(folder, "loader.py:load", input="question") == RIGHT


def test_cells_of_a_csv_are_text_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_bytes(
        '\ufeffprompt, answer,note\r\n"1,5 + 1",007,\r\n"two\nlines",2.50,"a ""b"""\r\n'.encode()
    )
    assert load(tmp_path, "data.csv") == (
        Task(id="train-0", input="1,5 + 1", answer="007", metadata={"note": ""}),
        Task(id="train-1", input="two\nlines", answer="2.50", metadata={"note": 'a "b"'}),
    )


def test_the_line_by_which_excel_names_the_comma_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("sep=,\nquestion,answer\na,b\n")
    assert [row.value for row in task_source("d.csv", tmp_path)()] == [{"question": "a", "answer": "b"}]


def test_a_cell_of_a_csv_may_be_a_whole_document(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text(f"prompt\n{'a' * 200_000}\n")
    assert len(load(tmp_path, "data.csv")[0].input) == 200_000


def test_columns_are_named_by_the_recipe_and_all_others_are_metadata(tmp_path: Path) -> None:
    rows = [
        {"nr": 1.0, "text": "a", "input": "not this", "label": [1, {"b": None}], "metadata": {"x": 1}},
        {"nr": 2, "text": "b", "label": 0},
    ]
    (tmp_path / "d.jsonl").write_text(lines(*rows))
    (tmp_path / "loader.py").write_text(f"def load(): return {rows!r}\n".replace("null", "None"))
    right = (
        Task(id="1", input="a", answer=[1, {"b": None}], metadata={"input": "not this", "x": 1}),
        Task(id="2", input="b", answer=0),
    )
    assert load(tmp_path, "d.jsonl", input="text", answer="label", id="nr") == right
    assert load(tmp_path, "loader.py:load", input="text", answer="label", id="nr") == right


def test_rows_of_text_are_inputs_and_tables_may_be_inputs_too(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(lines("a", {"input": {"q": 1, "db": "x"}, "id": 7}, {"input": ["m"]}))
    assert [(task.id, task.input) for task in load(tmp_path, "d.jsonl")] == [
        ("train-0", "a"),
        ("7", {"q": 1, "db": "x"}),
        ("train-2", ["m"]),
    ]


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "a.jsonl",
            '{"input": "1"}\n\n{"input": ',
            "tasks.train: line 3 of '{path}' is no JSON (Expecting value); {formats}",
        ),
        ("a.jsonl", "[" * 100_000, "tasks.train: line 1 of '{path}' is nested too deeply; give something flatter"),
        (
            "a.jsonl",
            b'{"input": "1"}\n{"input": "\xff"}',
            "tasks.train: line 2 of '{path}' is no text in UTF-8; save the file as UTF-8",
        ),
        (
            "a.jsonl",
            lines({"input": "1"}, 5),
            "{what}: line 2 is an int; give a Task, a dict with its fields, or a text",
        ),
        ("a.jsonl", lines({"input": "1"}, {"inptu": "2"}), "{what}: line 2 has no 'input'; it has: 'inptu'"),
        (
            "a.jsonl",
            lines({"input": "1"}, {"input": None}),
            "{what}: line 2 has nothing in 'input', its input; leave the row out",
        ),
        (
            "a.jsonl",
            lines({"problem": "1", "solution": "2"}),
            "{what}: line 1 has no 'input', 'question', 'prompt'; it has: 'problem', 'solution'; say which is the input: tasks.input",
        ),
        (
            "a.jsonl",
            '{"input": "1", "answer": NaN}',
            "{what}: line 1 (id 'train-0'): answer is nan, which JSON has no number for; give None, or a number",
        ),
        (
            "a.jsonl",
            lines({"input": "1", "x": 1, "metadata": {"x": 2}}),
            "{what}: line 1 has 'x' twice, as a column and in its metadata; rename one",
        ),
        (
            "a.jsonl",
            lines({"input": "1", "id": 4}, {"input": "1", "id": "4"}),
            "{what}: two tasks have the id '4'; ids must differ",
        ),
        (
            "a.jsonl",
            '{"input": "1"}\n{"input": "1", "answer": {"x": 1, "x": 2}}',
            "tasks.train: line 2 of '{path}' names 'x' twice in one object; rename one",
        ),
        (
            "a.json",
            '[{"input": "1", "input": "2"}]',
            "tasks.train: '{path}' names 'input' twice in one object; rename one",
        ),
        (
            "a.jsonl",
            f'{{"input": {"9" * 5000}}}',
            "tasks.train: line 1 of '{path}' has a number that Python does not read (",
        ),
        (
            "a.csv",
            "input;answer\n1,5;2\n",
            "tasks.train: line 1 of '{path}' parts its names by ';'; save the file with commas between the",
        ),
        (
            "a.csv",
            'input\n"a\u2028b\nc"\n1,2\n',
            "tasks.train: line 4 of '{path}' has 2 cells, but the first line names 1;",
        ),
        ("a.jsonl", "\n", "{what} returned no tasks; check its path and filters"),
        ("a.json", '{"tasks": []}', "tasks.train: '{path}' holds a dict, not a list of tasks; {formats}"),
        ("a.json", '[{"input": "1"},\n', "tasks.train: line 2 of '{path}' is no JSON (Expecting value); {formats}"),
        (
            "a.csv",
            "input,answer\n1,2\n1,5,2\n",
            "tasks.train: line 3 of '{path}' has 3 cells, but the first line names 2; a comma within a cell stands in quotes",
        ),
        ("a.csv", 'input\n"a\n', "tasks.train: line 2 of '{path}' is no CSV (unexpected end of data)"),
        ("a.csv", "input,input\n1,2\n", "tasks.train: line 1 of '{path}' names 'input' twice; rename one"),
        ("a.parquet", b"PAR1\x80\xff", "tasks.train: '{path}' is no Parquet file that can be read ("),
        ("a.jsonl", None, "tasks.train: '{path}' is not there; {formats}"),
        ("a.xlsx", "", "'a.xlsx' cannot be read as tasks; {formats}"),
        ("data", None, "'data' cannot be read as tasks; {formats}"),
    ],
)
def test_what_is_no_task_is_refused_by_file_and_line(
    tmp_path: Path, name: str, content: str | bytes | None, sentence: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = refused(tmp_path, name)
    assert said.startswith(sentence.format(path=path, formats=FORMATS, what=f"tasks.train {name!r}"))


def test_a_column_that_is_not_there_is_named_with_those_that_are(folder: Path) -> None:
    assert refused(folder, "data.jsonl", input="problem").endswith(
        "line 1 has no 'problem'; it has: 'question', 'answer', 'level'"
    )
    assert refused(folder, "data.jsonl", answer="solution").endswith(
        "line 1 has no 'solution'; it has: 'question', 'answer', 'level'"
    )
    assert "tasks.train 'data.jsonl' has no setting 'path'" in refused(folder, "data.jsonl", options={"path": "x"})


def test_what_reads_a_table_is_named_where_it_is_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused(folder, "data.parquet").endswith("is read by pyarrow, which is not installed: pip install pyarrow")
    assert (
        refused(folder, "hf:hub:train")
        == "tasks.train: 'hf:hub:train' is read by datasets, which is not installed: pip install datasets"
    )


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    yield


@pytest.mark.usefixtures("offline")
def test_a_data_set_that_cannot_be_reached_is_named_with_the_line_that_fetches_it(folder: Path) -> None:
    assert refused(folder, "hf:openai/gsm8k:main:train") == (
        "tasks.train: 'hf:openai/gsm8k:main:train' cannot be read: the hub does not answer (Name or service not known); check its "
        "name; or fetch it where there is a network (`hf download --repo-type dataset openai/gsm8k --local-dir data`), "
        "and write hf:data:train"
    )
    assert "names no data set and split; write hf:NAME:SPLIT, for example hf:openai/gsm8k:main:train" in refused(
        folder, "hf:gsm8k"
    )
    assert "there is no split 'test'; there are: 'train'" in refused(folder, "hf:saved:test")
    assert "Unknown split \"test\". Should be one of ['train'].; check configuration and split" in refused(
        folder, "hf:hub:test"
    )


def test_evaluation_reads_the_same_files_with_the_recipes_columns_from_here_or_beside_the_recipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (folder / "recipe.toml").write_text(
        'agent = "a.py:b"\n[tasks]\ntrain = "data.jsonl"\nvalidation = "data.csv"\ninput = "level"\n'
        '[policy]\nmodel = "m"\n[rewards.r]\nuse = "exact"\n'
    )
    recipe = load_recipe(folder / "recipe.toml")
    chosen = Examination(tasks="data.parquet").choose(recipe, None)  # type: ignore[arg-type]
    assert sorted((task.id, task.input) for task in chosen) == [("eval-0", 3), ("eval-1", 4)]
    here = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(here)
    (here / "mine.jsonl").write_text(lines({"level": 9}))
    assert [task.input for task in Examination(tasks="mine.jsonl").choose(recipe, None)] == [9]  # type: ignore[arg-type]


def test_a_column_arrives_as_what_its_type_says(tmp_path: Path) -> None:
    numbers = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    inner = pyarrow.struct([("city", pyarrow.string()), ("zip", pyarrow.int64()), ("more", numbers)])
    columns = {
        "question": ["a", "b"],
        "answer": pyarrow.array([[("k", 1), ("l", None)], []], numbers),
        "deep": pyarrow.array([{"city": "Ulm", "more": [("m", 2)]}, {"zip": 7}], inner),
        "list": pyarrow.array([[[("k", 1)]], []], pyarrow.list_(numbers)),
        "short": pyarrow.array([0.1, 72.0], pyarrow.float32()),
        "json": pyarrow.array(['{"a": [1]}', "null"], pyarrow.json_()),
        "days": pyarrow.array([[(datetime.date(2026, 1, 2), 1)], []], pyarrow.map_(pyarrow.date32(), pyarrow.int8())),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "d.parquet")
    first, second = [row.value for row in task_source("d.parquet", tmp_path)()]
    assert first["answer"] == {"k": 1, "l": None}
    assert second["answer"] == {}
    assert first["deep"] == {"city": "Ulm", "more": {"m": 2}}
    assert second["deep"] == {"zip": 7}
    assert first["list"] == [{"k": 1}]
    assert (first["short"], second["short"]) == (0.1, 72.0)
    assert (first["json"], second["json"]) == ({"a": [1]}, None)
    assert first["days"] == {"2026-01-02": 1}


def test_a_map_that_names_a_key_twice_is_refused_by_row(tmp_path: Path) -> None:
    pairs = pyarrow.array([[("k", 1), ("k", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    parquet.write_table(pyarrow.table({"question": ["a"], "answer": pairs}), tmp_path / "d.parquet")
    with pytest.raises(ConfigError, match=r"row 1 of .* names 'k' twice in one map; rename one"):
        list(task_source("d.parquet", tmp_path)())


def test_class_labels_are_their_names_in_a_data_set_and_in_its_parquet(tmp_path: Path) -> None:
    label = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features(
        {"question": datasets.Value("string"), "answer": label, "all": [label], "deep": {"label": label}}
    )
    rows = {"question": ["a", "b"], "answer": [1, -1], "all": [[0, 1], []], "deep": [{"label": 0}, {"label": 1}]}
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    made.to_parquet(str(tmp_path / "d.parquet"))
    for source in ("hf:saved:train", "d.parquet"):
        first, second = [row.value for row in task_source(source, tmp_path)()]
        assert first == {"question": "a", "answer": "good", "all": ["bad", "good"], "deep": {"label": "bad"}}
        assert (second["answer"], second["deep"]) == (None, {"label": "good"})


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.jsonl", '{"question": "grüß"}\n'),
        ("d.json", '[{"question": "grüß"}]'),
        ("d.csv", "question\r\ngrüß\r\n"),
    ],
)
def test_a_byte_order_mark_is_read_in_each_kind_of_text(tmp_path: Path, encoding: str, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding=encoding)
    assert [row.value for row in task_source(name, tmp_path)()] == [{"question": "grüß"}]


def test_a_file_in_another_encoding_is_told_what_to_save_it_as(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_bytes("question\ngrüß\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"line 2 of .* is no text in UTF-8; save the file as UTF-8"):
        list(task_source("d.csv", tmp_path)())
