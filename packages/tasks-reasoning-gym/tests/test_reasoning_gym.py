"""The task source of reasoning-gym: the same tasks for ever, gold that earns the most, and the library's traps."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Outcome, Task
from lightningrl_client.runtime.task_sources import worker_agent
from lightningrl_tasks_reasoning_gym import ReasoningGym, read_answer
from lightningrl_testing.groups import make_trajectory
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import whole_path
from lightningrl_training.build import build_credit
from lightningrl_training.task_sources import build_source, draw_sets
from lightningrl_training.tasks import TaskSets

NAMES = ("basic_arithmetic", "chain_sum", "letter_counting", "spell_backward", "word_sorting")
NO_ROLLOUT: Any = make_trajectory("r", [])


def recipe(tasks: dict[str, Any], **other: Any) -> Recipe:
    own = {"agent": "tasks", "policy": {"model": "m"}, "rewards": {"right": {"use": "tasks"}}}
    return Recipe.model_validate({**own, "tasks": tasks, **other})


def draw(tasks: dict[str, Any]) -> TaskSets:
    source = build_source(recipe(tasks), load_plugins())
    assert source is not None
    return draw_sets(recipe(tasks), source)


def pay(source: ReasoningGym, task: Task, output: Any) -> float:
    return source.reward(task, output, NO_ROLLOUT)  # type: ignore[return-value]


def test_two_hundred_tasks_pay_gold_all_and_a_no_op_nothing_twice_the_same() -> None:
    scored = []
    for _ in range(2):
        source = ReasoningGym(names=NAMES)
        tasks = list(source.tasks("train", seed=3, count=200))
        gold = [pay(source, task, source.gold(task)) for task in tasks]
        scored.append(
            (tasks, gold, [pay(source, task, nothing) for task in tasks for nothing in ("", None, "<answer>")])
        )
    assert scored[0] == scored[1]
    assert set(scored[0][1]) == {1.0}
    assert set(scored[0][2]) == {0.0}
    assert Counter(task.metadata["generator"] for task in scored[0][0]).keys() == set(NAMES)


def test_another_process_draws_the_same_tasks() -> None:
    """Sets and dicts of the library may come in the order of a process's own hashes."""
    code = (
        "from lightningrl_tasks_reasoning_gym import ReasoningGym as G\n"
        f"print([task.input for task in G(names={NAMES}).tasks('train', seed=3, count=40)])"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    said = subprocess.run(command, env={"PYTHONHASHSEED": "1"}, capture_output=True, check=True, text=True).stdout
    assert said == f"{[task.input for task in ReasoningGym(names=NAMES).tasks('train', seed=3, count=40)]}\n"


def test_seeds_that_follow_each_other_share_no_entries_and_what_chance_shares_is_left_out() -> None:
    """In the library entry 1 of seed 1 is entry 0 of seed 2: a held-out set of the next seed was the training set."""
    import reasoning_gym

    first, second = (reasoning_gym.create_dataset("chain_sum", seed=seed, size=9) for seed in (1, 2))
    assert first[1]["question"] == second[0]["question"]
    sums = {"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}
    split = {"train": {"seed": 1, "count": 2000}, "validation": {"seed": 2, "count": 200}}
    sets = draw({"use": "reasoning_gym", "options": sums, **split})
    trained = {task.input for task in sets.train}
    assert (len(sets.validation), len(trained & {task.input for task in sets.validation})) == (200, 0)
    assert "had the input of a training task" in sets.notes[0]
    large = {"name": "chain_sum", "config": {"min_terms": 4, "max_terms": 4, "min_digits": 4, "max_digits": 4}}
    assert draw({"use": "reasoning_gym", "options": large, **split}).notes == ()


@pytest.mark.parametrize(("name", "nonsense"), [("coin_flip", "0"), ("game_of_life_halting", "I do not know.")])
def test_a_generator_that_pays_nonsense_is_refused(name: str, nonsense: str) -> None:
    import reasoning_gym

    data_set = reasoning_gym.create_dataset(name, seed=5, size=5)
    assert [data_set.score_answer(answer=nonsense, entry=entry) for entry in data_set] == [1.0] * 5
    with pytest.raises(ConfigError, match=f"generator '{name}' is refused: its check pays 1.0 for"):
        ReasoningGym(name=name)


def test_a_check_that_raises_on_words_pays_them_nothing(caplog: pytest.LogCaptureFixture) -> None:
    import reasoning_gym

    data_set = reasoning_gym.create_dataset("prime_factorization", seed=5, size=5)
    with pytest.raises(ValueError, match="invalid literal"):
        data_set.score_answer(answer="I do not know.", entry=data_set[0])
    source = ReasoningGym(name="prime_factorization")
    tasks = list(source.tasks("train", seed=5, count=5))
    assert [pay(source, task, "I do not know.") for task in tasks] == [0.0] * 5
    assert [pay(source, task, source.gold(task)) for task in tasks] == [1.0] * 5
    assert caplog.text.count("'prime_factorization': its check raised ValueError") == 1


@pytest.mark.parametrize("name", ["boxnet", "graph_color", "propositional_logic", "rush_hour"])
def test_a_generator_without_a_reference_answer_has_no_gold(name: str) -> None:
    source = ReasoningGym(name=name)
    (task,) = source.tasks("train", seed=1, count=1)
    assert (task.answer, source.gold(task)) == (None, None)
    assert pay(source, task, "") == 0.0 <= pay(source, task, "1") < 1.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"name": "chain_summ"}, "reasoning-gym has no generator 'chain_summ'; it has: "),
        ({"name": "chain_sum", "config": {"min_term": 2}}, "generator 'chain_sum' does not take its config: "),
        ({"name": "chain_sum", "config": {"min_terms": -1}}, "generator 'chain_sum' does not take its config: "),
        ({}, "reasoning_gym takes either name, with config, or names, with configs; give one of them"),
        ({"names": ["chain_sum"], "config": {"a": 1}}, "config beside name, and configs by name beside names"),
        ({"names": ["chain_sum"], "configs": {"products": {}}}, "a config of 'products', which is none of names"),
        ({"names": {"chain_sum": 0}}, "the weight of 'chain_sum' is not above 0; leave the generator out"),
        ({"names": ["composite"]}, "generator 'composite' is refused: it is made of other generators"),
        (
            {"names": ["ransom_note"]},
            "generator 'ransom_note' is refused: its tasks differ from process to process",
        ),
    ],
)
def test_options_that_it_does_not_take_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        draw({"use": "reasoning_gym", "options": options, "train": {"count": 2}})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("First <answer>1</answer>, no: <answer>\n42 </answer>.", "42"),
        ("So it is <answer>42", "42"),
        ("The sum is\n\n 42 \n", "42"),
        ("42", "42"),
        (" \n", ""),
    ],
)
def test_the_answer_is_in_the_last_tags_or_the_last_line(text: str, answer: str) -> None:
    assert read_answer(text) == answer


