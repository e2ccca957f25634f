"""Workers over a Ray cluster: what every launcher does, and what only a cluster does: actors and nodes that die, code
that travels."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

os.environ |= {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}

import pytest
import ray
from ray.cluster_utils import Cluster
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError
from lightningrl_client.runtime.launcher import WorkerPlan, WorkerPoolError
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_client.runtime.settings import WorkerSettings
from lightningrl_testing.launcher_conformance import AGENT_CODE, LauncherConformance
from lightningrl_testing.scripted_server import ScriptedServer
from lightningrl_verl import ray_actor, ray_connection, ray_workers
from lightningrl_verl.plugin import create_ray_launcher
from lightningrl_verl.ray_code import pack_folder, unpack_folder
from lightningrl_verl.ray_connection import check_gcs
from lightningrl_verl.ray_workers import RayLauncher

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    head = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class TestRayLauncher(LauncherConformance):
    def create_launcher(self) -> RayLauncher:
        return create_ray_launcher()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(lambda body: {"content": "hello"}) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agents.py").write_text(AGENT_CODE)
    return tmp_path


def make_pool(server: ScriptedServer, folder: Path, launcher: RayLauncher, workers: int = 1) -> WorkerPool:
    logs = folder / "logs"
    return WorkerPool(
        server.url,
        server.run_key,
        "agents.py:act",
        workers=workers,
        base_dir=folder,
        log_folder=logs,
        launcher=launcher,
    )


def make_plan(**settings: str) -> WorkerPlan:
    known = {
        "server_url": "http://127.0.0.1:8000",
        "worker_key": "key",
        "worker_id": "w",
        "agent": "agents.py:act",
        **settings,
    }
    return WorkerPlan(settings=WorkerSettings(**known))  # type: ignore[arg-type]


async def wait_busy(server: ScriptedServer, workers: int = 1) -> None:
    while server.open < workers:
        await asyncio.sleep(0.01)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (
        Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    ):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


async def test_a_killed_actor_ends_its_worker_and_both_are_replaced(server: ScriptedServer, folder: Path) -> None:
    server.add_rollout("r0", {"do": "pid"})
    server.add_rollout("r1", {"do": "hang"})
    async with make_pool(server, folder, create_ray_launcher()):
        await server.wait_finished("r0")
        await wait_busy(server)
        worker = (server.result("r0") or {})["output"]
        os.kill(parent_of(worker), signal.SIGKILL)
        await server.wait_finished("r1")
        wait_gone(worker)
        server.add_rollout("r2", {"do": "ask"})
        await server.wait_finished("r2")
    lost, alive = server.result("r1"), server.result("r2")
    assert lost is not None and alive is not None
    assert lost["outcome"] == "infrastructure_error"
    assert lost["error"].startswith("the worker process was lost with its Ray actor, which was started again on node ")
    assert alive["output"] == "hello"


async def test_a_node_that_goes_down_ends_its_attempts_and_the_workers_go_elsewhere(
    cluster: Cluster, server: ScriptedServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "    if what == 'where': return [__file__, os.environ.get('TOOL_KEY'), ask()]\n"
    (folder / "agents.py").write_text(AGENT_CODE.replace('    if what == "ask"', where + '    if what == "ask"'))
    monkeypatch.setenv("TOOL_KEY", "sk-tool")
    node = {"num_cpus": 1, "resources": {"far": 4}, "object_store_memory": 80 * 2**20}
    far = [cluster.add_node(**node)]
    launcher = create_ray_launcher(resources={"far": 1}, environment=["TOOL_KEY"])
    server.add_rollout("r0", {"do": "where"})
    async with make_pool(server, folder, launcher, workers=2) as pool:
        await pool.wait_ready()
        await server.wait_finished("r0")
        file, key, answer = (server.result("r0") or {})["output"]
        assert Path(file).name == "agents.py"
        assert not Path(file).is_relative_to(folder)
        assert (key, answer) == ("sk-tool", "hello")
        server.add_rollout("r1", {"do": "hang"})
        server.add_rollout("r2", {"do": "hang"})
        await wait_busy(server, 2)
        far.append(cluster.add_node(**node))  # sets signal handlers, so it belongs to the main thread
        await asyncio.to_thread(cluster.remove_node, far[0], allow_graceful=False)
        await server.wait_finished("r1", "r2")
        server.add_rollout("r3", {"do": "ask"})
        await server.wait_finished("r3")
    assert [(server.result(name) or {})["outcome"] for name in ("r1", "r2", "r3")] == ["infrastructure_error"] * 2 + [
        "succeeded"
    ]
    for name in (
        "r1",
        "r2",
    ):  # a node of a test dies piece by piece: its supervisor may see a worker's end before its own
        assert re.search("was lost with its Ray actor|died with SIGKILL", (server.result(name) or {})["error"])
    await asyncio.to_thread(cluster.remove_node, far[1], allow_graceful=False)
    while len(ray_connection.find_nodes()) > 1:  # until Ray knows it too; it would put the next test's workers there
        await asyncio.sleep(0.1)


async def test_workers_find_no_place_on_a_cluster_that_is_too_small(server: ScriptedServer, folder: Path) -> None:
    pool = make_pool(server, folder, create_ray_launcher(num_cpus=100, start_timeout_s=1))
    with pytest.raises(
        WorkerPoolError, match=r"no place on the Ray cluster for 1 s: it asks for 100 CPU, free are . CPU; start fewer"
    ):
        await pool.start()
    await pool.stop()


async def test_a_server_that_only_this_machine_reaches_is_refused_for_other_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_workers, "find_nodes", lambda: [ray_connection.Node("another", "10.9.8.7", {"CPU": 1.0})])
    launcher = create_ray_launcher()
    with pytest.raises(
        ConfigError, match=r"workers on node 10\.9\.8\.7 cannot reach the server at 'http://127.*--host 0\.0\.0\.0"
    ):
        await launcher.start(1, make_plan())
    await launcher.stop(0.0)


async def test_an_actor_says_why_it_does_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "REACH_S", 0.1)
    assert "Connection refused" in (await ray_actor.reach("http://127.0.0.1:1") or "")


async def test_a_node_without_the_agents_file_says_so(folder: Path) -> None:
    for base_dir, agent, sentence in (
        (folder, "other.py:act", f"has no file '{folder}/other.py'"),
        (folder / "away", "agents.py:act", f"has no folder '{folder}/away'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            ray_actor.check_file(make_plan(agent=agent, base_dir=str(base_dir)).settings)


def test_workers_of_the_command_line_die_with_it(cluster: Cluster, server: ScriptedServer, folder: Path) -> None:
    (folder / "recipe.toml").write_text(
        'agent = "agents.py:act"\nrewards.score.use = "agents.py:act"\ntasks.train = "agents.py:act"\npolicy.model = "a/model"\n'
    )
    server.add_rollout("r0", {"do": "pid"})
    server.add_rollout("r1", {"do": "hang"})
    command = [sys.executable, "-m", "lightningrl", "work", str(folder), "--server", server.url, "--workers", "ray:1"]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "LIGHTNINGRL_KEY": server.run_key}
    with (folder / "work.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + PATIENCE_S
    said = "1 worker on 1 Ray node run agents.py:act"
    while server.result("r0") is None or not server.attempts("r1") or said not in (folder / "work.log").read_text():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "work.log").read_text()
        time.sleep(0.02)
    process.kill()
    process.wait()
    worker = (server.result("r0") or {})["output"]
    wait_gone(worker)


@contextmanager
def listening(answer: bytes | None) -> Iterator[int]:
    """The port of a server that is no Ray head: answers every connection with these bytes, or with nothing."""
    with ExitStack() as held, socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = held.enter_context(listener.accept()[0])
                    if answer is not None:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_unreachable_cluster_is_refused_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "PROBE_S", 0.5)
    with listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as web, listening(None) as deaf:
        for address, sentence in (
            ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1' .*Connection refused.*ray start --head"),
            ("no-such-host.invalid:6379", "no Ray cluster answers"),
            (f"127.0.0.1:{web}", "no Ray cluster answers"),
            (f"127.0.0.1:{deaf}", "no Ray cluster answers .*Deadline Exceeded"),
            ("ray://10.0.0.1:10001", "Ray Client"),
            ("10.0.0.1", "is not host:port"),
        ):
            with pytest.raises(ConfigError, match=sentence):
                check_gcs(address)


def test_whoever_joins_first_the_last_to_leave_disconnects(cluster: Cluster) -> None:
    code = f"""
