"""The calculator, the reward, and what the table measures."""

from types import SimpleNamespace

import pytest
from calculator import calculator
from measures import measure
from reward import answer_match, is_match

from lightningrl.types import Outcome, Task, Trajectory


@pytest.mark.parametrize(
    ("expression", "value"),
    [("24 + 6", "30"), ("3 - 10", "-7"), ("(2 + 3) * 4", "20"), ("7 / 2", "3.5"), ("1 / 3", "0.3333333333"), ("1,234 + 1_000", "2234")],
)  # fmt: skip
def test_the_calculator_evaluates_arithmetic(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("24 x 6", "24 x 6 is no arithmetic expression"),
        ("24 +", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("__import__('os').getcwd()", "no arithmetic expression"),
        ("True + 1", "no arithmetic expression"),
        ("(" * 150, "no arithmetic expression"),
        ("1 / 0", "divides by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("1e300 * 1e300", "too large"),
        ("10 ** 20", "too large"),
    ],
)
def test_the_calculator_refuses_with_a_sentence_what_is_no_arithmetic(expression: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        calculator(expression)


@pytest.mark.parametrize(
    ("expected", "answer", "is_right"),
    [
        ("72", "72", True),
        ("72", "72.0", True),
        ("72", "73", False),
        ("1_000", "1,000", True),
        ("2/3", "0.667", True),
        ("2/3 = around 0.666667", "2/3", True),
        ("C", "(C)", True),
        ("C", "D", False),
        ("72", "", False),
        ("72", None, False),
        ("72", "seventy-two", False),
    ],
)
def test_answers_are_compared_as_numbers(expected: str, answer: str | None, is_right: bool) -> None:
    assert is_match(expected, answer) is is_right


def test_a_task_without_an_answer_is_broken_data() -> None:
    with pytest.raises(ValueError, match="every task needs one"):
        answer_match(SimpleNamespace(answer=None), "1")


def make_trajectory(depth: int, output: str | None) -> Trajectory:
    return Trajectory(
        rollout_id="r",
        attempt=1,
        task=Task(id="t", input="?", answer="5", metadata={"depth": depth}),
        group_id="g",
        outcome=Outcome.SUCCEEDED,
        transitions=(),
        output=output,
    )


def test_measures_count_right_answers_by_depth() -> None:
    values = measure([make_trajectory(1, "5"), make_trajectory(2, "4"), make_trajectory(2, None)])
    assert values["accuracy"] == pytest.approx(1 / 3)
    assert (values["1 step"], values["2 steps"]) == (1.0, 0.0)
    assert values["unanswered"] == pytest.approx(1 / 3)
