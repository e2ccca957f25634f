"""What Harbor's tests pay in a box: the solution everything, nothing nothing, part of the work a part, a forged reward nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harbor_folders import FORGERIES, write_task, write_tasks
from sizes import sized

from lightningrl import Task
from lightningrl.errors import ConfigError, RewardError
from lightningrl_tasks_harbor import BoxSettings, HarborTasks, Verdict, open_box, read_task_folder, verify

TRUSTED = BoxSettings(box="unshare", trusted=True)


def leave(path: Path, command: str = "true") -> Verdict:
    """The verdict on a box in which an agent ran one command."""
    task = read_task_folder(path)
    with open_box(task, TRUSTED) as opened:
        opened.box.run(command, folder=opened.folder, environment=opened.environment, timeout_s=20)
        return verify(task, opened)


def source_of(folder: Path) -> HarborTasks:
    return HarborTasks(folder, box="unshare", trusted=True, validation_share=0)


def pay(folder: Path, seed: int) -> dict[str, tuple[float, float]]:
    """For each task what its solution earns, and what an agent earns that does nothing."""
    source, paid = source_of(folder), dict[str, tuple[float, float]]()
    for task in source.tasks("train", seed=seed, count=None):
        nothing = {"verdict": leave(folder / task.input["folder"]).as_json()}
        paid[task.id] = source.reward(task, source.gold(task)), source.reward(task, nothing)
    return paid


@pytest.mark.slow
def test_gold_earns_everything_and_nothing_earns_nothing_twice_with_the_same_seed(tmp_path: Path) -> None:
    write_tasks(tmp_path, sized(12, 200))
    first = pay(tmp_path, seed=7)
    assert set(first.values()) == {(1.0, 0.0)} and len(first) == sized(12, 200)
    if sized(False, True):
        again = pay(tmp_path, seed=7)
        assert list(again.items()) == list(first.items())


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_reward_earns_nothing(forgery: str, tmp_path: Path) -> None:
    for path in write_tasks(tmp_path, 4)[:: sized(3, 1)]:
        verdict = leave(path, FORGERIES[forgery])
        assert max(verdict.rewards.values(), default=0.0) == 0.0, verdict


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler here")
def test_a_library_that_the_agent_has_every_program_load_earns_nothing(tmp_path: Path) -> None:
    code = "#include <stdio.h>\\n__attribute__((destructor)) void f(void)"
    code += '{ FILE *f = fopen("/logs/verifier/reward.txt", "w"); if (f) { fputs("1", f); fclose(f); } }'
    preload = f"printf '{code}' > x.c && cc -shared -fPIC -o /x.so x.c && echo /x.so > /etc/ld.so.preload"
    for place in ("/", "/app"):
        verdict = leave(write_tasks(tmp_path / place[1:], 1)[0], preload.replace("/x.so", f"{place.rstrip('/')}/x.so"))
        assert max(verdict.rewards.values(), default=0.0) == 0.0, verdict


def test_tests_see_what_the_agent_left_in_its_folder_and_in_the_tasks_artifacts_and_nothing_else(
    tmp_path: Path,
) -> None:
    seen = "ls -A /app /data /other; stat -c %a /app/run.sh; readlink /app/link; cat /data/file"
    path = write_task(
        tmp_path,
        "t",
        instruction="Do it.",
        solve="true",
        test=f"({seen}) > /app/seen.txt 2>&1; cat /app/seen.txt; echo 1 > /logs/verifier/reward.txt",
        docker="RUN mkdir /data /other && touch gone.txt /other/kept.txt\nWORKDIR sub\n",
    )
    text = (path / "task.toml").read_text(encoding="utf-8")
    more = 'artifacts = ["/data", { source = "/none" }]\n'
    (path / "task.toml").write_text(more + text, encoding="utf-8")
    made = "cd ..; rm gone.txt; echo a > run.sh; chmod 775 run.sh; ln -s run.sh link; mkfifo pipe; echo b > /data/file; rm /other/*"
    verdict = leave(path, made)
    assert verdict.rewards == {"reward": 1.0}
    seen = "/app: link run.sh seen.txt sub /data: file /other: kept.txt 775 run.sh b"
    assert " ".join(verdict.report.split()) == seen
    (path / "task.toml").write_text('artifacts = ["../x"]\n' + text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"artifacts has '\.\./x', which is no absolute path; mend task\.toml"):
        read_task_folder(path)


def test_part_of_the_work_earns_a_part(tmp_path: Path) -> None:
    path = write_tasks(tmp_path, 3)[2]
    name = path.joinpath("instruction.md").read_text(encoding="utf-8").split()[4]
    source, task = source_of(tmp_path), Task(id="t", input={})
    output = {"verdict": leave(path, f"touch made/{name}").as_json()}
    assert output["verdict"]["rewards"] == {"reward": 0.25, "files": 1.0} and source.reward(task, output) == 0.25
    files = HarborTasks(tmp_path, box="unshare", reward="files")
    assert files.reward(task, output) == 1.0
    with pytest.raises(
        RewardError, match=r"reward\.json has 'reward', 'files' and no 'speed'; choose one with options.reward"
    ):
        HarborTasks(tmp_path, box="unshare", reward="speed").reward(task, output)


@pytest.mark.parametrize(
    ("test", "problem"),
    [
        ("exit 3", "tests/test.sh ended with status 3 and wrote no reward"),
        ("sleep 60", "tests/test.sh ran longer than 0.5 s"),
        ("echo nan > /logs/verifier/reward.txt", "a reward is no finite number"),
        ("echo well > /logs/verifier/reward.txt", "reward.txt cannot be read"),
        ('echo \'{"a": "1"}\' > /logs/verifier/reward.json', "reward.json holds something that is no number"),
        ("echo 1 > /logs/verifier/reward.json", "reward.json holds no object of numbers"),
        ("ln -s /tests/x /logs/verifier/reward.txt", "tests/test.sh ended with status 0 and wrote no reward"),
    ],
)
def test_tests_that_pay_nothing_say_why(test: str, problem: str, tmp_path: Path) -> None:
    path = write_task(tmp_path, "t", instruction="Do it.", solve="true", test=test)
    text = path.joinpath("task.toml").read_text(encoding="utf-8").replace("20.0", "0.5", 1)
    path.joinpath("task.toml").write_text(text, encoding="utf-8")
    verdict = leave(path)
    assert (dict(verdict.rewards), verdict.problem) == ({}, problem)


def test_an_output_of_another_agent_is_no_zero(tmp_path: Path) -> None:
    write_tasks(tmp_path, 1)
    with pytest.raises(RewardError, match=r"the output has no verdict of tests/test\.sh"):
        source_of(tmp_path).reward(Task(id="t", input={}), "done")


def test_an_agent_that_fills_the_disk_earns_nothing(tmp_path: Path) -> None:
    verdict = leave(write_tasks(tmp_path, 1)[0], "head -c 64M /dev/zero > /app/big; head -c 1M /dev/zero > /app/more")
    assert not verdict.rewards and verdict.problem
