"""Who starts the workers: named in the recipe or on the command line, refused with a sentence, told by the pool when to
start and stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import ConfigError, LightningError, PluginError
from lightningrl.plugins import Plugin, PluginManager, hookimpl, load_plugins
from lightningrl.recipe_tables import RuntimeConfig
from lightningrl_client.commands import parse_workers
from lightningrl_client.runtime.address import is_loopback, machine_address, reachable_url
from lightningrl_client.runtime.launcher import WorkerPlan, WorkerPoolError, build_launcher
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_client.runtime.supervisor import LocalLauncher
from lightningrl_client.runtime.worker_process import describe_exit
from lightningrl_testing.scripted_server import ScriptedServer


class Elsewhere:
    """A launcher that says what it is asked to do, and has the workers started on this machine."""

    def __init__(self, *, losses: int = 0, refusal: Exception | None = None) -> None:
        self.losses = losses
        self.refusal = refusal
        self.log: list[str] = []
        self._local = LocalLauncher()

    async def start(self, count: int, plan: WorkerPlan) -> None:
        self.log.append(f"start {count}")
        if self.refusal:
            raise self.refusal
        await self._local.start(count, plan)

    async def stop(self, grace_s: float) -> None:
        self.log.append(f"stop {grace_s:g}")
        await self._local.stop(grace_s)

    def describe(self) -> str:
        return "elsewhere"


def plugins_with(factory: Any) -> PluginManager:
    class Brings:
        @staticmethod
        @hookimpl
        def lightningrl_worker_launchers() -> list[Plugin]:
            return [Plugin(name="mine", summary="a test", factory=factory)]

    manager = load_plugins()
    manager.register(Brings(), distribution="mine 1")
    return manager


async def test_a_pool_has_its_launcher_start_and_stop_the_workers(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def answer(task): return task")
    launcher = Elsewhere()
    with ScriptedServer(lambda body: {"content": "hello"}) as server:
        server.add_rollout("r0", "alive")
        pool = WorkerPool(
            server.url, server.run_key, "agent.py:answer", workers=2, base_dir=tmp_path, launcher=launcher
        )
        async with pool:
            await server.wait_finished("r0")
            assert pool.describe() == "2 workers elsewhere"
        assert (server.result("r0") or {})["output"] == "alive"
    assert launcher.log == ["start 2", "stop 5"]


@pytest.mark.parametrize(
    ("refusal", "kind", "sentence"),
    [
        (ConfigError("no cluster at '10.0.0.1:6379'"), ConfigError, "no cluster at"),
        (
            ValueError("a defect of the launcher's"),
            WorkerPoolError,
            "workers cannot be started: ValueError: a defect of the launcher's",
        ),
    ],
)
async def test_a_launcher_that_cannot_start_fails_the_pool_with_a_sentence(
    refusal: Exception, kind: type[LightningError], sentence: str
) -> None:
    pool = WorkerPool("http://127.0.0.1:1", "key", "agent.py:answer", launcher=Elsewhere(refusal=refusal))
    with pytest.raises(kind, match=sentence):
        await pool.start()
    with pytest.raises(kind, match=sentence):
        await pool.wait()
    await pool.stop()


def test_the_recipe_names_the_launcher_and_its_settings() -> None:
    runtime = RuntimeConfig(launcher="mine", launchers={"mine": {"losses": 2}, "absent": {"anything": 1}})
    launcher = build_launcher(runtime, plugins_with(Elsewhere))
    assert isinstance(launcher, Elsewhere)
    assert launcher.losses == 2
    assert isinstance(build_launcher(RuntimeConfig(), load_plugins()), LocalLauncher)


def test_an_unknown_launcher_lists_those_that_are_installed() -> None:
    with pytest.raises(
        PluginError, match=r"no worker launcher named 'locl'; installed: .*local.*; did you mean 'local'"
    ):
        build_launcher(RuntimeConfig(launcher="locl"), load_plugins())


def test_a_launchers_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker launcher 'mine' has no setting 'loses'; did you mean 'losses'"):
        build_launcher(RuntimeConfig(launcher="mine", launchers={"mine": {"loses": 2}}), plugins_with(Elsewhere))


def test_a_factory_that_makes_no_launcher_is_refused() -> None:
    with pytest.raises(PluginError, match="worker launcher 'mine' has no start, stop or describe"):
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


@pytest.mark.parametrize(
    ("url", "expected"), [("http://127.0.0.1:1", True), ("http://localhost:1", True), ("http://10.0.0.7:1", False)]
)
def test_a_loopback_url_is_told_from_others(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


def test_exits_are_described_by_signal_or_status() -> None:
    assert [describe_exit(status) for status in (3, -11, -250)] == [
        "exited with status 3",
        "died with SIGSEGV",
        "died with signal 250",
    ]
