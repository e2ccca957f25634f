"""A box by a container command, where one runs here: the same promises as a box by unshare."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from harbor_folders import FORGERIES, write_tasks
from processes import wait_for

from lightningrl_tasks_harbor import BoxSettings, HarborTasks, open_box, read_task_folder, verify
from lightningrl_tasks_harbor.container_box import ContainerBox, find_engine, remove_orphans

IMAGE: Final = "localhost/lightningrl-harbor-test:1"
PROGRAMS: Final = (
    "bash sh cat head tail mkdir rm ls sleep timeout touch chmod ln setsid mktemp wc seq cmp sort env id ps awk tee"
)
HOLDER: Final = f"""
from lightningrl_tasks_harbor.container_box import ContainerBox, find_engine

box = ContainerBox(find_engine(), {IMAGE!r}, storage_mb=32)
print(box._name, flush=True)
box.run("sleep 1000", folder="/", environment={{"PATH": "/bin"}}, timeout_s=1000)
"""

pytestmark = [pytest.mark.long, pytest.mark.slow]


def ask(*words: str, content: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([find_engine() or "", *words], input=content, capture_output=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A container command with an image of this machine's programs: nothing is pulled."""
    engine = find_engine()
    if engine is None:
        pytest.skip("neither docker nor podman runs a container")
    root = tmp_path_factory.mktemp("root")
    for name in ("bin", "etc", "tmp", "root", "app"):
        (root / name).mkdir()
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n", encoding="utf-8")
    programs = [Path(path) for path in map(shutil.which, PROGRAMS.split()) if path]
    for path in programs:
        shutil.copy(path.resolve(), root / "bin" / path.name)
        for word in subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False).stdout.split():
            if word.startswith("/") and not (root / word[1:]).exists():
                (root / word[1:]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(word).resolve(), root / word[1:])
    archive = subprocess.run(["tar", "-C", str(root), "-c", "."], capture_output=True, check=True).stdout
    assert ask("import", "-", IMAGE, content=archive).returncode == 0
    yield engine
    built = ask("images", "-q", "--filter", "label=lightningrl.harbor.image").stdout.decode().split()
    ask("rmi", "-f", IMAGE, *built)


def test_gold_earns_everything_and_a_forgery_nothing(engine: str, tmp_path: Path) -> None:
    for path in write_tasks(tmp_path, 4):
        file = path / "environment" / "Dockerfile"
        file.write_text(file.read_text(encoding="utf-8").replace("ubuntu:24.04", IMAGE), encoding="utf-8")
    source = HarborTasks(tmp_path, box="container", trusted=False, validation_share=0)
    for task in source.tasks("train", seed=1, count=None):
        gold = source.gold(task)
        assert gold is not None and (source.reward(task, gold), gold["box"]) == (1.0, engine)
    folder = read_task_folder(tmp_path / "number-0")
    for forgery in FORGERIES.values():
        with open_box(folder, BoxSettings(box="container")) as opened:
            opened.box.run(forgery, folder=opened.folder, environment=opened.environment, timeout_s=20)
            assert max(verify(folder, opened).rewards.values(), default=0.0) == 0.0


def test_output_and_time_are_bounded(engine: str) -> None:
    box = ContainerBox(engine, IMAGE, storage_mb=32)
    many = box.run("seq 1 100000", folder="/", environment={"PATH": "/bin"}, timeout_s=60, limit=100).output
    late = box.run("echo begun; sleep 100", folder="/", environment={"PATH": "/bin"}, timeout_s=1)
    on = box.run("sleep 1000 & echo begun", folder="/", environment={"PATH": "/bin"}, timeout_s=60)
    box.close()
    assert many.startswith("1\n2\n") and many.endswith("100000\n") and len(many) < 200
    assert (late.output, late.is_late) == ("begun\n", True) and (on.output, on.status) == ("begun\n", 0)


def test_a_container_ends_with_its_process_and_what_does_not_is_removed_at_the_next_start(engine: str) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    name = holder.stdout.readline().decode().strip()
    assert ask("inspect", name).returncode == 0
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    wait_for(lambda: ask("inspect", name).returncode != 0, lambda: f"{name} is there")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    limits = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096", "--network", "none")
    for owner in (f"{boot}.{os.getpid()}.1", "another.1.1"):
        label = f"lightningrl.harbor={owner}"
        assert ask("run", "-d", "--label", label, "--name", owner, *limits, IMAGE, "/bin/sleep", "1000").returncode == 0
    assert remove_orphans(engine) == 1
    assert ask("inspect", "another.1.1").returncode == 0
    ask("rm", "-f", "another.1.1")
