"""Reads tasks from files and data sets, row by row: `tasks.train = "data.jsonl"`, and `eval --tasks`.

"data.jsonl"              a JSON object in each line          "data.csv"       a first line of names, then rows of text
"data.json"               a list of objects                   "data.parquet"   a table
"hf:NAME:SPLIT"           a data set of Hugging Face's, or a folder; "hf:NAME:CONFIGURATION:SPLIT"
"file.py:name"            a function that returns them

Columns   which of a row's columns is input, answer, id; the rest is metadata
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightningrl.errors import ConfigError
from lightningrl.loading import is_reference, resolve
from lightningrl.sanitize import DoubledKeyError, decode_text, unique_keys

__all__ = ["FORMATS", "Columns", "Row", "read_text", "task_source"]

FORMATS: Final = (
    "tasks are a .jsonl file, one a line, a .json file with a list of them, a .csv or .parquet file with one in each "
    "row, a data set, hf:NAME:SPLIT, or a loader, file.py:name"
)
INPUTS: Final = ("input", "question", "prompt")
"""Columns that are the input where the recipe names none; the first that there is."""
HF: Final = "hf:"
HF_FORM: Final = re.compile(
    r"hf:(?P<name>[^:]+)(:(?P<configuration>[^:\[\]]+))?:(?P<split>[^:\[\]]+(\[[^\]]*\])?(\+.+)?)"
)
SHOWN: Final = 12
"""Columns in a sentence."""
LONGEST_ERROR: Final = 300
HUB_WAIT_S: Final = 5.0
"""Seconds that the hub may take to say whether it has a data set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a file."""

    place: str
    """`line 7`, `row 7`: counted from 1."""
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Names of the columns that become a task's fields; None = the usual ones."""

    input: str | None = None
    answer: str | None = None
    id: str | None = None

    @property
    def are_named(self) -> bool:
        return (self.input, self.answer, self.id) != (None, None, None)

    def of(self, row: Mapping[str, Any], input_name: str) -> dict[str, Any]:
        """A task's fields; what is left of the row is metadata. Raises ValueError for a column that is not there."""
        names = {"input": input_name}
        rest = {name: value for name, value in row.items() if name != input_name}
        if self.answer or "answer" in rest:
            names["answer"] = self.answer or "answer"
        if self.id or "id" in rest:
            names["id"] = self.id or "id"
        for name in names.values():
            if name not in row:
                raise ValueError(f"has no {name!r}; it has: {_names(row)}")
            rest.pop(name, None)
        fields = {field: row[name] for field, name in names.items()}
        if fields["input"] is None:
            raise ValueError(f"has nothing in {input_name!r}, its input; leave the row out")
        own = rest.pop("metadata") if isinstance(rest.get("metadata"), Mapping) else {}
        if both := sorted(rest.keys() & own.keys()):
            raise ValueError(f"has {both[0]!r} twice, as a column and in its metadata; rename one")
        return {**fields, "metadata": {**rest, **own}}

    def input_of(self, row: Mapping[str, Any]) -> str:
        """The input's column in rows such as this. Raises ValueError where none of the usual is there."""
        column = self.input or next((name for name in INPUTS if name in row), None)
        if column is None:
            usual = ", ".join(map(repr, INPUTS))
            raise ValueError(f'has no {usual}; it has: {_names(row)}; say which is the input: tasks.input = "…"')
        return column


def task_source(reference: Any, folder: Path) -> Callable[..., Iterable[Any]]:
    """Tasks of a reference, relative to `folder`: the user's function, or a file's rows. Raises ConfigError."""
    if not isinstance(reference, str):
        return resolve(reference, folder)
    if reference.startswith(HF):
        return lambda: _read_data_set(reference, folder)
    suffix = Path(reference).suffix.lower()
    if suffix in _READERS:
        return lambda: _READERS[suffix](_existing(folder / reference))
    if not is_reference(reference):
        raise ConfigError(f"{reference!r} cannot be read as tasks; {FORMATS}")
    return resolve(reference, folder)


