"""A box by unshare: what a command in it sees and may do, its bounds, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from processes import is_alive, wait_for
from sizes import PATIENCE_S, sized

from lightningrl_tasks_harbor.boxes import PLAIN_PATH, BoxError, BoxGone, CommandResult, pack
from lightningrl_tasks_harbor.container_box import ContainerBox
from lightningrl_tasks_harbor.namespace_box import NamespaceBox

HOLDER = """
import sys
from lightningrl_tasks_harbor.namespace_box import NamespaceBox

box = NamespaceBox(storage_mb=32)
print("open", flush=True)
box.run(sys.argv[1], folder="/", environment={"PATH": "/usr/bin:/bin"}, timeout_s=1000)
"""


@pytest.fixture
def box() -> Iterator[NamespaceBox]:
    box = NamespaceBox(storage_mb=16)
    yield box
    box.close()


def run(box: NamespaceBox, command: str, *, timeout_s: float = 60, limit: int = 10_000) -> CommandResult:
    return box.run(command, folder="/", environment={"PATH": PLAIN_PATH}, timeout_s=timeout_s, limit=limit)


def test_a_command_sees_the_programs_of_the_host_and_none_of_its_files(box: NamespaceBox) -> None:
    assert run(box, "id -u; pwd; hostname").output == "0\n/\nbox\n"
    assert run(box, f"cat {__file__}; cat /etc/shadow; ls /root /home").output.count("No such file") == 2
    assert run(box, "env | sort").output.split("\n")[0].startswith("PATH=") or "KEY" not in run(box, "env").output


def test_a_command_may_not_mount_trace_or_write_to_the_host(box: NamespaceBox) -> None:
    for command in (
        "touch /usr/x",
        "mount -t tmpfs x /mnt",
        "ls /proc/1/fd/",
        "umount /usr",
        "kill -9 1; ls /proc/1/root/",
    ):
        assert run(box, command).status != 0, command
    assert run(box, "true").status == 0


def test_there_is_no_network_but_the_box_itself(box: NamespaceBox) -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname()); print('here')"
    assert run(box, f'python3 -c "{code}"').output == "here\n"
    assert (
        "unreachable" in run(box, "python3 -c \"import socket; socket.create_connection(('192.0.2.1', 80), 5)\"").output
    )


def test_output_time_processes_and_disk_are_bounded(box: NamespaceBox) -> None:
    many = run(box, "seq 1 100000", limit=100)
    assert many.output.startswith("1\n2\n") and many.output.endswith("100000\n") and "bytes left out]" in many.output
    assert len(many.output) < 200
    late = run(box, "echo begun; sleep 100", timeout_s=0.3)
    assert (late.is_late, late.output) == (True, "begun\n")
    assert (
        "No space left"
        in run(box, "head -c 64M /dev/zero > /tmp/big").output + run(box, "head -c 9M /dev/zero > /tmp/b").output
    )
    box.stop_processes()
    forks = 'python3 -c \'import os\nfor n in range(9999): os.fork() or os.execlp("sleep", "sleep", "50")\''
    assert "Resource temporarily unavailable" in run(box, forks).output
    box.stop_processes()
    assert run(box, "true").status == 0


def test_a_process_that_goes_on_is_not_waited_for_and_ends_when_it_is_told(box: NamespaceBox) -> None:
    assert run(box, "sleep 5000 & echo begun").output == "begun\n"
    assert "sleep 5000" in run(box, "ps ax").output
    box.stop_processes()
    assert "sleep 5000" not in run(box, "ps ax").output


def test_files_go_in_and_come_out_but_links_do_not(box: NamespaceBox, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("echo hello", encoding="utf-8")
    box.put(pack([(tmp_path / "a.sh", "b.sh")]), "/app")
    assert run(box, "/app/b.sh > /app/out; ln -s /app/out /app/link; mkfifo /app/pipe").status == 0
    assert box.read("/app/out", 100) == b"hello\n" and box.read("/app/out", 2) == b"he"
    assert [box.read(path, 100) for path in ("/app/link", "/app/none", "/app", "/app/pipe")] == [None] * 4
    with pytest.raises(BoxError, match="refused"):
        box.put(pack([(tmp_path / "a.sh", "b.sh")]), "/usr/bin")


def test_folders_nested_by_the_thousand_are_out_of_the_way_of_what_comes_afresh(box: NamespaceBox) -> None:
    nest = "import os; os.makedirs('/app'); os.chdir('/app'); [(os.mkdir('a'), os.chdir('a')) for _ in range(5_000)]"
    assert run(box, f'python3 -c "{nest}"').status == 0
    with pytest.raises(BoxError, match="refused"):
        box.take("/app")
    box.put(pack(()), "/app", afresh=True)
    assert run(box, "find /app").output == "/app\n"


def test_a_box_that_ended_says_so(box: NamespaceBox) -> None:
    box.close()
    with pytest.raises(BoxGone, match="the box by unshare ended"):
        run(box, "true")
    box.close()


@pytest.mark.slow
def test_a_box_ends_with_its_process_however_that_ends() -> None:
    mounts, folders = Path("/proc/self/mounts").read_text(encoding="utf-8"), set(Path("/tmp").iterdir())
    for number in range(sized(4, 20)):
        command = (
            f"setsid sleep 98765{os.getpid()}{number} & touch /tmp/box-{os.getpid()}; sleep 98765{os.getpid()}{number}"
        )
        holder = subprocess.Popen([sys.executable, "-c", HOLDER, command], stdout=subprocess.PIPE)
        assert holder.stdout is not None and holder.stdout.readline() == b"open\n"
        pids = wait_for_processes(f"98765{os.getpid()}{number}")
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
        for pid in pids:
            wait_for(partial(has_ended, pid), partial("process {} lives".format, pid))
    assert Path("/proc/self/mounts").read_text(encoding="utf-8") == mounts
    assert [path for path in set(Path("/tmp").iterdir()) - folders if path.name.startswith("box-")] == []


def wait_for_processes(word: str) -> list[int]:
    """Wait until the box runs both of its commands; return these and the box's own."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        pids = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if word in read(path)]
        if sum(read(Path(f"/proc/{pid}/cmdline")).startswith("sleep") for pid in pids) == 2:
            return [*pids, *boxes()]
        time.sleep(0.02)
    raise TimeoutError(word)


