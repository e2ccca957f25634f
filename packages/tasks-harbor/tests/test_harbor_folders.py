"""Task folders are read as Harbor writes them, come in an order that a seed fixes, and are refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harbor_folders import write_task, write_tasks

from lightningrl.errors import ConfigError
from lightningrl_tasks_harbor import BoxError, BoxSettings, HarborTasks, open_box, read_task_folder
from lightningrl_tasks_harbor.container_box import find_engine
from lightningrl_tasks_harbor.opening import check_box

WRITTEN_BY_HARBOR = """schema_version = "1.4"
source = "terminal-bench"
artifacts = []

[task]
name = "harbor/hello"
version = "1"
description = ""
authors = []
keywords = []

[metadata]
difficulty = "hard"

[verifier]
timeout_sec = 120.0
collect = []

[verifier.env]
PLAIN = "x"
FROM_HERE = "${HARBOR_TEST_HERE:-fallback}"

[agent]
timeout_sec = 90.0

[environment]
network_mode = "public"
build_timeout_sec = 600.0
os = "linux"
cpus = 1
memory_mb = 2048
storage_mb = 10240
mcp_servers = []

[environment.env]

[solution.env]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_task(tmp_path, "t", instruction="Do it.\n", solve="true", test="true")


def add(path: Path, text: str) -> None:
    """Add lines to a task.toml: those of a section that is there already take its place."""
    before = path.joinpath("task.toml").read_text(encoding="utf-8")
    for section in re.findall(r"^\[\w+\]$", text, re.MULTILINE):
        before = re.sub(rf"^{re.escape(section)}\n(?:[^\[].*\n)*", "", before, flags=re.MULTILINE)
    path.joinpath("task.toml").write_text(before + "\n" + text, encoding="utf-8")


def test_what_harbor_writes_is_read(folder: Path) -> None:
    folder.joinpath("task.toml").write_text(WRITTEN_BY_HARBOR, encoding="utf-8")
    task = read_task_folder(folder)
    assert (task.name, task.instruction, task.image, task.has_solution) == ("harbor/hello", "Do it.\n", None, True)
    assert (task.agent_timeout_s, task.verifier_timeout_s, task.cpus) == (90.0, 120.0, 1.0)
    assert (task.memory_mb, task.storage_mb, dict(task.metadata)) == (2048, 10240, {"difficulty": "hard"})
    assert task.verifier_environment == {"PLAIN": "x", "FROM_HERE": "fallback"}