import threading
import ray
from lightningrl_verl.ray_connection import join_or_start

joined = []
threads = [threading.Thread(target=lambda: joined.append(join_or_start({cluster.address!r}))) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
first, second, third = joined
first.leave()
third.leave()
print(len(set(joined)), ray.is_initialized())
second.leave()
print(ray.is_initialized())
ray.init({cluster.address!r}, log_to_driver=False, logging_level="ERROR")
join_or_start({cluster.address!r}).leave()
print(ray.is_initialized(), "as it was before")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.stdout == "1 True\nFalse\nTrue as it was before\n", ran.stderr


def test_a_running_head_is_recognised(cluster: Cluster) -> None:
    check_gcs(cluster.address)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="code is 'copy'"):
        create_ray_launcher(code="copy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_cpus is -1"):
        create_ray_launcher(num_cpus=-1)
    with pytest.raises(ConfigError, match="environment names 'NOT_SET_ANYWHERE'"):
        create_ray_launcher(environment=["NOT_SET_ANYWHERE"])


def test_a_folder_travels_without_what_belongs_to_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    for name in ("agent.py", "tools/run.sh", "data/big.bin", ".env", "runs/one/store.sqlite", "__pycache__/agent.pyc"):
        (tmp_path / "recipe" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "recipe" / name).write_bytes(b"x" * 600)
    (tmp_path / "recipe/tools/run.sh").chmod(0o755)
    packed = pack_folder(tmp_path / "recipe", exclude=["data/*"])
    there = unpack_folder(packed)
    assert sorted(str(file.relative_to(there)) for file in there.rglob("*") if file.is_file()) == [
        "agent.py",
        "tools/run.sh",
    ]
    assert os.access(there / "tools/run.sh", os.X_OK)
    assert unpack_folder(packed) == there
    with pytest.raises(
        ConfigError, match=r"at most 0\.0 MiB go \(largest: '[a-z/.]+', 0\.0 MiB\); leave files out with"
    ):
        pack_folder(tmp_path / "recipe", most_bytes=1000)


def test_the_plugin_is_listed_without_importing_ray() -> None:
    code = "import sys, lightningrl_verl.plugin as p; print([x.name for x in p.lightningrl_worker_launchers()], 'ray' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "['ray'] False\n"
    )
