"""Task sources: what a recipe draws of one, what it is refused, and what reaches the workers."""

from __future__ import annotations

import re
import textwrap
import tomllib
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lightningrl.errors import ConfigError, PluginError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import Outcome
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_client.runtime.task_sources import worker_agent
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import whole_path
from lightningrl_training.build import build_credit
from lightningrl_training.checks import build_checked
from lightningrl_training.task_files import task_source
from lightningrl_training.task_sources import build_source, draw_sets
from lightningrl_training.tasks import TaskSets

SOURCE = '''
import itertools, random
from lightningrl import Task


class Sums:
    """Sums of two numbers below `most`."""

    requires = frozenset()

    def __init__(self, *, most=10, times=1):
        self.most, self.times = most, times

    def tasks(self, split, /, *, seed, count):
        for number in itertools.count() if count is None else range(count):
            dice = random.Random(f"{seed} {number}")
            a, b = dice.randrange(self.most), dice.randrange(self.most)
            answer = (a + b) * self.times
            yield Task(id=f"{split}-{seed}-{number}", input=f"{a} + {b}", answer=answer, metadata={"times": self.times})

    def reward(self, task, output, trajectory):
        return 1.0 if output == task.answer else 0.0

    def gold(self, task):
        return task.answer

    def agent(self, question, task):
        import openai

        assert task.answer is None
        said = openai.OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": question}])
        return [task.id, task.metadata["times"], said.choices[0].message.content]


class Words:
    """Three fixed tasks of each set, one of them the same in both."""

    requires = frozenset({"network"})

    def tasks(self, split, /, *, seed, count):
        yield from (Task(id=f"{split}-{word}", input=word, answer=word) for word in ("one", split, split * 2))


class Game(Sums):
    requires = frozenset({"one_at_a_time"})


class Strange(Sums):
    requires = frozenset({"python>=9.9"})


class Boxes(Sums):
    requires = frozenset({"container"})
'''


def write(folder: Path, tasks: str, rest: str = "") -> Recipe:
    (folder / "source.py").write_text(SOURCE)
    (folder / "recipe.toml").write_text(
        textwrap.dedent(f'agent = "tasks"\ntasks = {tasks}\npolicy.model = "m"\nrewards.right.use = "tasks"\n') + rest
    )
    return load_recipe(folder)


def draw(folder: Path, tasks: str, rest: str = "") -> TaskSets:
    return draw_of(write(folder, tasks, rest))


ONE = '{ use = "source.py:Sums", train = { seed = 1, count = 60 }'


def test_a_source_gives_as_many_tasks_as_are_asked_for_and_the_same_again(tmp_path: Path) -> None:
    first, again = draw(tmp_path, f"{ONE} }}"), draw(tmp_path, f"{ONE} }}")
    assert first == again
    assert (len(first.train), first.train[7].id, first.notes) == (60, "train-1-7", ())
    other = draw(tmp_path, f"{ONE}, validation = {{ split = 'test', seed = 9, count = 1 }} }}")
    assert other.validation[0].id.startswith("test-9-")