def test_older_spellings_of_sizes_are_read(folder: Path) -> None:
    add(folder, '[environment]\nstorage = "1G"\nmemory = "512M"\nallow_internet = true\n')
    task = read_task_folder(folder)
    assert (task.storage_mb, task.memory_mb) == (1024, 512)


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ("x = [", "task.toml cannot be read"),
        ("[[steps]]\nname = 'a'\n", "it has several steps, and a rollout here has one instruction"),
        ("[environment]\nos = 'Windows'\n", "environment.os is 'Windows', and boxes are Linux"),
        ("[environment]\ngpus = 1\n", "environment.gpus is beyond the boxes of this package"),
        ("[environment]\nmcp_servers = [{ name = 'x' }]\n", "environment.mcp_servers is beyond"),
        ("[environment]\nspeed = 1\n", "[environment] has 'speed', which Harbor 0.26 does not know"),
        ("[environment]\nstorage = '1X'\n", "environment.storage is '1X', not '1G' or '512M'"),
        ("[environment]\ncpus = 0\n", "environment.cpus is 0, which is no number above 0"),
        (
            "[environment.env]\nKEY = '${HARBOR_TEST_NONE}'\n",
            "environment.env.KEY wants the variable ${HARBOR_TEST_NONE}",
        ),
        ("[verifier]\nenvironment_mode = 'separate'\n", "its verifier wants an environment of its own"),
        ("[agent]\nuser = 'agent'\n", "agent.user is 'agent', and a box has root alone"),
        ("[agent]\nnetwork_mode = 'allowlist'\n", "agent.network_mode is 'allowlist', and boxes are without a network"),
    ],
)
def test_a_task_that_no_box_runs_is_refused_in_a_sentence(toml: str, sentence: str, folder: Path) -> None:
    add(folder, toml)
    with pytest.raises(ConfigError) as error:
        read_task_folder(folder)
    assert str(error.value).startswith(f"task {folder}: ") and sentence in str(error.value)
    assert "\n" not in str(error.value).removesuffix("\n")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: (path / "instruction.md").unlink(), "no 'instruction.md'"),
        (lambda path: (path / "tests" / "test.sh").unlink(), "no 'tests/test.sh'"),
        (lambda path: (path / "environment" / "Dockerfile").unlink(), "neither environment/Dockerfile nor"),
        (
            lambda path: (path / "environment" / "docker-compose.yaml").touch(),
            "'environment/docker-compose.yaml' is beyond",
        ),
        (lambda path: add(path, ""), None),
    ],
)
def test_a_file_that_is_missing_or_too_many_is_named(
    change: Callable[[Path], Any], sentence: str | None, folder: Path
) -> None:
    change(folder)
    if sentence is None:
        read_task_folder(folder)
        return
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        read_task_folder(folder)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("RUN apt-get update && apt-get install -y tmux", "line 4: RUN 'apt-get' wants a network"),
        ("RUN true && \\\n  # why\n  pip install x", "line 4: RUN 'pip' wants a network"),
        ("FROM scratch", "line 4: FROM a second time (stages)"),
        ("COPY --from=x a b", "line 4: COPY with '--from=x'"),
        ("COPY nothing .", "line 4: COPY 'nothing' is no file of"),
        ("COPY ../task.toml .", "line 4: COPY '../task.toml' is no file of"),
        ("COPY Dockerfile /usr/bin/x", "line 4: COPY to '/usr/bin' is beyond"),
        ("RUN <<EOF", "line 4: RUN in this form"),
        ("ENV A='b", "line 4: ENV has a quote that nothing closes"),
        ("ENTRYPOINT x", "line 4: ENTRYPOINT is beyond a box by unshare"),
        ("USER app", "line 4: USER is beyond a box by unshare"),
    ],
)
def test_a_dockerfile_that_needs_an_image_is_refused_by_its_line(line: str, sentence: str, folder: Path) -> None:
    file = folder / "environment" / "Dockerfile"
    file.write_text(file.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"{file}, {sentence}")):
        list(source_of(folder.parent).tasks("train", seed=1, count=None))


def test_a_dockerfile_is_honoured_in_the_box(folder: Path) -> None:
    lines = [
        "ENV A=1 B='two words'",
        "ENV C $A$A",
        "COPY a.txt b.txt more/",
        "COPY a.txt renamed.txt",
        "COPY . /all",
        "WORKDIR sub",
    ]
    lines += ['RUN echo "$C" > made && \\', "    pwd >> made", 'CMD ["sleep"]', "LABEL x=y"]
    file = folder / "environment" / "Dockerfile"
    file.write_text(file.read_text(encoding="utf-8") + "\n".join(lines), encoding="utf-8")
    for name in ("a.txt", "b.txt"):
        file.with_name(name).write_text(name, encoding="utf-8")
    with open_box(read_task_folder(folder), BoxSettings(box="unshare", trusted=True)) as opened:
        command = "cat made; echo $B; cat ../more/*.txt ../renamed.txt; ls /all; ls -d /solution /tests"
        output = opened.box.run(command, folder=opened.folder, environment=opened.environment, timeout_s=20).output
    assert (
        output.startswith("11\n/app/sub\ntwo words\na.txtb.txta.txtDockerfile\na.txt\nb.txt\n")
        and output.count("No such file") == 2
    )


def test_a_run_line_that_fails_says_what_it_said(folder: Path) -> None:
    file = folder / "environment" / "Dockerfile"
    file.write_text("FROM x\nWORKDIR /app\nRUN echo no such thing; exit 7\n", encoding="utf-8")
    opening = open_box(read_task_folder(folder), BoxSettings(box="unshare", trusted=True))
    with pytest.raises(BoxError, match="ended with status 7: no such thing"), opening:
        pass


