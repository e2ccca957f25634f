"""A dialect of a user's: the project of `docs/how-to/plugins/dialect.md`, one declaration and one format, known wherever
dialects are."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import msgspec
import ollama
import pytest
from distributions import install_in_place, write_blocks

from lightningrl.dialects import DIALECTS, Dialect, build_dialects, find_endpoint
from lightningrl.errors import ConfigError
from lightningrl.plugins import Plugin, PluginManager, hookimpl, load_plugins
from lightningrl.types import Outcome
from lightningrl_client.attribution.redirect import Redirection
from lightningrl_client.attribution.scope import ActiveRollout, RolloutScope
from lightningrl_client.runtime.environment import gateway_environment
from lightningrl_client.runtime.settings import WorkerSettings
from lightningrl_server.gateway.dialects.format import load_format
from lightningrl_server.gateway.settings import GatewaySettings, Upstream
from lightningrl_server.settings import ServerSettings
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_testing.whole_path import running_services

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "plugins" / "dialect.md"
ASKED: Any = {"model": "llama", "messages": [{"role": "user", "content": "What is 6*7?"}]}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the modules of the page's project lie, as pip would have it."""
    folder = tmp_path_factory.mktemp("project")
    write_blocks(PAGE, folder)
    return install_in_place(folder / "lightningrl-ollama")


@pytest.fixture(scope="module")
def plugin(installed: Path) -> Iterator[ModuleType]:
    sys.path.insert(0, str(installed))
    yield importlib.import_module("lightningrl_ollama.plugin")
    sys.path.pop(0)


@pytest.fixture(scope="module")
def dialects(plugin: ModuleType) -> tuple[Dialect, ...]:
    manager = PluginManager()
    manager.register(plugin, distribution="lightningrl-ollama 0.1.0")
    return build_dialects(manager)


@pytest.fixture
async def gateway(tmp_path: Path, dialects: tuple[Dialect, ...]) -> AsyncIterator[LiveGateway]:
    upstream = GatewaySettings(upstream_models={"judge": Upstream(base_url="http://127.0.0.1:9", api_key="k")})
    async with live_gateway(tmp_path, dialects=dialects, settings=upstream) as running:
        yield running


def test_servers_and_workers_are_told_of_an_installed_dialect(dialects: tuple[Dialect, ...]) -> None:
    assert [dialect.name for dialect in dialects] == ["chat", "responses", "messages", "ollama"]
    settings = WorkerSettings(server_url="http://s", worker_key="k", worker_id="w", agent="a:b", dialects=dialects)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=WorkerSettings).dialects == dialects
    server = ServerSettings(store_url="sqlite:///x", run_key="the-run-key", dialects=dialects)
    assert ServerSettings.model_validate_json(server.model_dump_json()).dialects == dialects


def test_programs_in_other_languages_find_it_by_its_variables(dialects: tuple[Dialect, ...]) -> None:
    variables = gateway_environment("http://s", dialects, "/rollouts/r/attempts/1/v1", "key")
    assert (variables["OLLAMA_HOST"], variables["OLLAMA_API_KEY"]) == ("http://s/rollouts/r/attempts/1", "key")
    assert variables["OPENAI_BASE_URL"] == "http://s/rollouts/r/attempts/1/v1"
    assert variables["ANTHROPIC_BASE_URL"] == "http://s/rollouts/r/attempts/1"


@pytest.mark.parametrize("exclusive", [True, False])
async def test_an_unchanged_client_of_its_own_calls_the_policy(
    gateway: LiveGateway, dialects: tuple[Dialect, ...], exclusive: bool
) -> None:
    gateway.engine.enqueue("42")
    attempt = await gateway.attempt()
    scope = RolloutScope(exclusive=exclusive)
    base_path = attempt.base_url.removeprefix(gateway.url)
    rollout = ActiveRollout(
        rollout_id=attempt.rollout_id, attempt=attempt.attempt, base_path=base_path, key=attempt.key
    )
    redirection = Redirection(server_url=gateway.url, scope=scope, dialects=dialects)
    redirection.install()
    try:
        client = ollama.AsyncClient()  # 127.0.0.1:11434, where nobody listens
        with scope.entered(rollout):
            answer = await client.chat(**ASKED)
        with pytest.raises(ollama.ResponseError, match="belongs to no rollout"):
            await client.chat(**ASKED)
    finally:
        redirection.uninstall()
    assert answer.message.content == "42"
    (call,) = await attempt.transitions()
    assert len(call.completion_ids) == len(call.logprobs) == answer.eval_count


