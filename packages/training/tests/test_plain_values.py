"""Values that come back as what they were, or are refused: where tasks are read, and where an agent's output is
taken."""

from __future__ import annotations

import array
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import pathlib
import subprocess
import sys
import types
import uuid
from collections import Counter, OrderedDict, deque, namedtuple
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lightningrl import wire
from lightningrl.control_api import Result
from lightningrl.errors import ConfigError
from lightningrl.sanitize import DEEPEST, NotPlain, to_plain
from lightningrl.types import Outcome, RolloutSpec, Task
from lightningrl_client.runtime.report import report_output
from lightningrl_training.tasks import read_tasks

Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = "red"


class Name(enum.StrEnum):
    MINE = "mine"


class Rank(enum.IntEnum):
    FIRST = 1


@dataclasses.dataclass
class Record:
    value: int


def read(*items: Any) -> tuple[Task, ...]:
    return read_tasks("train", "data.py:load", {}, lambda _: lambda: items)


BECOME: list[tuple[Any, Any]] = [
    (np.int64(4), 4),
    (np.int64(2**40), 2**40),
    (2**70, 2**70),
    (np.float32(0.5), 0.5),
    (np.float64(0.1), 0.1),
    (np.bool_(True), True),
    (np.str_("text"), "text"),
    (np.array([3, 5, 7]), [3, 5, 7]),
    (np.array([[True, False]]), [[True, False]]),
    (np.array([0.25, 2.5e300]), [0.25, 2.5e300]),
    (np.array(["a", "bc"]), ["a", "bc"]),
    (np.array(4), 4),
    (np.array([{"a": np.int8(1)}, None], dtype=object), [{"a": 1}, None]),
    (np.ma.masked_array([1, 2], mask=[False, True]), [1, None]),
    (pd.Index(["a", "b"]), ["a", "b"]),
    (pd.array([1, 2], dtype="Int64"), [1, 2]),
    (array.array("i", [1, 2]), [1, 2]),
    ((1, (2, 3)), [1, [2, 3]]),
    (Point(1, 2), [1, 2]),
    (OrderedDict(a=1), {"a": 1}),
    (Counter("aab"), {"a": 2, "b": 1}),
    (types.MappingProxyType({"a": (1,)}), {"a": [1]}),
    ({np.str_("a"): np.uint8(1)}, {"a": 1}),
    (Name.MINE, "mine"),
    (Rank.FIRST, 1),
    (True, True),
    (None, None),
    ("\ud83d\ude00", "😀"),
]


@pytest.mark.parametrize(("given", "right"), BECOME, ids=lambda value: repr(value)[:30])
def test_what_a_source_gives_is_what_a_reward_gets(given: Any, right: Any) -> None:
    (task,) = read({"input": {"deep": [given]}, "answer": given, "metadata": {"k": given}})
    back = wire.decode(wire.encode(task), Task)
    for value in (task.answer, back.answer, back.metadata["k"], back.input["deep"][0]):
        assert value == right and type(value) is type(right)
        assert json.dumps(value) == json.dumps(right)  # True is no 1, 4.0 no 4


holder: list[Any] = [1]
holder.append({"again": holder})

