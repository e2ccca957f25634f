"""A coding harness as the agent, through worker, server and store: its folders, its check, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from processes import all_ended
from sizes import PATIENCE_S
from small_harness import ROW, reply

from lightningrl.types import Outcome, SamplingSettings, Task, Trajectory
from lightningrl_client.runtime.harnesses.folder import FolderError, Room
from lightningrl_client.runtime.harnesses.guard import clear
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import WholePath, running_services

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholePath]:
    """One server for all of these tests."""
    engine = ScriptedEngine(tiny_tokenizer(), reply=reply, chunk_tokens=32)
    async with running_services(tmp_path_factory.mktemp("path"), engine=engine) as path:
        yield path


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the workers make theirs; empty again in the end."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def has_namespaces() -> bool:
    return shutil.which("unshare") is not None and not subprocess.run(["unshare", "-rnpfm", "true"]).returncode


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@localhost")
    subprocess.run(["git", *who, "-C", str(folder), *words], check=True, capture_output=True)


async def emptied(folder: Path) -> None:
    """Returns when nothing is left: the guard works when its worker has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while list(folder.iterdir()):
            await asyncio.sleep(0.02)


async def run(
    path: WholePath, base: Path, agent: Mapping[str, Any], tasks: Mapping[str, Any], **options: Any
) -> list[Trajectory]:
    everything = ("files", "revision", "check", "check_files")
    async with path.workers(
        {"harness": ROW, "from_task": everything, **agent}, base_dir=base, workers=1, concurrency=4
    ):
        wanted = {rid: task if isinstance(task, Task) else Task(id=rid, input=task) for rid, task in tasks.items()}
        roomy = SamplingSettings(max_tokens=1024)  # a character is a token, and commands have long paths
        return await path.run_tasks(wanted, sampling=roomy, **options)


async def test_four_rollouts_at_once_have_folders_and_homes_of_their_own_and_are_checked_before_these_go(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    template = tmp_path / "project"
    template.mkdir()
    (template / "name.txt").write_text("of the template\n")
    command = 'echo RID > "$HOME/mine"; echo RID > answer.txt; ls -A "$HOME" > home.txt; pwd > place.txt; cat name.txt'
    tasks = {
        f"apart-{number}": Task(
            id="x",
            input=f"do «{command.replace('RID', str(number))}»",
            metadata={
                "files": {"given/part.txt": f"of task {number}\n"},
                "check_files": {"answer.test": f"{number}\n"},
                "check": f"diff answer.txt answer.test && grep -q 'task {number}' given/part.txt && cat answer.txt",
            },
        )
        for number in range(4)
    }
    trajectories = await run(path, tmp_path, {"template": "project"}, tasks)
    places = set()
    for number, trajectory in enumerate(trajectories):
        assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
        assert trajectory.output["text"] == "It is done."
        assert trajectory.output["check"] == {"status": 0, "passed": None, "failed": None, "said": str(number)}
        diff = trajectory.output["diff"]
        assert re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE) == ["answer.txt", "home.txt", "place.txt"]
        assert "+mine\n" in diff and "of the template" not in diff
        places |= set(re.findall(r"^\+(/.*)$", diff, re.MULTILINE))
        assert [call.prompt_ids.size > 0 for call in trajectory.transitions] == [True, True]
        (tool,) = trajectory.tool_calls
        assert (tool.name, tool.transition_id) == ("run", trajectory.transitions[0].id)
        text = tiny_tokenizer().decode(trajectory.transitions[1].prompt_ids.tolist())
        assert "of the template" in text
    assert len(places) == 4 and all(place.startswith(str(rooms)) for place in places)
    await emptied(rooms)
    assert (template / "name.txt").read_text() == "of the template\n"


