"""A newcomer's mistakes: each is answered before there is a run folder, by a sentence whose remedy works when it is
typed in."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sizes import sized

from lightningrl import problems
from lightningrl.commands import run_command
from lightningrl.errors import ConfigError, LightningError, PluginError, RunFolderError
from lightningrl.plugins import PluginManager, load_plugins
from lightningrl.types import Task
from lightningrl_client.recipe_file import load_recipe
from lightningrl_client.runtime.agent_loader import agent_reference
from lightningrl_runs.origin import RunOrigin, newest_run
from lightningrl_testing.tokenizers import CHATML_TEMPLATE, tiny_tokenizer
from lightningrl_training.agent_check import check_agent
from lightningrl_training.build import Parts
from lightningrl_training.checkpoints import LoopState
from lightningrl_training.commands.train import train
from lightningrl_training.commands.try_one import try_recipe
from lightningrl_training.lab.recredit import find_measured
from lightningrl_training.models import check_on_hub
from lightningrl_training.run import Run, doctor
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.serving import server_settings
from lightningrl_training.start import begin_run
from lightningrl_training.tasks import TaskSets, digest_tasks, encode_digests, explain_few_tasks, explain_other_tasks

pytestmark = pytest.mark.slow
DATA = """
def tasks(): return [{"input": "a"}, {"id": 7, "input": "b"}, "c"]
def lists(): return [["a"]]
def prompts(): return [{"prompt": "a"}]
def right(task, output, trajectory): return 1.0
def two(task, output): return 1.0
"""
RECIPE = """
agent = "hour_agent.py:answer"
[tasks]
train = "hour_data.py:tasks"
[policy]
model = "model"
[rewards.right]
use = "hour_data.py:right"
[sampling]
max_tokens = 16
[validation.sampling]
max_tokens = 16
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with all that a run needs but weights; nothing that it imports is left behind."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)
    (tmp_path / "hour_agent.py").write_text("def answer(task): return task\n")
    (tmp_path / "hour_data.py").write_text(DATA)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_step_that_asks_for_more_tasks_than_there_are_is_warned_of_at_the_start_and_trains(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for asked, said in ((4, 1), (3, 0)):
        settings = {"loop.tasks_per_step": asked}
        assert list(problems(here / "recipe.toml", settings=settings)) == []
        caplog.clear()
        with begin_run(
            here / "recipe.toml", run=here / f"run-{asked}", resume=False, overwrite=False, settings=settings
        ) as opened:
            assert not opened.is_resumed
        found = [record.getMessage() for record in caplog.records if "tasks_per_step" in record.getMessage()]
        assert len(found) == said
    assert explain_few_tasks(opened.recipe, opened.parts.tasks.train[:1]) == (
        "loop.tasks_per_step is 3, but there is 1 training task: each step asks for some more than once; give more tasks, or set "
        "loop.tasks_per_step=1 (loop.group_size says how often a task is tried)"
    )


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the command line takes them; a table is a key of each of its values."""
    words = []
    for key, value in settings.items():
        if isinstance(value, dict):
            words += words_of({f"{key}.{name}": part for name, part in value.items()})
        else:
            words.append(f"{key}={json.dumps(value)}")
    return words


def refused(here: Path, **settings: Any) -> str:
    """What `lightningrl train` says, which leaves no run folder."""
    run = here / "run"
    with pytest.raises(LightningError) as error:
        train(here / "recipe.toml", run=run, runs=here, settings=words_of(settings))
    assert not run.exists()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_that_is_no_folder_and_no_hub_name_is_refused_at_once(here: Path) -> None:
    said = refused(here, **{"policy.model": "starter"})
    assert "'starter' is no folder" in said
    assert "lightningrl init" in said


def test_a_hub_name_that_cannot_be_fetched_is_refused_before_a_run_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "'nobody/no-such-model' is not in this machine's Hugging Face cache" in refused(
        here, **{"policy.model": "nobody/no-such-model"}
    )
    check_on_hub("policy", str(here / "model"))


PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"policy.renderer": "hermes"},
            "policy 'policy': no renderer 'hermes'; there are auto, default, .*, llama-3, .*, qwen3,",
        ),
        (
            {"policy.renderer": "llama-3"},
            "renderer 'llama-3' does not fit the tokenizer of .*; those that fit are .*qwen3",
        ),
        (
            {"policy.chat_template_kwargs": {"enable_thinking": False}},
            "the chat template of policy 'policy' never reads 'enable_thinking'",
        ),
        (
            {"policy.renderer": "qwen3", "policy.chat_template_kwargs": {"think": 1}},
            "never reads 'think'; it reads enable_thinking",
        ),
    ],
)
def test_how_messages_become_prompts_is_checked_before_anything_heavy(
    here: Path, settings: dict[str, Any], says: str
) -> None:
    assert re.search(says, refused(here, **settings))
    (only,) = problems(here / "recipe.toml", settings=settings)
    assert re.search(says, only)


def test_a_template_that_does_not_compile_is_refused_before_anything_heavy(here: Path) -> None:
    (here / "model" / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    assert re.search(r"the chat template of policy 'policy' does not compile: .*\(line 2\)", refused(here))


def test_a_policy_without_readable_tool_markup_says_so_at_the_start(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert Parts.build(load_recipe(here / "recipe.toml"), load_plugins()).without_tools == ()
    (here / "model" / "chat_template.jinja").write_text(PLAIN)
    for number, settings in enumerate(({}, {"policy.renderer": "default"})):
        caplog.clear()
        with begin_run(
            here / "recipe.toml", run=here / f"run-{number}", resume=False, overwrite=False, settings=settings
        ):
            assert (
                "policy 'policy' has no tool-call markup that we can read, so it cannot be offered tools" in caplog.text
            )


def test_template_kwargs_are_part_of_the_run(here: Path) -> None:
    switched = CHATML_TEMPLATE + "{%- if enable_thinking is false %}{{- '<think></think>' }}{%- endif %}"
    (here / "model" / "chat_template.jinja").write_text(switched)
    settings = {"policy.chat_template_kwargs": {"enable_thinking": False}}
    with begin_run(here / "recipe.toml", run=here / "run", resume=False, overwrite=False, settings=settings) as opened:
        kept = RunOrigin.read(here / "run").recipe
        assert kept.policy.chat_template_kwargs == {"enable_thinking": False}
        server = server_settings(opened.recipe, opened.parts, "sqlite://")
        assert server.policies["policy"].chat_template_kwargs == {"enable_thinking": False}


def test_an_answer_as_long_as_the_context_is_refused_with_a_length_that_fits(here: Path) -> None:
    assert refused(here, **{"sampling.max_tokens": 100_000}).endswith("for example --set sampling.max_tokens=16")
    assert "validation.sampling.max_tokens is 64" in refused(here, **{"validation.sampling.max_tokens": 64})


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def run(task): return task", "has no 'answer'; it has: run"),
        ("import not_there", "ModuleNotFoundError: No module named 'not_there'"),
        ("def answer(task:", "SyntaxError"),
        (
            "def answer(task, db): return task",
            "takes (task, db); an agent is called with one argument, the task's input",
        ),
        ("def answer(): return 1", "takes no argument"),
        ("import os; os._exit(7)", "ended its process with status 7"),
    ],
)
def test_an_agent_that_cannot_work_is_refused_before_anything_heavy(here: Path, source: str, says: str) -> None:
    (here / "hour_agent.py").write_text(source)
    with pytest.raises(ConfigError) as error, check_agent(load_recipe(here / "recipe.toml"), load_plugins()) as wait:
        wait()
    assert says in str(error.value)


def test_an_agent_that_makes_its_client_at_import_is_fine_and_stays_in_its_own_process(here: Path) -> None:
    (here / "hour_agent.py").write_text(
        "from openai import OpenAI\nclient = OpenAI()\nprint('x' * 99999)\ndef answer(task, db=None): ...\n"
    )
    with check_agent(load_recipe(here / "recipe.toml"), load_plugins()) as wait:
        wait()
    assert "hour_agent" not in sys.modules


def test_a_reward_with_other_arguments_is_refused_before_the_first_rollout(here: Path) -> None:
    said = refused(here, **{"rewards.right.use": "hour_data.py:two"})
    assert "takes (task, output); a reward is called with (task, output, trajectory)" in said


def test_tasks_need_no_id_and_numbers_become_text(here: Path) -> None:
    parts = Parts.build(load_recipe(here / "recipe.toml"), load_plugins())
    assert [(task.id, task.input) for task in parts.tasks.train] == [("train-0", "a"), ("7", "b"), ("train-2", "c")]


def test_tasks_of_another_shape_are_refused(here: Path) -> None:
    assert "task 0 is a list; give a Task, a dict with its fields, or a text" in refused(
        here, **{"tasks.train": "hour_data.py:lists"}
    )
    assert "unexpected keyword argument 'prompt'" in refused(here, **{"tasks.train": "hour_data.py:prompts"})


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("learner.lr", "did you mean 'learning_rate'?"),
        ("sampling.learning_rate", "here it is 'learner.learning_rate', which belongs in [learner]"),
        ("learner.num_generations", "here it is 'loop.group_size', which belongs in [loop]"),
        ("loop.beta", "here it is 'learner.kl_coef'"),
        ("loop.max_completion_length", "here it is 'sampling.max_tokens'"),
        ("loop.per_device_train_batch_size", "did you mean 'tasks_per_step'?"),
        ("num_train_epochs", "here it is 'loop.steps'"),
        ("learner.epsilon", "did you mean 'clip_low'?"),
        ("learner.group_size", "here it is 'loop.group_size'"),
        ("report_to", "did you mean 'loggers'?"),
        ("loop.groupsize", "did you mean 'group_size'?"),
    ],
)
def test_names_of_other_trainers_point_to_ours(here: Path, key: str, says: str) -> None:
    assert says in refused(here, **{key: 1})


def test_a_missing_model_hides_no_mistyped_key(here: Path) -> None:
    recipe = RECIPE.replace('model = "model"', "")
    (here / "recipe.toml").write_text(recipe + "\n[loop]\ngroupsize = 4\n[learner]\nlr = 1e-3\n")
    missing, mistyped, other = problems(here / "recipe.toml")
    assert "'policy.model' is missing; say which model is trained" in missing
    assert "unknown key 'loop.groupsize'; did you mean 'group_size'?" in mistyped
    assert "unknown key 'learner.lr'; did you mean 'learning_rate'?" in other


def test_all_that_is_wrong_is_said_at_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "hour_agent.py").write_text("def answer(task, db): return task\n")
    wrong = {
        "policy.model": "./nowhere",
        "adapters": ["langgraph"],
        "tasks.train": "hour_data.py:lists",
        "tasks.validation": "hour_data.py:nothing",
        "rewards.right.use": "hour_data.py:two",
        "rewards.other.use": "hour_data.py:three",
        "intermediate_rewards.tools.use": "tool_stats",
        "loop.group_size": 1,
        "judge.model": "gpt",
        "judge.base_url": "http://localhost/v1",
        "judge.api_key_env": "NO_SUCH_KEY",
        "samples.aggregation": "constant",
        "learner.learning_rte": 1,
        "learner.schedul": "linear",
        "loggers": ["tensorbord"],
        "runtime.launcher": "loca",
    }
    parts = (
        "no folder './nowhere'",
        "no adapter named 'langgraph'",
        "'hour_data.py:two'",
        "'hour_data.py' has no 'three'",
        "named 'tool_stats'",
        "asks none: it has no `score`",
        "needs 'group'",
        "'NO_SUCH_KEY' is not set",
        "needs samples.constant_length",
        "no setting 'learning_rte'",
        "no setting 'schedul'",
        "task 0 is a list",
        "'hour_data.py' has no 'nothing'",
        "no logger named 'tensorbord'",
        "named 'loca'",
    )
    found = list(problems(here / "recipe.toml", settings=wrong))
    assert len(found) == len(parts), found
    assert all(part in sentence for part, sentence in zip(parts, found, strict=True)), found
    (only,) = problems(here / "recipe.toml")
    assert "takes (task, db); an agent is called with one argument" in only
    with pytest.raises(SystemExit) as left:
        run_command(lambda: train(here / "recipe.toml", runs=here, settings=words_of(wrong)))
    assert left.value.code == 2
    assert capsys.readouterr().err.count("error: ") == len(parts)
    (here / "hour_agent.py").write_text("def answer(task): return task\n")
    assert list(problems(here / "recipe.toml")) == []


def test_a_mistyped_key_hides_nothing_else_and_neither_does_a_model_that_the_hub_lacks(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (here / "hour_agent.py").write_text("def answer(task, db): return task\n")
    recipe = RECIPE.replace('"model"', '"nobody/no-such-model"').replace("data.py:right", "data.py:rihgt")
    (here / "recipe.toml").write_text(
        recipe + '[loop]\ngroupsize = 4\nsteps = "many"\n[lerner]\nlr = 1\n[credit]\nuse = "grop"\n'
    )
    parts = (
        "unknown key 'loop.groupsize'",
        "'loop.steps': Input should be a valid integer",
        "unknown key 'lerner'",
        "unknown key 'loop.minute'",
        "'nobody/no-such-model' is not in this machine's Hugging Face cache",
        "'hour_data.py' has no 'rihgt'",
        "no credit assigner named 'grop'",
        "takes (task, db); an agent is called with one argument",
    )
    found = list(problems(here / "recipe.toml", settings={"loop.minute": 1}))
    assert len(found) == len(parts), found
    assert all(part in "".join(found) for part in parts), found
    with pytest.raises(ConfigError) as error:
        train(here / "recipe.toml", runs=here, settings=["loop.minute=1"])
    assert error.value.args == tuple(found)
    with pytest.raises(ConfigError) as error:
        try_recipe(str(here / "recipe.toml"), settings=["loop.minute=1"])
    assert error.value.args == tuple(found)
    diagnosis = asyncio.run(doctor(here / "recipe.toml", settings={"loop.minute": 1}))
    assert [row.finding.evidence for row in diagnosis.rows] == found


def test_no_rewards_is_one_sentence_with_what_to_write(here: Path) -> None:
    (here / "recipe.toml").write_text(RECIPE.replace('[rewards.right]\nuse = "hour_data.py:right"', ""))
    said = refused(here)
    assert "'rewards' is missing; say what is good: [rewards.right] use =" in said
    assert said.endswith("a function of (task, output, trajectory)")


def test_parts_of_ours_that_are_not_installed_say_how_they_are(here: Path) -> None:
    with pytest.raises(PluginError, match=r"pip install 'lightningrl\[torch\]'"):
        PluginManager().find("lightningrl_trainers", "torch")
    with pytest.raises(PluginError, match=r"pip install 'lightningrl\[langchain\]'"):
        PluginManager().find("lightningrl_adapters", "langchain")
    assert "pip install 'lightningrl[wandb]'" in refused(here, loggers=["wandb"])


def test_a_single_rollout_a_task_offers_a_method_that_compares_nothing(here: Path) -> None:
    assert "credit.use = 'reinforce'" in refused(here, **{"loop.group_size": 1})
    Parts.build(load_recipe(here / "recipe.toml", {"loop.group_size": 1, "credit.use": "reinforce"}), load_plugins())


def test_a_python_recipe_may_define_its_agent_and_import_its_neighbour(here: Path) -> None:
    (here / "recipe.py").write_text(
        "from lightningrl import CreditConfig, PolicyConfig, Recipe, RewardConfig, TasksConfig\n"
        "from hour_data import right, tasks\n"
        "def answer(task): return task\n"
        "recipe = Recipe(agent=answer, tasks=TasksConfig(train=tasks), policy=PolicyConfig(model='model'),\n"
        "                sampling={'max_tokens': 16}, validation={'sampling': {'max_tokens': 16}},\n"
        "                rewards={'right': RewardConfig(use=right)})\n"
    )
    recipe = load_recipe(here / "recipe.py")
    assert agent_reference(recipe.agent) == f"{here / 'recipe.py'}:answer"
    with check_agent(recipe, load_plugins()) as wait:
        wait()
    assert len(Parts.build(recipe, load_plugins()).tasks.train) == 3
    (here / "recipe.py").write_text(
        (here / "recipe.py").read_text().replace("recipe = Recipe(", "recipe = Recipe(name='again', ")
    )
    assert load_recipe(here / "recipe.py").name == "again", "a mended recipe is read anew"


def start(here: Path, path: Path, *, overwrite: bool = False) -> RunFolder:
    return RunFolder.create(
        path, load_recipe(here / "recipe.toml"), str(here / "recipe.toml"), {}, models={}, overwrite=overwrite
    )


def checkpoint(folder: RunFolder) -> None:
    folder.commit_checkpoint(folder.new_checkpoint(0), LoopState(step=0, seconds=0.0, rollouts=0), keep=1)


def test_a_run_that_never_began_makes_room_and_is_not_the_newest(here: Path) -> None:
    good = start(here, here / "runs" / "good")
    checkpoint(good)
    good.close()
    bad = start(here, here / "runs" / "bad")
    (bad.path / "notes.txt").write_text("mine")
    bad.close()
    assert newest_run(here / "runs").name == "good"
    again = start(here, here / "runs" / "bad")
    assert (again.path / "notes.txt").read_text() == "mine"
    again.discard()
    again.close()
    assert {found.name for found in (here / "runs" / "bad").iterdir()} == {"notes.txt", "run.json", ".lock"}
    start(here, here / "runs" / "bad").close()


def test_a_run_with_a_checkpoint_is_overwritten_only_when_asked(here: Path) -> None:
    folder = start(here, here / "run")
    checkpoint(folder)
    folder.close()
    with pytest.raises(RunFolderError, match="--overwrite"):
        start(here, here / "run")
    folder = start(here, here / "run", overwrite=True)
    assert folder.latest() is None
    folder.close()


def test_a_run_that_is_written_over_leaves_no_branches_of_its_rollouts(here: Path) -> None:
    folder = start(here, here / "run")
    checkpoint(folder)
    branched = here / "run" / "branches" / "step-000000" / "g000000-000"
    branched.mkdir(parents=True)
    (branched / "store.sqlite").touch()
    folder.close()
    start(here, here / "run", overwrite=True).close()
    assert find_measured(here / "run", ["g000000-000"]) == {}, "the new run's rollout has the same id"


def test_a_run_that_is_written_over_leaves_no_evaluations_of_its_weights(here: Path) -> None:
    folder = start(here, here / "run")
    checkpoint(folder)
    (here / "run" / "evaluations" / "1" / "1").mkdir(parents=True)
    (here / "run" / "evaluations" / "1" / "1" / "store.sqlite").touch()
    (here / "run" / "evaluations" / "1.json").write_text('{"evaluations": [], "comparison": null}')
    (here / "run" / "notes.txt").write_text("mine")
    folder.close()
    start(here, here / "run", overwrite=True).close()
    assert not (here / "run" / "evaluations").exists()
    assert (here / "run" / "notes.txt").exists()


def test_to_go_on_with_a_run_and_to_write_over_it_at_once_is_refused_and_leaves_it(here: Path) -> None:
    folder = start(here, here / "run")
    checkpoint(folder)
    folder.close()
    with pytest.raises(
        ConfigError, match="--resume goes on with a run and --overwrite writes over it; give one of the two"
    ):
        train(here / "recipe.toml", resume=True, overwrite=True, run=here / "run", runs=here)
    assert newest_run(here) == here / "run"


def test_a_run_that_went_on_with_other_settings_goes_on_with_them_the_next_time(here: Path) -> None:
    folder = start(here, here / "run")
    checkpoint(folder)
    folder.close()

    def resumed(**settings: Any) -> int:
        with begin_run(None, run=here / "run", resume=True, overwrite=False, settings=settings) as opened:
            return opened.recipe.loop.steps

    assert resumed(**{"loop.steps": 7}) == 7
    with pytest.raises(LightningError, match="no worker launcher named 'moon'"):
        resumed(**{"loop.steps": 9, "runtime.launcher": "moon"})
    assert resumed() == 7, "a killed run goes on as it was, and what was refused is not kept"
    assert Run(here / "run").recipe.loop.steps == 7


CHANGES: dict[str, tuple[dict[str, list[tuple[str, Any, Any]]], str]] = {
    "an input": (
        {"train": [("1", "a", None), ("2", "x", None)]},
        "of 2 training tasks 1 are new or changed, and of the 2 before 1 are gone",
    ),
    "an answer": (
        {"train": [("1", "a", 3), ("2", "b", None)]},
        "of 2 training tasks 1 are new or changed, and of the 2 before 1 are gone",
    ),
    "an id": (
        {"train": [("7", "a", None), ("2", "b", None)]},
        "of 2 training tasks 1 are new or changed, and of the 2 before 1 are gone",
    ),
    "one more": (
        {"train": [("1", "a", None), ("2", "b", None), ("3", "c", None)]},
        "of 3 training tasks 1 are new or changed, and of the 2 before 0 are gone",
    ),
    "the order": ({"train": [("2", "b", None), ("1", "a", None)]}, "the 2 training tasks are in another order"),
    "validation": (
        {"validation": [("v", {"q": [1, 2.5, "é\0"]}, "other")]},
        "of 1 validation tasks 1 are new or changed, and of the 1 before 1 are gone",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_goes_on_with_the_tasks_that_it_started_with(here: Path, change: str) -> None:
    before: dict[str, list[tuple[str, Any, Any]]] = {
        "train": [("1", "a", None), ("2", "b", None)],
        "validation": [("v", {"q": [1, 2.5, "é\0"]}, "w")],
    }

    def source(which: str) -> Callable[[], list[Task]]:
        return lambda: [
            Task(id=id_, input=asked, answer=answer, metadata={"at": time.time()})
            for id_, asked, answer in given[which]
        ]

    def resume() -> None:
        with begin_run(recipe, run=here / "run", resume=True, overwrite=False, settings={}):
            pass

    recipe = load_recipe(
        here / "recipe.toml", {"tasks.train": source("train"), "tasks.validation": source("validation")}
    )
    given = before
    with begin_run(recipe, run=here / "run", resume=False, overwrite=False, settings={}):
        pass
    resume()
    given = {**before, **CHANGES[change][0]}
    with pytest.raises(
        RunFolderError,
        match=f"started with other tasks: {CHANGES[change][1]}; give it those, start a new run, or go on",
    ):
        resume()
    (here / "run" / "tasks.npz").unlink()
    resume()
    given = before
    with pytest.raises(RunFolderError, match="started with other tasks"):
        resume()


def test_three_hundred_thousand_tasks_are_told_apart_in_seconds() -> None:
    count = sized(3_000, 300_000)
    tasks = [Task(id=str(number), input=f"what is {number} times seven?", answer=number * 7) for number in range(count)]
    before = digest_tasks(TaskSets(train=tuple(tasks), validation=()))
    assert len(encode_digests(before)) < 8 * count + 1000
    tasks[5] = replace(tasks[5], answer=None)
    found = explain_other_tasks(before, digest_tasks(TaskSets(train=tuple(tasks), validation=())))
    assert found == f"of {count} training tasks 1 are new or changed, and of the {count} before 1 are gone"


def test_a_run_folder_is_for_its_owner_alone(here: Path) -> None:
    folder = start(here, here / "run")
    folder.close()
    folder.match_tasks(TaskSets(train=(), validation=()))
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in [folder.path, *folder.path.iterdir()] if path.name != ".lock"
    }
    folders = {"run", "checkpoints", "logs"}
    assert modes == {name: 0o700 if name in folders else 0o600 for name in modes}
    assert {"store.sqlite", "recipe.json", "run.json", "metrics.jsonl", "tasks.npz"} < set(modes)


def test_a_setting_that_changed_on_resume_is_shown_with_its_real_values(here: Path) -> None:
    start(here, here / "run").close()
    with pytest.raises(RunFolderError, match=r"'learner\.learning_rate' was not set, is 0\.0001"):
        RunFolder.resume(here / "run", {"learner.learning_rate": 1e-4})


def test_a_number_of_thousands_of_digits_in_a_recipe_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(f"seed = {'7' * 5000}\n")
    with pytest.raises(ConfigError, match=r"is not valid TOML: it has a whole number of thousands of digits$"):
        load_recipe(tmp_path / "recipe.toml")