def test_validation_tasks_whose_input_is_trained_are_left_out_and_others_drawn(tmp_path: Path) -> None:
    sets = draw(tmp_path, f"{ONE}, validation = {{ seed = 2, count = 20 }} }}")
    trained = {task.input for task in sets.train}
    assert len(sets.validation) == 20
    assert not trained & {task.input for task in sets.validation}
    (note,) = sets.notes
    assert "validation tasks drawn" in note
    assert "had the input of a training task" in note


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        (f"{ONE}, options = {{ most = 3 }}, validation = {{ count = 20 }} }}", "tasks.validation.count is 20, and the"),
        ('{ use = "source.py:Sums", train = {} }', "tasks.train: the source goes on after 100,000 tasks; say how many"),
        (ONE.replace("Sums", "Strange") + " }", "needs python>=9.9, and this is Python 3."),
        (ONE.replace("Sums", "Words") + " }", "task source 'source.py:Words' brings no agent"),
        (ONE.replace("source.py:Sums", "reasoning_jim") + " }", "no task source named 'reasoning_jim'; installed: "),
        (ONE.replace("use", "options = { most = 0 }, use") + " }", "tasks.train: its source raised ValueError"),
        (
            ONE.replace("use", "options = { least = 0 }, use") + " }",
            "'source.py:Sums' has no setting 'least'; it takes",
        ),
        ('{ train = "source.py:Sums" }', 'agent = "tasks" is the one that a task source brings, and tasks.use names'),
    ],
)
def test_what_a_source_is_refused(tmp_path: Path, tasks: str, sentence: str) -> None:
    recipe = write(tmp_path, tasks)
    with pytest.raises((ConfigError, PluginError)) as caught:
        build_checked(recipe, load_plugins())
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        ("{ train = { seed = 1 } }", "train is a table, { seed = 1, count = 200 }, where `use` names"),
        (
            '{ use = "source.py:Sums", train = "data.jsonl" }',
            "train is a table, { seed = 1, count = 200 }, where `use` names",
        ),
        (
            '{ use = "source.py:Sums", train = { sede = 1 } }',
            "train takes seed, count (1 or more) and split, got {'sede",
        ),
        ('{ use = "source.py:Sums", train = {}, answer = "a" }', "name columns of files, and a source has none"),
        ('{ use = "x", sources.a.use = "y", train = {} }', "sources are several, each with `use` and `options`"),
        ('{ sources.a.use = "y", options.most = 3, train = {} }', "sources are several, each with `use` and `options`"),
    ],
)
def test_the_forms_of_tasks_exclude_each_other(tmp_path: Path, tasks: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        write(tmp_path, tasks)
    assert sentence in str(caught.value)


FIXED = '{ use = "source.py:Words", train = { count = 3 }'


def test_fixed_tasks_that_are_in_both_sets_are_refused_without_a_count_and_left_out_with_one(tmp_path: Path) -> None:
    recipe = write(tmp_path, FIXED + ", validation = {} }", "rewards.right.options = {}\n")
    recipe = with_settings(recipe, {"agent": "agent.py:answer"})
    source = build_source(recipe, load_plugins())
    assert source is not None
    with pytest.raises(
        ConfigError, match="1 of 3 validation tasks have the input of a training task, as 'validation-one'"
    ):
        draw_sets(recipe, source)
    sets = draw_sets(with_settings(recipe, {"tasks.validation.count": 2}), source)
    assert [task.input for task in sets.validation] == ["validation", "validationvalidation"]
    assert sets.notes[0] == "task source 'source.py:Words' needs the network while it runs"
    with pytest.raises(ConfigError, match="count is 3, and the source gave 2 whose input training has not, beside 1"):
        draw_sets(with_settings(recipe, {"tasks.validation.count": 3}), source)


def test_one_rollout_at_a_time_is_what_its_run_has(tmp_path: Path) -> None:
    recipe = write(tmp_path, ONE.replace("Sums", "Game") + " }")
    (reward,) = build_credit(recipe, load_plugins())[0].rewards.rewards
    assert reward.concurrency == 1
    with pytest.raises(ConfigError, match=r"one rollout at a time in a process; set runtime\.concurrency = 1"):
        build_source(with_settings(recipe, {"runtime.concurrency": 4}), load_plugins())


def test_a_source_that_needs_containers_is_refused_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = "needs containers, and neither docker nor podman is on PATH"
    with pytest.raises(ConfigError, match=said):
        build_source(write(tmp_path, ONE.replace("Sums", "Boxes") + " }"), load_plugins())
    (tmp_path / "podman").touch(mode=0o755)
    assert build_source(write(tmp_path, ONE.replace("Sums", "Boxes") + " }"), load_plugins()) is not None


SEVERAL = """{ sources.sums = { use = "source.py:Sums", share = 2 }, sources.triples = { use = "source.py:Sums",
options = { times = 3 } }, train = { seed = 1, count = 8 } }""".replace("\n", " ")


async def test_several_sources_in_one_run_each_with_its_own_agent_and_reward_in_other_processes(tmp_path: Path) -> None:
    """Their workers and reward processes make them anew, from the recipe's text."""
    recipe = write(tmp_path, SEVERAL)
    train = draw(tmp_path, SEVERAL).train
    assert Counter(task.id.partition("/")[0] for task in train) == {"sums": 5, "triples": 3}
    engine = ScriptedEngine(tiny_tokenizer())
    for _ in train:
        engine.enqueue("7")
    async with whole_path(tmp_path, worker_agent(recipe), base_dir=tmp_path, engine=engine, concurrency=4) as path:
        done = await path.run_tasks({f"r{number}": task for number, task in enumerate(train)})
    for task, rollout in zip(train, done, strict=True):
        assert rollout.outcome is Outcome.SUCCEEDED, rollout.error
        source, _, own_id = task.id.partition("/")
        assert rollout.output == [own_id, 3 if source == "triples" else 1, "7"]
    evaluator, _ = build_credit(recipe, load_plugins())
    right = [replace(rollout, task=task, output=task.answer) for task, rollout in zip(train, done, strict=True)]
    wrong = [replace(rollout, task=task, output="no") for task, rollout in zip(train, done, strict=True)]
    assert [rollout.reward for rollout in await evaluator.evaluate(right)] == [1.0] * 8
    assert [rollout.reward for rollout in await evaluator.evaluate(wrong)] == [0.0] * 8


def test_the_frozen_recipe_of_a_run_draws_the_same_tasks(tmp_path: Path) -> None:
    recipe = write(tmp_path, SEVERAL)
    read = Recipe.model_validate_json(recipe.frozen_text()).model_copy(update={"folder": tmp_path})
    assert draw_of(read).train == draw(tmp_path, SEVERAL).train


def test_a_file_whose_validation_asks_what_training_asks_is_refused(tmp_path: Path) -> None:
    """Ids that differ hid it: a loader numbers its rows by the set that they are in."""
    (tmp_path / "data.jsonl").write_text('{"input": "1 + 1"}\n')
    recipe = write(tmp_path, '{ train = "data.jsonl", validation = "data.jsonl" }')
    with pytest.raises(ConfigError, match="as 'validation-0' has that of 'train-0'; take them out of one of the sets"):
        TaskSets.load(recipe, lambda reference: task_source(reference, tmp_path))


PAGE = Path(__file__).parents[1] / "docs/how-to/task-sources.md"


async def test_a_stranger_writes_a_source_from_the_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```(\w+)[^\n]*\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (one, _, several), (source, plugin) = (
        [text for kind, text in blocks if kind == kinds] for kinds in ("toml", "python")
    )
    (tmp_path / "source.py").write_text(source)
    (tmp_path / "one.toml").write_text(one)
    sets = draw_of(load_recipe(tmp_path / "one.toml"))
    assert (len(sets.train), len(sets.validation)) == (200, 20)
    mixed = load_recipe(tmp_path / "one.toml")
    mixed = Recipe.model_validate({**mixed.model_dump(), "tasks": tomllib.loads(several)["tasks"]})
    mixed = mixed.model_copy(update={"folder": tmp_path})
    assert Counter(task.id.partition("/")[0] for task in draw_of(mixed).train) == {"small": 200, "large": 100}

    engine, asked = ScriptedEngine(tiny_tokenizer()), draw_of(mixed).train[:8]
    for task in asked:
        engine.enqueue(str(task.answer))
    async with whole_path(tmp_path, worker_agent(mixed), base_dir=tmp_path, engine=engine) as path:
        done = await path.run_tasks({f"r{number}": task for number, task in enumerate(asked)})
    evaluator, _ = build_credit(mixed, load_plugins())
    rewarded = await evaluator.evaluate([replace(at, task=task) for at, task in zip(done, asked, strict=True)])
    assert [rollout.reward for rollout in rewarded] == [1.0] * 8

    monkeypatch.syspath_prepend(tmp_path)
    hooks = types.ModuleType("plugin")
    exec(plugin, vars(hooks))
    plugins = load_plugins()
    plugins.register(hooks)
    assert next(plugins.find("lightningrl_tasks", "sums").build(most=1).tasks("train", seed=0, count=1)).answer == 0


def draw_of(recipe: Recipe) -> TaskSets:
    source = build_source(recipe, load_plugins())
    assert source is not None
    return draw_sets(recipe, source)


def test_a_harness_may_be_asked_the_same_of_other_files(tmp_path: Path) -> None:
    """It sees what the recipe lets its task's metadata say: the same words are another task there."""
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"input": "mend it", "files": {{"a.py": "{name}"}}}}\n')
    recipe = write(tmp_path, '{ train = "train.jsonl", validation = "validation.jsonl" }')
    with pytest.raises(ConfigError, match="have the input of a training task"):
        TaskSets.load(recipe, lambda reference: task_source(reference, tmp_path))
    with pytest.raises(ConfigError, match="have the input of a training task"):
        unseen = with_settings(recipe, {"agent": {"harness": "pi"}})
        TaskSets.load(unseen, lambda reference: task_source(reference, tmp_path))
    asked = with_settings(recipe, {"agent": {"harness": "pi", "from_task": ["files"]}})
    assert len(TaskSets.load(asked, lambda reference: task_source(reference, tmp_path)).validation) == 1