async def test_a_rollout_begins_with_a_git_revision_without_its_history_and_a_task_may_name_another(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    git(repository, "init", "--quiet")
    for version in ("one", "two"):
        (repository / "version.txt").write_text(f"{version}\n")
        git(repository, "add", "--all")
        git(repository, "commit", "--quiet", "-m", f"version {version}")
        git(repository, "tag", version)
    task = "do «cat version.txt > seen.txt; git log --format=%s > log.txt; rm version.txt»"
    agent = {"repository": "repository", "revision": "two"}
    tasks = {"newest": task, "older": Task(id="x", input=task, metadata={"revision": "one"})}
    newest, older = await run(path, tmp_path, agent, tasks)
    for trajectory, version in ((newest, "two"), (older, "one")):
        assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
        added = re.findall(r"^\+(?!\+)(.*)$", trajectory.output["diff"], re.MULTILINE)
        assert added == ["start", version]
        assert f"-{version}\n" in trajectory.output["diff"]
    assert (repository / "version.txt").exists()
    await emptied(rooms)


async def test_a_harness_whose_time_is_over_may_say_its_last_words_and_its_tools_end_with_it(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    pids, words = tmp_path / "pids", tmp_path / "words"
    hang = f"setsid sleep 100000 & echo $! >> {pids}; echo $$ >> {pids}; sleep 100000"
    agent = {"environment": {"LAST_WORDS": str(words)}}
    async with all_ended(pids):
        (trajectory,) = await run(path, tmp_path, agent, {"hangs": f"do «{hang}»"}, timeout_s=5.0)
    assert trajectory.outcome is Outcome.TIMEOUT
    assert words.read_text() == "flushed"
    assert len(pids.read_text().split()) == 2
    await emptied(rooms)


async def test_what_a_program_of_its_own_session_that_survives_the_harness_does_is_over_before_the_check(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    left = f"env -i PATH=\"$PATH\" setsid sh -c 'echo $$ >> {pids}; exec sleep 100000' >/dev/null 2>&1 & sleep 0.5"
    agent = {"check": f"! grep -q '^State:.[RSD]' /proc/$(cat {pids})/status"}
    async with all_ended(pids):
        (trajectory,) = await run(path, tmp_path, agent, {"leaves": f"do «{left}»"})
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    assert trajectory.output["check"]["status"] == 0
    await emptied(rooms)


async def test_a_column_of_a_data_set_is_no_command_no_file_and_no_revision_unless_the_recipe_says_so(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    row = {
        "check": f"touch {tmp_path}/ran",
        "files": {"given.txt": "x\n"},
        "check_files": {"late.txt": "x\n"},
        "revision": "--output=/x",
    }
    tasks = {"row": Task(id="x", input="do «ls > seen.txt»", metadata=row)}
    for named in ((), ("files",)):
        agent = {"check": "ls; exit 7", "from_task": named}
        (trajectory,) = await run(path, tmp_path, agent, {f"row-{len(named)}": tasks["row"]})
        assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
        check = trajectory.output["check"]
        assert (check["status"], check["said"].split()) == (7, ["given.txt"] * len(named) + ["seen.txt"])
    assert not (tmp_path / "ran").exists()
    await emptied(rooms)


PROBE = """#!/bin/sh
{python} -c 'import socket; socket.create_connection(("127.0.0.1", {port}), 5)' && echo reached >> {found} || echo ran >> {found}
"""
CONFIGS = (
    "git config -f ../start.git/config core.fsmonitor $P; git config -f .git/config core.fsmonitor $P",
    "git config filter.z.clean $P; echo '* filter=z' > .gitattributes; cp -r .git/config ../start.git/",
    "git config core.hooksPath $H; git config diff.external $P; cp $P .git/hooks/post-index-change",
    "git config diff.z.textconv $P; git config diff.z.command $P; echo '* diff=z' > .gitattributes",
    "mkdir -p ../home/.config/git; cp .git/config ../home/.gitconfig; git config -f ../home/.config/git/config core.fsmonitor $P",
    "git init -q sub; git -C sub commit -q --allow-empty -m x; git config -f sub/.git/config core.fsmonitor $P",
)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
async def test_git_that_tells_what_a_harness_changed_runs_nothing_that_the_harness_wrote(
    number: int, path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    found = tmp_path / "found"
    probe = PROBE.format(python=sys.executable, port=1, found=found)
    files = {"hooks/probe.sh": probe, "hooks/post-index-change": probe, "kept.txt": "before\n"}
    command = f"export P=$PWD/hooks/probe.sh H=$PWD/hooks; {CONFIGS[number]}; echo after > kept.txt"
    task = Task(id="x", input=f"do «{command}»", metadata={"files": files})
    (trajectory,) = await run(path, tmp_path, {}, {f"config-{number}": task})
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    assert "-before\n+after\n" in trajectory.output["diff"]
    assert not found.exists()
    await emptied(rooms)


async def test_a_folder_that_a_harness_replaces_by_a_link_is_neither_read_nor_written_nor_removed(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    (victim / "deep").mkdir(parents=True)
    (victim / "deep/stdout").write_text("kept")
    (victim / "deep").chmod(0o555)
    (victim / "stdout").write_text("kept")
    tasks = {
        name: f"do «{command}»"
        for name, command in {
            "work": f"cd ..; mv work was; ln -s {victim} work",
            "log": f"cd ..; mv log was; ln -s {victim} log",
            "file": f"cd ..; ln -sf {victim}/stdout log/stdout",
            "room": f"cd ../..; for r in *; do mv $r $r.was; ln -s {victim} $r; done",
            "objects": "cd ..; echo broken > start.bundle",
        }.items()
    }
    for name, task in tasks.items():  # the last of them meddles with all that there are
        (trajectory,) = await run(path, tmp_path, {"check": "echo checked"}, {f"link-{name}": task})
        if name == "file":
            assert trajectory.outcome is Outcome.SUCCEEDED and trajectory.output["check"]["said"] == "checked"
        elif name == "objects":
            assert "start.bundle" in (trajectory.error or "")
        else:
            assert "the harness has removed or replaced its folder" in (trajectory.error or "")
    assert sorted(str(place.relative_to(victim)) for place in victim.rglob("*")) == ["deep", "deep/stdout", "stdout"]
    assert (victim / "stdout").read_text() == (victim / "deep/stdout").read_text() == "kept"
    assert (victim / "deep").stat().st_mode & 0o777 == 0o555


DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        with open(sys.argv[1], "w") as file:
            file.write(f"{os.getpid()} ")
        for fd in (0, 1, 2):
            os.close(fd)
        os.execve("/bin/sleep", ["sleep", "100000"], {})
    os._exit(0)
os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
async def test_a_process_that_left_its_session_its_folder_and_its_environment_ends_with_the_rollout(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    files = {"daemon.py": DAEMON}
    task = Task(id="x", input=f"do «{sys.executable} daemon.py {pids}»", metadata={"files": files})
    async with all_ended(pids):
        agent = {"check": f"! grep -q '^State:.[RSD]' /proc/$(cat {pids})/status"}
        (trajectory,) = await run(path, tmp_path, agent, {"daemon": task})
        assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
        assert trajectory.output["check"]["status"] == 0
    await emptied(rooms)


async def test_an_input_that_no_argument_can_be_is_told_in_a_sentence(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    tasks = {
        "nul": "a\0b",
        "long": "x" * 200_000,
        "nul-in-a-path": Task(id="x", input="hello", metadata={"files": {"a\0b": "x"}}),
    }
    nul, long, of_path = (trajectory.error or "" for trajectory in await run(path, tmp_path, {}, tasks))
    assert "holds a NUL character; take it out of the task's input" in nul
    assert "its arguments are longer than the system takes (128 kB each on Linux); give the task on standard" in long
    assert "cannot be written: give a path within the folder" in of_path
    await emptied(rooms)


REMOVED = """
import os, time
held = []
for number in range(8):
    held.append(open("x", "wb"))
    os.unlink("x")
    held[-1].write(bytes(4 << 20))
    held[-1].flush()
time.sleep(20)
"""
"""Fills files that are in no folder any more."""


async def test_disk_and_output_are_bounded_and_a_link_leads_no_file_of_the_check_out_of_the_folder(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    tasks = {
        "one-file": "do «cat /dev/zero > big; sleep 100000»",
        "many-files": "do «i=0; while true; do i=$((i+1)); head -c 1000000 /dev/zero > $i; done»",
        "removed": Task(id="x", input=f"do «setsid {sys.executable} r.py»", metadata={"files": {"r.py": REMOVED}}),
        "link": Task(
            id="x",
            input=f"do «mkdir sub; ln -s {outside} sub/tests; seq 200000 >&2»",
            metadata={"check_files": {"sub/tests/t.txt": "1\n"}, "check": "ls sub/tests; seq 50000"},
        ),
        "bad-path": Task(id="x", input="hello", metadata={"files": {"../there": "x"}}),
        "no-model-and-no-key-for-the-check": Task(id="x", input="hello", metadata={"check": "env"}),
    }
    one, many, removed, link, bad, check = await run(path, tmp_path, {"disk_mb": 16}, tasks)
    for trajectory in (one, many):
        assert trajectory.outcome is Outcome.AGENT_ERROR or "big" not in trajectory.output["diff"]
    for trajectory in (many, removed):
        assert "more than agent.disk_mb = 16; it was ended" in (trajectory.error or "")
    assert link.outcome is Outcome.SUCCEEDED, link.error
    assert list(outside.iterdir()) == []
    assert len(link.output["check"]["said"]) == 2_000 and link.output["check"]["said"].endswith("50000")
    assert "the file '../there' cannot be written: give a path within the folder" in (bad.error or "")
    assert "OPENAI" not in check.output["check"]["said"] and "HOME=" in check.output["check"]["said"]
    await emptied(rooms)


async def test_folders_nested_by_the_thousand_and_files_full_of_holes_stop_neither_the_worker_nor_the_clearing(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path / "room")
    room.furnish(None, tmp_path, None, {})
    for number in range(8):
        file = room.work / f"{number}.txt"
        file.write_text("word\n" * 2_000)
        os.truncate(file, 15 * 2**20)
    tracemalloc.start()
    assert room.diff().endswith("the diff was cut at 262144 characters\n")
    assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    tracemalloc.stop()
    assert room.used_bytes() < 2**20
    nest = f"import os; os.chdir({str(room.work)!r}); [(os.mkdir('a'), os.chdir('a')) for _ in range(1_200)]; os.chmod('.', 0)"
    subprocess.run([sys.executable, "-c", nest], check=True)
    assert room.used_bytes() < 2**20
    subprocess.run([sys.executable, "-c", nest.replace("'a'", "'b' * 200")], check=True)
    with pytest.raises(FolderError, match="nested folders more than 3000 characters deep"):
        room.used_bytes()
    assert clear(str(room.place)) and not room.place.exists()


async def test_what_a_harness_left_in_its_home_and_temporary_folder_does_not_reach_the_check(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    meddle = "git config --global alias.st '!true'; mkdir $HOME/.config $XDG_DATA_HOME -p; echo x > $TMPDIR/seed"
    check = "ls -A $HOME $TMPDIR; git st || test -w $HOME"
    (trajectory,) = await run(path, tmp_path, {"check": check}, {"meddles": f"do «{meddle}»"})
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    result = trajectory.output["check"]
    assert result["status"] == 0 and "'st' is not a git command" in result["said"]
    assert not any(name in result["said"] for name in (".gitconfig", ".config", ".local", "seed"))
    await emptied(rooms)


async def test_a_harness_that_fails_says_why(path: WholePath, rooms: Path, tmp_path: Path) -> None:
    row = {"command": ["/bin/sh", "-c", "echo on stdout; echo $MODEL >&2; exit 3"], "environment": {"MODEL": "{model}"}}
    agent = {"harness": row, "model": "mine"}
    (trajectory,) = await run(path, tmp_path, agent, {"fails": "hello"})
    assert trajectory.outcome is Outcome.AGENT_ERROR
    assert "'sh' ended with status 3\nmine\non stdout" in (trajectory.error or "")
    await emptied(rooms)


async def test_a_row_writes_files_into_home_and_the_task_may_come_by_stdin(
    path: WholePath, rooms: Path, tmp_path: Path
) -> None:
    row = {
        "command": ["/bin/sh", "-c", 'cat "$HOME/.small/settings" -; test "$1" = " -x"', "sh", "{input}"],
        "files": {".small/settings": '{"url": "{base_url}", "as": "{model}"}\n'},
        "stdin": "{input}\n",
    }
    (trajectory,) = await run(path, tmp_path, {"harness": row}, {"by-stdin": "-x"})
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    settings, said = trajectory.output["text"].split("\n")
    assert json.loads(settings)["url"].endswith("/rollouts/by-stdin/attempts/1/v1")
    assert json.loads(settings)["as"] == "policy" and said == "-x"
    assert os.environ["HOME"] != trajectory.output["text"]


KILLER = """
import os, sys
pid = os.getpid()
while pid > 1 and b"keeper.py" not in open(f"/proc/{pid}/cmdline", "rb").read():
    pid = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.kill(pid, 9) if pid > 1 else os.kill(1, 9)
        for fd in (0, 1, 2):
            os.close(fd)
        os.execve("/bin/sleep", ["sleep", sys.argv[1]], {})
    os._exit(0)
os.wait()
"""
"""Kills the keeper above it, then sleeps with nothing of the rollout's in its folder, environment or session."""


@pytest.mark.skipif(not has_namespaces(), reason="no user namespaces here")
async def test_a_program_in_a_box_kills_no_keeper_and_does_not_outlive_its_rollout(
    path: WholePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = f"98765{os.getpid()}"
    task = Task(id="x", input=f"do «{sys.executable} k.py {seconds}»", metadata={"files": {"k.py": KILLER}})
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        (trajectory,) = await run(path, tmp_path, {"network": "gateway"}, {"killer": task})
        await emptied(Path(short))
    left = subprocess.run(["pgrep", "-f", f"^sleep {seconds}$"], capture_output=True, text=True, check=False).stdout
    for pid in left.split():
        os.kill(int(pid), 9)
    assert not left.split()
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error


@pytest.mark.skipif(not has_namespaces(), reason="no user namespaces here")
async def test_in_a_box_a_harness_reaches_the_gateway_and_nothing_else_and_its_check_nothing(
    path: WholePath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = f"{sys.executable} -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)'"
    gateway = urlsplit(path.url)
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        elsewhere = f"127.0.0.1 {listener.getsockname()[1]}"
        task = f"do «{connect} {elsewhere} || echo refused > elsewhere.txt; id -u > user.txt»"
        agent = {"network": "gateway", "check": f"! {connect} {gateway.hostname} {gateway.port}"}
        (trajectory,) = await run(path, tmp_path, agent, {"boxed": task})
        await emptied(Path(short))
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    assert len(trajectory.transitions) == 2
    assert re.findall(r"^\+(?!\+)(.*)$", trajectory.output["diff"], re.MULTILINE) == ["refused", str(os.getuid())]
    assert trajectory.output["check"]["status"] == 0, trajectory.output["check"]