REFUSED: list[tuple[Any, str]] = [
    ({1, 2}, "answer is a set, which is not JSON; give a list, which has an order: sorted(value)"),
    ({"a": [frozenset("x")]}, "answer['a'][0] is a frozenset, which is not JSON"),
    ({1: "a"}, "answer has the key 1, an int; JSON's keys are text: str(key)"),
    ({"a": {None: 1}}, "answer['a'] has the key None, a NoneType"),
    ({("a", 1): 1}, "answer has the key ('a', 1), a tuple"),
    ({np.int64(1): 1}, "a numpy.int64; JSON's keys are text"),
    (float("nan"), "answer is nan, which JSON has no number for; give None, or a number"),
    ([1.0, float("-inf")], "answer[1] is -inf"),
    (np.array([1.0, np.nan]), "answer[1] is nan"),
    (pd.NA, "answer is missing (<NA>), which JSON has no value for; give None"),
    ([pd.NaT], "answer[0] is missing (NaT)"),
    (pd.array([1, None], dtype="Int64"), "answer[1] is missing (<NA>)"),
    (pd.Timestamp("2026-01-02"), "answer is a pandas.Timestamp, which is not JSON; give text: value.isoformat()"),
    (datetime.date(2026, 1, 2), "answer is a date, which is not JSON; give text: value.isoformat()"),
    (datetime.timedelta(1), "answer is a timedelta, which is not JSON; give seconds"),
    (np.datetime64("2026-01-02T00:00:00.000000000"), "answer is a numpy.datetime64"),
    (np.array(["2026-01-02"], dtype="datetime64[ns]"), "answer is a numpy.ndarray, which is not JSON"),
    (decimal.Decimal("1.5"), "answer is a Decimal, which is not JSON; give a number or text: float(value), str(value)"),
    (fractions.Fraction(1, 2), "answer is a Fraction"),
    (b"x", "answer is a bytes, which is not JSON; give text: value.decode()"),
    (bytearray(b"x"), "answer is a bytearray"),
    (memoryview(b"x"), "answer is a memoryview"),
    (np.bytes_(b"x"), "answer is a bytes, which is not JSON; give text: value.decode()"),
    (1j, "answer is a complex"),
    (np.complex64(1j), "answer is a complex"),
    (np.longdouble(1), "answer is a numpy.longdouble"),
    (np.zeros(1, dtype=[("x", "i4")]), "answer is a numpy.ndarray"),
    (
        pd.Series([1], index=["a"]),
        "answer is a pandas.Series, which is not JSON; give what it holds: value.to_dict(), value.tolist()",
    ),
    (pd.DataFrame({"a": [1]}), "answer is a pandas.DataFrame"),
    (uuid.UUID(int=1), "answer is an UUID, which is not JSON; give text: str(value)"),
    (pathlib.Path("a"), "Path, which is not JSON; give text: str(value)"),
    (Colour.RED, "Colour, which is not JSON; give what it stands for: value.value"),
    (Record(1), "Record, which is not JSON; give a dict: dataclasses.asdict(value)"),
    (Task(id="1", input="x"), "answer is a lightningrl.Task"),
    (range(3), "answer is a range, which is not JSON; give text, numbers, lists or dicts"),
    (deque([1]), "answer is a deque"),
    ((number for number in (1, 2)), "answer is a generator"),
    (object, "answer is a type"),
    (holder, "answer[1]['again'] holds itself, which no JSON can; leave it out there"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_what_no_json_has_is_refused_with_its_task_its_place_and_its_type(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read("fine", {"id": "seven", "input": "x", "answer": given})
    assert str(caught.value).startswith("tasks.train 'data.py:load': task 1 (id 'seven'): answer")
    assert sentence in str(caught.value)
    ended = report_output({"found": given}, agent="agent.py:answer", duration_s=0.0)
    assert ended.outcome is Outcome.AGENT_ERROR and ended.output is None
    assert ended.error is not None and ended.error.startswith(
        "the agent 'agent.py:answer' returned a dict that cannot be kept: "
    )
    assert sentence.replace("answer", "output['found']", 1) in ended.error


@pytest.mark.parametrize(("given", "right"), BECOME, ids=lambda value: repr(value)[:30])
def test_an_agent_may_return_what_numpy_made(given: Any, right: Any) -> None:
    output = [given, "end"]
    assert report_output(output, agent="a", duration_s=0.0).output == [right, "end"]


def test_a_value_may_be_deep_but_not_deeper_than_what_travels(tmp_path: Any) -> None:
    def nested(levels: int) -> Any:
        value: Any = "end"
        for _ in range(levels):
            value = [value]
        return value

    assert to_plain(nested(DEEPEST), "answer") == nested(DEEPEST)
    with pytest.raises(NotPlain, match=f"answer is nested deeper than {DEEPEST} levels; give something flatter"):
        to_plain(nested(5000), "answer")


def test_lists_that_are_used_twice_hold_nothing_of_themselves() -> None:
    twice = [1]
    assert to_plain([twice, twice], "answer") == [[1], [1]]


def test_tasks_made_by_the_source_itself_are_read_the_same() -> None:
    (task,) = read(Task(id="one", input=np.int64(3), answer=np.array([1]), metadata={"a": np.int8(2)}))
    assert task == Task(id="one", input=3, answer=[1], metadata={"a": 2}) and type(task.input) is int
    with pytest.raises(ConfigError, match=r"task 0 \(id 'one'\): metadata\['a'\] is a set"):
        read(Task(id="one", input="x", metadata={"a": {1}}))
    with pytest.raises(ConfigError, match="task 0 has a list as metadata; give a dict"):
        read({"id": "one", "input": "x", "metadata": [1]})


@pytest.mark.parametrize(
    ("given", "right"),
    [
        (3, "3"),
        (np.int64(3), "3"),
        (3.0, "3"),
        (np.float64(3), "3"),
        (np.str_("a"), "a"),
        (2**70, str(2**70)),
        (10**400, str(10**400)),
    ],
)
def test_a_whole_number_is_an_id_whatever_type_it_came_in(given: Any, right: str) -> None:
    (task,) = read({"id": given, "input": "x"})
    assert task.id == right and type(task.id) is str


@pytest.mark.parametrize("given", [3.5, float("nan"), None, "", True, (1,), pd.NA])
def test_an_id_that_names_nothing_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"task 0 has the id .*; give a text or a whole number, or leave it out"):
        read({"id": given, "input": "x"})


def test_the_wire_makes_bytes_of_token_arrays_alone() -> None:
    """A task that a program hands to the control API itself, past `read_tasks`."""
    spec = RolloutSpec(
        id="r", task=Task(id="t", input=np.array([3, 5], dtype=np.int32), answer=np.int64(4)), group_id="g"
    )
    back = wire.decode(wire.encode(spec), RolloutSpec)
    assert back.task.input == [3, 5] and back.task.answer == 4
    back_result = wire.decode(wire.encode(Result(outcome=Outcome.SUCCEEDED, output={"a": np.float32(0.5)})), Result)
    assert back_result.output == {"a": 0.5}
    with pytest.raises(NotPlain, match=r"a numpy\.datetime64, which is not JSON"):
        wire.encode(Result(outcome=Outcome.SUCCEEDED, output=np.datetime64("2026-01-02T00:00:00.000000000")))


def test_values_are_read_without_importing_numpy_or_pandas() -> None:
    code = "import sys; from lightningrl.sanitize import to_plain; to_plain({'a': [1.0]}, 'x'); assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