def has_ended(pid: int) -> bool:
    return not is_alive(pid)


def boxes() -> list[int]:
    """The programs of boxes that processes of this test opened."""
    mine = {os.getpid()}
    for _ in range(5):
        mine |= {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if parent_of(path) in mine}
    return [pid for pid in mine if "_inside.py" in read(Path(f"/proc/{pid}/cmdline"))]


def parent_of(stat: Path) -> int:
    text = read(stat)
    return int(text.rpartition(")")[2].split()[1]) if text else 0


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").replace("\0", " ")
    except OSError:
        return ""


def test_what_the_programs_of_a_container_print_is_bounded_whoever_wrote_them(tmp_path: Path) -> None:
    engine = tmp_path / "podman"
    flood = "head -c 200000000 /dev/zero; head -c 200000000 /dev/zero >&2"
    engine.write_text(
        f"#!/bin/sh\ncase $1 in run) echo ready; cat;; exec) [ $5 = /bin/sh ] || {{ {flood}; }};; cp) {flood};; esac\n"
    )
    engine.chmod(0o755)
    box = ContainerBox(str(engine), "image", storage_mb=4)
    tracemalloc.start()
    try:
        assert len(box.run("true", folder="", environment={}, timeout_s=60).output) == 2**20
        assert box.read("/logs/verifier/reward.json", 100) is None
        with pytest.raises(BoxError, match="holds more than 8 MiB; it is not read"):
            box.take("/app")
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()
        box.close()