def _names(row: Mapping[str, Any]) -> str:
    names = [repr(name) for name in row]
    return ", ".join(names[:SHOWN]) + (" …" if len(names) > SHOWN else "") or "nothing"


def _existing(path: Path) -> Path:
    if not path.is_file():
        what = "a folder" if path.is_dir() else "not there"
        raise ConfigError(f"{str(path)!r} is {what}; {FORMATS}")
    return path


def read_text(path: Path) -> str:
    """Text of a file in UTF-8, or in UTF-16 where a byte order mark says so. Raises ConfigError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read ({error.strerror})") from error
    try:
        return decode_text(data)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        kind = 16 if "16" in error.encoding else 8
        raise ConfigError(f"line {line} of {str(path)!r} is no text in UTF-{kind}; save the file as UTF-8") from error


def _parse(text: str, path: Path, first_line: int = 1) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ConfigError(f"line {line} of {str(path)!r} is no JSON ({error.msg}); {FORMATS}") from error
    except DoubledKeyError as error:
        where = f"line {first_line} of {str(path)!r}" if path.suffix.lower() == ".jsonl" else repr(str(path))
        raise ConfigError(f"{where} names {error.args[0]!r} twice in one object; rename one") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise ConfigError(
            f"line {first_line} of {str(path)!r} has a number that Python does not read ({error}); give text"
        ) from error
    except RecursionError:
        raise ConfigError(f"line {first_line} of {str(path)!r} is nested too deeply; give something flatter") from None


def _read_jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            yield Row(place=f"line {number}", value=_parse(line, path, number))


def _read_json(path: Path) -> Iterator[Row]:
    items = _parse(read_text(path), path)
    if not isinstance(items, list):
        raise ConfigError(f"{str(path)!r} holds a {type(items).__name__}, not a list of tasks; {FORMATS}")
    for number, value in enumerate(items, start=1):
        yield Row(place=f"item {number}", value=value)


def _read_csv(path: Path) -> Iterator[Row]:
    """Cells are text, as they stand in the file; an empty one is an empty text."""
    text = read_text(path)
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # 131,072 characters a cell, unless more is asked for
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        names = [name.strip() for name in next(lines, [])]
        if names == ["sep=", ""]:  # Excel's, of a comma
            names = [name.strip() for name in next(lines, [])]
        if len(names) == 1 and (other := re.search("[;\t|]", names[0])):
            raise ConfigError(
                f"line 1 of {str(path)!r} parts its names by {other[0]!r}; save the file with commas between the cells"
            )
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"line 1 of {str(path)!r} names {doubled[0]!r} twice; rename one")
        for cells in lines:
            if not cells:
                continue
            if len(cells) != len(names):
                raise ConfigError(
                    f"line {lines.line_num} of {str(path)!r} has {len(cells)} cells, but the first line names "
                    f"{len(names)}; "
                    'a comma within a cell stands in quotes: "1,5"'
                )
            yield Row(place=f"line {lines.line_num}", value=dict(zip(names, cells, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"line {lines.line_num} of {str(path)!r} is no CSV ({error})") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(f"{str(path)!r} is read by pyarrow, which is not installed: pip install pyarrow") from error
    try:
        table = parquet.read_table(path)
        rows = table.to_pylist()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{str(path)!r} is no Parquet file that can be read ({_short(error)})") from error
    yield from _of_table(rows, table.schema, str(path))


_READERS: Final[Mapping[str, Callable[[Path], Iterator[Row]]]] = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


def _read_data_set(reference: str, folder: Path) -> Iterator[Row]:
    parts = HF_FORM.fullmatch(reference)
    if parts is None:
        raise ConfigError(
            f"{reference!r} names no data set and split; write hf:NAME:SPLIT, for example hf:openai/gsm8k:main:train"
        )
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"{reference!r} is read by datasets, which is not installed: pip install datasets") from error
    name, configuration, split = parts["name"], parts["configuration"], parts["split"]
    local = (folder / name).resolve()
    try:
        if any((local / written).is_file() for written in ("dataset_dict.json", "state.json")):
            rows = _saved(datasets.load_from_disk(str(local)), split)
        elif local.is_dir():
            rows = datasets.load_dataset(str(local), configuration, split=split)
        else:
            _check_reach(name)
            rows = datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # whatever its HTTP library and its readers raise
        fetch = (
            f"fetch it where there is a network (`hf download --repo-type dataset {name} --local-dir data`), and write "
            f"hf:data:{split}"
        )
        remedy = "check configuration and split" if local.is_dir() else f"check its name; or {fetch}"
        raise ConfigError(f"{reference!r} cannot be read: {_short(error)}; {remedy}") from error
    yield from _of_table(rows, rows.features.arrow_schema, reference)


def _of_table(rows: Iterable[Mapping[str, Any]], schema: Any, name: str) -> Iterator[Row]:
    """Rows whose values are what their columns' types say; class labels are named beside the schema."""
    try:
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        features = {}
    kinds = {field.name: (field.type, features.get(field.name)) for field in schema}
    for number, row in enumerate(rows, start=1):
        try:
            value = {column: _of_cell(cell, *kinds.get(column, (None, None))) for column, cell in row.items()}
        except DoubledKeyError as error:
            raise ConfigError(
                f"row {number} of {name!r} names {error.args[0]!r} twice in one map; rename one"
            ) from None
        yield Row(place=f"row {number}", value=value)


