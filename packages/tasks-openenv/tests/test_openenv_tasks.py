"""Tasks, gold and rewards of OpenEnv servers: the same task for the same seed, a gold that earns the most, one sentence
for each thing that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightningrl.errors import ConfigError
from lightningrl.types import Outcome, Task, Trajectory
from lightningrl_tasks_openenv import EnvironmentFailure, OpenEnvTasks
from lightningrl_tasks_openenv.episode import NoReward
from lightningrl_tasks_openenv.source import find_port

StartServer = Callable[..., str]
SUMS: dict[str, Any] = {"answer": "answer", "submit": "answer.text"}


def finished(task: Task, output: Any, reported: float | None = None) -> Trajectory:
    values = {} if reported is None else {"openenv": reported}
    return Trajectory(
        rollout_id="r", attempt=1, task=task, group_id="g", outcome=Outcome.SUCCEEDED, transitions=(), output=output,
        reported=values,
    )  # fmt: skip


async def test_two_hundred_tasks_twice_are_the_same_gold_earns_the_most_and_nothing_the_least(
    start_server: StartServer,
) -> None:
    source = OpenEnvTasks(url=start_server(), **SUMS)
    tasks, again, others = ([*source.tasks("train", seed=seed, count=200)] for seed in (1, 1, 2))
    assert tasks == again != others
    assert len({task.id for task in tasks}) == 200
    for _ in range(2):
        golds = [await source.reward(task, source.gold(task), finished(task, None)) for task in tasks]
        nothing = [await source.reward(task, {"actions": []}, finished(task, None)) for task in tasks]
        assert (set(golds), set(nothing)) == ({1.0}, {0.0})


async def test_a_split_has_the_servers_name_and_the_reference_is_not_in_the_input(start_server: StartServer) -> None:
    source = OpenEnvTasks(url=start_server(), splits={"validation": "test"}, **SUMS)
    tasks = list(source.tasks("validation", seed=0, count=None))
    assert len(tasks) == 250
    assert all(set(task.input) == {"question"} and isinstance(task.answer, int) for task in tasks)
    assert tasks[0].id.startswith("test-")


async def test_a_split_that_is_not_there_is_one_sentence(start_server: StartServer) -> None:
    with pytest.raises(ConfigError, match=r"has no split 'dev', but train, test; say which is meant: options\.splits"):
        list(OpenEnvTasks(url=start_server()).tasks("dev", seed=0, count=2))


async def test_a_larger_count_goes_on_where_a_smaller_one_ended(start_server: StartServer) -> None:
    source = OpenEnvTasks(url=start_server())
    some, more = (list(source.tasks("train", seed=4, count=count)) for count in (20, None))
    assert some == more[:20]
    assert len(more) == len(list(source.tasks("train", seed=4, count=1000))) == 300


async def test_without_a_task_api_tasks_are_seeds_without_end(start_server: StartServer) -> None:
    source = OpenEnvTasks(url=start_server("action"))
    tasks = list(source.tasks("train", seed=5, count=40))
    assert tasks == list(source.tasks("train", seed=5, count=40))
    assert tasks[:10] == list(source.tasks("train", seed=5, count=10))
    assert {task.input["seed"] for task in tasks}.isdisjoint(
        task.input["seed"] for task in source.tasks("validation", seed=5, count=40)
    )
    right = [
        sum([await source.replay(task, [{"tool": "act", "arguments": {"number": number}}]) for number in range(8)])
        for task in tasks[:3]
    ]
    assert right == [1.0, 1.0, 1.0]
    assert next(source.tasks("train", seed=5, count=None)) == tasks[0]


async def test_what_the_agent_reported_is_the_reward_and_another_output_has_none(start_server: StartServer) -> None:
    source = OpenEnvTasks(url=start_server(), **SUMS)
    (task,) = source.tasks("train", seed=1, count=1)
    assert await source.reward(task, {"actions": []}, finished(task, None, reported=0.3)) == 0.3
    assert await source.reward(task, "42", finished(task, None)) is None
    assert source.gold(Task(id="train-0", input={})) is None


async def test_steps_without_a_reward_are_an_error_that_names_step_async_unless_the_recipe_says_what_they_earn(
    start_server: StartServer,
) -> None:
    url = start_server("unrewarded")
    task = Task(id="train-0", input={})
    steps = [{"tool": "add", "arguments": {"a": 1, "b": 2}}]
    with pytest.raises(NoReward, match=r"none of 1 steps had a reward.*set the reward in its step_async"):
        await OpenEnvTasks(url=url).replay(task, steps)
    assert await OpenEnvTasks(url=url, unscored=0.0).replay(task, steps) == 0.0


async def test_a_refused_action_earns_nothing_and_the_episode_goes_on(start_server: StartServer) -> None:
    task = Task(id="train-0", input={})
    steps = [{"tool": "add", "arguments": {"a": "one"}}, {"tool": "add", "arguments": {"a": 1, "b": 2}}]
    assert await OpenEnvTasks(url=start_server()).replay(task, steps) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "give either url, of a server that runs, or command"),
        ({"url": "http://x", "command": "serve {port}"}, "give either url"),
        ({"url": "localhost:8000"}, "is no http"),
        ({"command": "serve --port 8000"}, "has no {port}"),
        ({"url": "http://x", "submit": "answer"}, "names no tool and argument; write 'answer.text'"),
        ({"url": "http://x", "max_calls": 0}, "max_calls 0 .* 1 or more"),
    ],
)
def test_options_that_cannot_be_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        OpenEnvTasks(**options)


def test_a_server_that_is_not_there_says_so_and_is_an_infrastructure_error() -> None:
    source = OpenEnvTasks(url=f"http://127.0.0.1:{find_port()}")
    with pytest.raises(EnvironmentFailure, match=r"does not answer .*; look whether it runs") as failure:
        list(source.tasks("train", seed=0, count=1))
    assert failure.value.status_code == 503


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("/no/server {port}", r"ended with 1; it wrote: .*No such file or directory: '/no/server'"),
        ("sh -c 'echo no model >&2; exit 3' {port}", "ended with 3; it wrote: no model"),
        (
            "sleep 600 {port}",
            r"did not answer on port \d+ within 2 s; have it listen on {port}, or raise start_timeout_s",
        ),
    ],
)
def test_a_command_that_starts_no_server_says_what_it_wrote(command: str, sentence: str) -> None:
    source = OpenEnvTasks(command=command, start_timeout_s=2)
    with pytest.raises(EnvironmentFailure, match=f"(?s){sentence}"):
        list(source.tasks("train", seed=0, count=1))


def test_a_server_elsewhere_needs_the_network_and_one_here_does_not() -> None:
    assert OpenEnvTasks(url="https://env.example.com").requires == {"network"}
    assert OpenEnvTasks(url="http://127.0.0.1:8000").requires == frozenset()
