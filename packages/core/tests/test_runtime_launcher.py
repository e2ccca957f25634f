"""Who starts the workers: named in the recipe or on the command line, refused with a sentence, opened and closed by the pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightningrl.cli.work import parse_workers
from lightningrl.config import RuntimeConfig
from lightningrl.errors import ConfigError, PluginError
from lightningrl.plugins import Plugin, PluginManager, hookimpl, load_plugins
from lightningrl.runtime.address import is_loopback, machine_address, reachable_url
from lightningrl.runtime.launcher import WorkerExit, WorkerPoolError, build_launcher
from lightningrl.runtime.pool import WorkerPool
from lightningrl.runtime.process import LocalLauncher, describe_exit
from lightningrl.runtime.settings import WorkerEvent, WorkerSettings, encode_line
from lightningrl.testing.scripted_server import ScriptedServer


class Doomed:
    """A line to a worker that is ready, takes an attempt, and goes down with its machine."""

    def __init__(self, node: str, settings: WorkerSettings) -> None:
        self.node = node
        token = settings.event_token
        started = WorkerEvent(kind="started", rollout_id="r0", attempt=1, limit_s=60.0, token=token)
        self.lines = [encode_line(WorkerEvent(kind="ready", token=token)), encode_line(started)]

    async def read(self) -> bytes:
        return self.lines.pop(0) if self.lines else b""

    def write(self, line: bytes) -> None: ...

    async def kill(self) -> WorkerExit:
        return WorkerExit(how=f"was lost with its node {self.node}", is_foreign=True, lost_node=self.node)

    async def wait(self) -> WorkerExit:
        return await self.kill()


class Elsewhere:
    """A launcher whose first machine goes down with everything on it; then workers are processes of this machine."""

    def __init__(self, *, losses: int = 0, refusal: str = "") -> None:
        self.losses = losses
        self.refusal = refusal
        self.log: list[str] = []
        self._local = LocalLauncher()

    async def open(self, server_url: str) -> None:
        self.log.append(f"open {server_url}")
        if self.refusal:
            raise ConfigError(self.refusal)

    async def spawn(self, settings: WorkerSettings, *, environment: Mapping[str, str], log: Path | None) -> Any:
        self.log.append("spawn")
        if self.losses:
            self.losses -= 1
            return Doomed("node-1", settings)
        return await self._local.spawn(settings, environment=environment, log=log)

    async def close(self) -> None:
        self.log.append("close")


def plugins_with(factory: Any) -> PluginManager:
    class Brings:
        @staticmethod
        @hookimpl
        def lightningrl_worker_launchers() -> list[Plugin]:
            return [Plugin(name="mine", summary="a test", factory=factory)]

    manager = load_plugins()
    manager.register(Brings(), distribution="mine 1")
    return manager


async def test_the_pool_opens_its_launcher_once_and_closes_it() -> None:
    launcher = Elsewhere()
    pool = WorkerPool("http://127.0.0.1:1", "key", "agent.py:answer", launcher=launcher)
    await pool.open()
    await pool.open()
    await pool.stop()
    assert launcher.log == ["open http://127.0.0.1:1", "close"]


async def test_a_launcher_that_cannot_open_fails_the_pool_with_its_sentence() -> None:
    launcher = Elsewhere(refusal="no cluster at '10.0.0.1:6379'")
    pool = WorkerPool("http://127.0.0.1:1", "key", "agent.py:answer", launcher=launcher)
    with pytest.raises(ConfigError, match="no cluster"):
        await pool.start()
    with pytest.raises(ConfigError, match="no cluster"):
        await pool.wait()
    await pool.stop()
    assert "spawn" not in launcher.log


class Broken(Elsewhere):
    """A launcher with a defect of its own."""

    async def spawn(self, settings: WorkerSettings, *, environment: Mapping[str, str], log: Path | None) -> Any:
        raise ValueError("a defect of the launcher's")


async def test_a_slot_that_cannot_be_supervised_fails_the_pool_with_a_sentence() -> None:
    pool = WorkerPool("http://127.0.0.1:1", "key", "agent.py:answer", launcher=Broken())
    with pytest.raises(WorkerPoolError, match="worker 0 cannot be supervised any more: ValueError: a defect of the launcher's"):
        await pool.start()
    await pool.stop()


async def test_a_machine_that_goes_down_with_many_workers_is_one_death(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def answer(task): return task")
    with ScriptedServer(lambda body: {"content": "hello"}) as server:
        server.open_attempt("r0")
        server.add_rollout("r1", "alive")
        launcher = Elsewhere(losses=12)
        async with WorkerPool(server.url, server.run_key, "agent.py:answer", workers=1, base_dir=tmp_path, launcher=launcher) as pool:
            await server.wait_finished("r1")
        lost, alive = server.result("r0"), server.result("r1")
    assert pool.status.spawned == 13
    assert lost is not None and alive is not None
    assert lost["outcome"] == "infrastructure_error"
    assert lost["error"].startswith("the worker process was lost with its node node-1 while it ran the agent")
    assert alive["output"] == "alive"


def test_the_recipe_names_the_launcher_and_its_settings() -> None:
    runtime = RuntimeConfig(launcher="mine", launchers={"mine": {"losses": 2}, "absent": {"anything": 1}})
    launcher = build_launcher(runtime, plugins_with(Elsewhere))
    assert isinstance(launcher, Elsewhere)
    assert launcher.losses == 2
    assert isinstance(build_launcher(RuntimeConfig(), load_plugins()), LocalLauncher)


def test_an_unknown_launcher_lists_those_that_are_installed() -> None:
    with pytest.raises(PluginError, match=r"no worker launcher named 'locl'; installed: .*local.*; did you mean 'local'"):
        build_launcher(RuntimeConfig(launcher="locl"), load_plugins())


def test_a_launchers_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker launcher 'mine' has no setting 'loses'; did you mean 'losses'"):
        build_launcher(RuntimeConfig(launcher="mine", launchers={"mine": {"loses": 2}}), plugins_with(Elsewhere))


def test_a_factory_that_makes_no_launcher_is_refused() -> None:
    with pytest.raises(PluginError, match="worker launcher 'mine' has no open, spawn or close"):
        build_launcher(RuntimeConfig(launcher="mine"), plugins_with(lambda: "local"))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("4", {"runtime.workers": 4}),
        ("0", {"runtime.workers": 0}),
        ("ray", {"runtime.launcher": "ray"}),
        ("ray:16", {"runtime.launcher": "ray", "runtime.workers": 16}),
    ],
)
def test_workers_on_the_command_line_say_how_many_and_where(text: str, settings: dict[str, Any]) -> None:
    assert parse_workers(text) == settings


@pytest.mark.parametrize("text", ["", ":", "ray:", ":4", "ray:many", "-1", "1.5", "ray:-2", " "])
def test_workers_that_say_neither_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write for example 4, ray or ray:16"):
        parse_workers(text)


def test_a_server_that_listens_everywhere_is_reached_under_the_machines_address() -> None:
    assert reachable_url("http://0.0.0.0:8000") == f"http://{machine_address()}:8000"
    assert reachable_url("http://[::]:8000") == f"http://{machine_address()}:8000"
    assert reachable_url("http://10.0.0.7:8000/x") == "http://10.0.0.7:8000/x"


@pytest.mark.parametrize(("url", "expected"), [("http://127.0.0.1:1", True), ("http://localhost:1", True), ("http://10.0.0.7:1", False)])
def test_a_loopback_url_is_told_from_others(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


def test_exits_are_described_by_signal_or_status() -> None:
    assert [describe_exit(status) for status in (3, -11, -250)] == ["exited with status 3", "died with SIGSEGV", "died with signal 250"]