@pytest.mark.parametrize(("status", "box"), [(127, "podman"), (125, "unshare"), (1, "unshare")])
def test_a_container_command_that_answers_and_starts_no_container_opens_no_box(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int,
    box: str,
) -> None:
    """`podman info` answers on a machine within another, where no container starts. A container that starts and has
    not its program ends with status 127."""
    programs = tmp_path / "programs"
    programs.mkdir()
    run = f"echo warning >&2; echo 'no cgroup for you' >&2; exit {status}"
    (programs / "podman").write_text(f'#!/bin/sh\ncase "$1" in run) {run};; esac\n', encoding="utf-8")
    (programs / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    find_engine.cache_clear()
    try:
        assert check_box(read_task_folder(folder), BoxSettings(trusted=True)) == box
        said = "podman is here and opens no box: no cgroup for you; look at `podman info`"
        assert (said in caplog.text) == (box == "unshare")
        if box == "unshare":
            with pytest.raises(ConfigError, match="neither docker nor podman runs a container here; start one"):
                check_box(read_task_folder(folder), BoxSettings(box="container"))
    finally:
        find_engine.cache_clear()


def test_what_only_a_container_gives_is_refused_where_there_is_none(folder: Path) -> None:
    for settings, sentence in (
        ({"trusted": False, "box": "unshare"}, "trusted = false: a box by unshare shares the kernel"),
        ({"network": True, "box": "unshare"}, "network = true: a box by unshare has none"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            next(HarborTasks(folder.parent, validation_share=0, **settings).tasks("train", seed=1, count=1))  # type: ignore[arg-type]
    add(folder, '[environment]\ndocker_image = "org/image:1"\n')
    with pytest.raises(ConfigError, match=r"a box by unshare has no images \('org/image:1'\)"):
        next(source_of(folder.parent).tasks("train", seed=1, count=1))


def source_of(folder: Path) -> HarborTasks:
    return HarborTasks(folder, box="unshare", trusted=True, validation_share=0)


def test_a_seed_fixes_the_order_and_a_split_keeps_its_tasks_when_others_come(tmp_path: Path) -> None:
    write_tasks(tmp_path, 24)
    source = HarborTasks(tmp_path, box="unshare", trusted=True, validation_share=0.3)
    names = {split: [task.id for task in source.tasks(split, seed=3, count=None)] for split in ("train", "validation")}
    assert [task.id for task in source.tasks("train", seed=3, count=5)] == names["train"][:5]
    assert names["train"] != [task.id for task in source.tasks("train", seed=4, count=None)]
    assert len(names["train"]) + len(names["validation"]) == 24 and not set(names["train"]) & set(names["validation"])
    write_tasks(tmp_path, 40)
    later = [task.id for task in source.tasks("validation", seed=3, count=None)]
    assert [name for name in later if name in names["validation"]] == names["validation"]


def test_folders_named_after_splits_are_the_splits(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("validation", 2), ("hard", 1)):
        write_tasks(tmp_path / split, count)
    source = HarborTasks(tmp_path, box="unshare", trusted=True)
    counts = {split: len(list(source.tasks(split, seed=1, count=None))) for split in ("train", "validation", "hard")}
    assert counts == {"train": 3, "validation": 2, "hard": 1}
    with pytest.raises(ConfigError, match="has no folder 'test'; a split is 'train', 'validation', or a folder of it"):
        list(source.tasks("test", seed=1, count=None))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"folder": "/nowhere"}, "options.folder: no folder '/nowhere'"),
        ({"box": "vm"}, "options.box: 'vm' is none of"),
        ({"validation_share": 2}, "options.validation_share: 2 is no share"),
        ({"max_turns": 0}, "options.max_turns: 0 is not above 0"),
        ({"host_folders": ["relative"]}, "options.host_folders: no 'relative'"),
    ],
)
def test_an_option_that_is_none_is_named(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        HarborTasks(**{"folder": tmp_path, **options})
    with pytest.raises(ConfigError, match=r"has no task for 'train'; a task is a folder with a task\.toml"):
        list(HarborTasks(tmp_path).tasks("train", seed=1, count=None))