SEVERAL = {
    "sources": {
        "sums": {"use": "reasoning_gym", "share": 3, "options": {"name": "chain_sum"}},
        "letters": {"use": "reasoning_gym", "options": {"name": "letter_counting", "system": "Count."}},
    },
    "train": {"seed": 1, "count": 8},
}


async def test_eight_rollouts_of_two_sources_at_a_concurrency_of_four(tmp_path: Path) -> None:
    train = draw(SEVERAL).train
    assert Counter(task.id.partition("/")[0] for task in train) == {"sums": 6, "letters": 2}
    engine = ScriptedEngine(tiny_tokenizer())
    for _ in train:
        engine.enqueue("I think it is <answer>7</answer>")
    async with whole_path(
        tmp_path, worker_agent(recipe(SEVERAL)), base_dir=tmp_path, engine=engine, concurrency=4
    ) as path:
        done = await path.run_tasks({f"r{number}": task for number, task in enumerate(train)}, wait_s=300)
    assert [(rollout.outcome, len(rollout.transitions)) for rollout in done] == [(Outcome.SUCCEEDED, 1)] * 8
    evaluator, _ = build_credit(recipe(SEVERAL), load_plugins())
    rewarded = await evaluator.evaluate([rollout_of(rollout, task) for rollout, task in zip(done, train, strict=True)])
    assert [rollout.reward == 1.0 for rollout in rewarded] == [task.answer == "7" for task in train]


def rollout_of(rollout: Any, task: Task) -> Any:
    """The rollout with its task's answer, which no worker is told."""
    return replace(rollout, task=task)


@pytest.mark.long
@pytest.mark.slow
def test_no_generator_that_is_taken_pays_a_constant_or_repeats_differently() -> None:
    """The whole library: a constant answer earns all only where it is right now and then."""
    from reasoning_gym.factory import DATASETS

    from lightningrl_tasks_reasoning_gym.source import REFUSED

    for name in sorted(DATASETS.keys() - REFUSED.keys()):
        source, again = ReasoningGym(name=name), ReasoningGym(name=name)
        tasks = list(source.tasks("train", seed=7, count=6))
        assert tasks == list(again.tasks("train", seed=7, count=6)), name
        for constant in ("0", "1", "I do not know.", "yes"):
            assert sum(pay(source, task, constant) for task in tasks) < 5.5, (name, constant)
        golds = [pay(source, task, gold) for task in tasks if (gold := source.gold(task)) is not None]
        assert golds == [1.0] * len(golds), name