def _of_cell(value: Any, kind: Any, feature: Any) -> Any:
    """A table's value as a file of text has it: maps and structs as objects, without the names that a struct lacks in
    this row; class labels by name; JSON as its value; dates and decimals as text; NaN, pandas' missing value, as
    None."""
    of = feature if isinstance(feature, Mapping) else {}
    if of.get("_type") == "ClassLabel" and isinstance(value, int) and of.get("names"):
        return of["names"][value] if 0 <= value < len(of["names"]) else None
    if isinstance(value, Mapping):
        inside = {field.name: field.type for field in kind} if hasattr(kind, "get_all_field_indices") else {}
        return {key: _of_cell(inner, inside.get(key), of.get(key)) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and hasattr(kind, "item_type"):  # a map, as pyarrow gives it
        return unique_keys(
            [(str(_of_cell(key, None, None)), _of_cell(inner, kind.item_type, None)) for key, inner in value]
        )
    if isinstance(value, list):
        inner_feature = feature[0] if isinstance(feature, list) and feature else of.get("feature")
        return [_of_cell(inner, getattr(kind, "value_type", None), inner_feature) for inner in value]
    if isinstance(value, str) and (of.get("_type") == "Json" or str(kind).startswith("extension<arrow.json")):
        return json.loads(value, object_pairs_hook=unique_keys)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if not isinstance(value, float) or math.isnan(value):
        return None if isinstance(value, float) else value
    short = {"float": np.float32, "halffloat": np.float16}.get(str(kind))
    return value if short is None else float(str(short(value)))  # 0.1, not 0.10000000149011612


def _saved(saved: Any, split: str) -> Any:
    """Pick a split of what `save_to_disk` wrote. Raises ValueError."""
    splits = saved if isinstance(saved, Mapping) else {str(saved.split or "train"): saved}
    if split not in splits:
        raise ValueError(f"there is no split {split!r}; there are: {', '.join(map(repr, splits))}")
    return splits[split]


def _check_reach(name: str) -> None:
    """Raise where the hub does not answer and the cache lacks the name: `datasets` would try for half a minute."""
    from datasets import config
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if config.HF_HUB_OFFLINE or (Path(config.HF_DATASETS_CACHE) / name.replace("/", "___").lower()).is_dir():
        return
    try:
        HfApi().dataset_info(name, timeout=HUB_WAIT_S)
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConnectionError(f"the hub has no such data set for you ({_short(error)})") from error
    except Exception as error:  # whatever its HTTP library raises where there is no network
        raise ConnectionError(f"the hub does not answer ({_short(error)})") from error


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}…"
