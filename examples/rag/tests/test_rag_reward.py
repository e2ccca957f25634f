"""Token F1 as SQuAD counts it, format as the agent is told it, and what a table says."""

from types import SimpleNamespace
from typing import Any

import pytest
from measures import measure
from reward import answer_reward, exact_match, extract_answer, f1, has_format, normalise


def task(*answers: str) -> SimpleNamespace:
    return SimpleNamespace(answer=list(answers))


def test_case_punctuation_and_articles_do_not_count() -> None:
    assert normalise("The  Port of a 'Velden'!") == ["port", "of", "velden"]


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        ("<answer> Port Alder </answer>", 1.0),
        ("<answer>the port alder.</answer>\n", 1.0),
        ("Port Alder", 0.9),
        ("the answer is Port Alder", 0.9 * 2 / 3),
        ("so: <answer> Port Alder </answer>", 0.9),
        ("<answer> Port Velden </answer>", 0.9 * 0.5 + 0.1),
        ("<answer> Mara Holt </answer>", 0.1),
        ("<answer>  </answer>", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_the_reward_is_nine_tenths_f1_and_one_tenth_format(output: str | None, reward: float) -> None:
    assert answer_reward(task("Port Alder"), output) == pytest.approx(reward)


def test_repeated_words_count_once_for_each_in_the_answer() -> None:
    assert f1("Alder", "Alder Alder Alder") == pytest.approx(0.5)


def test_the_best_of_several_right_answers_counts() -> None:
    assert f1(["New York City", "NYC"], "<answer> NYC </answer>") == 1.0
    assert exact_match(["New York City", "NYC"], "<answer> nyc </answer>")


def test_one_pair_of_tags_and_nothing_around_is_the_format() -> None:
    assert has_format(" <answer> x </answer> ")
    assert not has_format("<answer> x </answer> <answer> y </answer>")
    assert extract_answer("<answer> x </answer> <answer> y </answer>") == "y"


def test_a_table_counts_failed_rollouts_as_wrong() -> None:
    def call(query: str) -> SimpleNamespace:
        return SimpleNamespace(name="search", arguments={"query": query})

    right: Any = SimpleNamespace(
        task=task("x"), output="<answer> x </answer>", tool_calls=(call("a"), call("a"), call("b"))
    )
    failed: Any = SimpleNamespace(task=task("x"), output=None, tool_calls=(call("a"),))
    assert measure([right, failed]) == {"f1": 0.5, "exact_match": 0.5, "format": 0.5, "searches": 2.0, "repeated": 0.25}