AGENT = """
import ollama

def answer(task):
    asked = [{"role": "user", "content": task}]
    plain = ollama.chat(model="llama", messages=asked).message.content
    return plain + "".join(part.message.content for part in ollama.chat(model="llama", messages=asked, stream=True))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_processes")
async def test_installed_it_is_spoken_by_a_servers_process_and_a_workers_that_know_it_by_no_test(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(AGENT, encoding="utf-8")
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    async with running_services(tmp_path, dialects=build_dialects(load_plugins())) as path:
        path.engine.enqueue("forty", "-two")
        async with path.workers("agent.py:answer", base_dir=tmp_path):
            trajectory = await path.run_one("r1", "What is 6*7?")
    assert (trajectory.outcome, trajectory.output) == (Outcome.SUCCEEDED, "forty-two"), trajectory.error
    assert len(trajectory.transitions) == 2
    assert trajectory.other_calls == ()


async def test_refusals_are_in_its_own_form_also_at_paths_that_nobody_serves(gateway: LiveGateway) -> None:
    attempt = await gateway.attempt()
    root = attempt.base_url.removesuffix("/v1")
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {attempt.key}"}) as client:
        unknown = await client.post(f"{root}/v1/api/chat", json=ASKED)
        failed = await client.post(f"{root}/api/chat", json={**ASKED, "model": "judge"})
        wrong = await client.post(f"{root}/api/chat", json=ASKED, headers={"Authorization": "Bearer other"})
        openai = await client.post(f"{root}/v1/nothing", json=ASKED)
    assert (unknown.status_code, list(unknown.json()), type(unknown.json()["error"])) == (404, ["error"], str)
    assert "/messages and /api/chat" in unknown.json()["error"]
    assert (failed.status_code, wrong.status_code) == (502, 401)
    assert isinstance(failed.json()["error"], str) and isinstance(wrong.json()["error"], str)
    assert openai.json()["error"]["code"] == "unknown_path"
    calls = await gateway.store.other_calls(attempt.rollout_id, attempt.attempt)
    assert [(call.kind.value, call.path) for call in calls] == [
        ("refused", "api/chat"),
        ("forwarded", "api/chat"),
        ("refused", "nothing"),
    ]


def test_what_a_worker_says_to_its_server_is_no_call_of_a_model(dialects: tuple[Dialect, ...]) -> None:
    scope = RolloutScope()
    redirection = Redirection(server_url="http://server", scope=scope, dialects=dialects)
    with scope.entered(ActiveRollout(rollout_id="r", attempt=1, base_path="/rollouts/r/attempts/1/v1", key="k")):
        assert redirection.redirect("http://server/api/v1/rollouts/messages/attempts/1/result", b"{}") is None
        assert redirection.redirect("http://server/api/v1/rollouts/responses", b"") is None
        for path in ("/messages", "/v1/messages", "/rollouts/old/attempts/7/messages"):
            moved = redirection.redirect(f"http://server{path}", b"{}")
            assert moved is not None and moved.url == "http://server/rollouts/r/attempts/1/v1/messages"
        moved = redirection.redirect("http://server/rollouts/old/attempts/7/api/chat", b"{}")
        assert moved is not None and moved.url == "http://server/rollouts/r/attempts/1/api/chat"


def test_an_endpoint_that_names_its_model_is_none_of_openais(dialects: tuple[Dialect, ...]) -> None:
    gemini = Dialect(
        name="gemini", format="gemini:Format", endpoints=("models/{model}:generateContent",), bases=("/v1beta",)
    )
    known = (*dialects, gemini)
    assert find_endpoint(known, "/v1beta/models/gemini-pro:generateContent") == (
        gemini,
        "/v1beta/models/gemini-pro:generateContent",
    )
    assert find_endpoint(known, "/v1/models/gpt-5") == (DIALECTS[0], "/v1/models/gpt-5")
    assert find_endpoint(known, "/proxy/openai/chat/completions") == (DIALECTS[0], "/v1/chat/completions")
    assert find_endpoint(known, "/v1/messages/count_tokens") == (DIALECTS[2], "/v1/messages/count_tokens")
    assert find_endpoint(known, "/v1/files") is None


def test_two_dialects_of_one_path_and_a_format_that_is_not_there_are_named(plugin: ModuleType) -> None:
    class Again:
        @hookimpl
        def lightningrl_dialects(self) -> Iterator[Plugin]:
            yield Plugin(name="again", summary="", factory=lambda: replace(plugin.OLLAMA, name="again"))

    manager = PluginManager()
    manager.register(plugin, distribution="one")
    manager.register(Again(), distribution="two")
    with pytest.raises(ConfigError, match="'ollama' and 'again' both answer '/api/chat'; uninstall one"):
        build_dialects(manager)
    with pytest.raises(
        ConfigError, match="dialect 'ollama': its format 'nowhere:Format' cannot be loaded: ModuleNotFoundError"
    ):
        load_format(replace(plugin.OLLAMA, format="nowhere:Format"))
