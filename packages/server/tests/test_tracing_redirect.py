"""Redirection: which requests move, what they carry, and that a retry is the same call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx
import httpx2
import openai
import pytest
import requests

from lightningrl.call_origin import CallOrigin
from lightningrl_client.attribution.redirect import Redirection
from lightningrl_client.attribution.scope import ActiveRollout, CallLedger, RolloutScope
from lightningrl_server.gateway.model_call import named_role
from lightningrl_testing.scripted_server import ScriptedServer

OPENAI = "https://api.openai.com/v1/chat/completions"
BODY: Any = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hi"}]}
KEY = {"Authorization": "Bearer sk-the-users-own"}

sync_client = openai.OpenAI(api_key="sk-the-users-own")
async_client = openai.AsyncOpenAI(api_key="sk-the-users-own")
azure_client = openai.AzureOpenAI(
    api_key="sk-the-users-own",
    api_version="2024-10-21",
    azure_endpoint="https://llm.example.com:8443/api",
    azure_deployment="mine",
)


class Scene:
    """A scripted server, and this process redirected to it."""

    def __init__(self, server: ScriptedServer, *, exclusive: bool) -> None:
        self.server = server
        self.scope = RolloutScope(exclusive=exclusive)
        self.redirection = Redirection(
            server_url=server.url, scope=self.scope, base_urls=["https://llm.example.com:8443/api"]
        )

    def rollout(self, rollout_id: str) -> ActiveRollout:
        number, base_path, key = self.server.open_attempt(rollout_id)
        return ActiveRollout(rollout_id=rollout_id, attempt=number, base_path=base_path, key=key)


@pytest.fixture(params=[True, False], ids=["exclusive", "concurrent"])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    with ScriptedServer(lambda body: {"content": "hello"}) as server:
        scene = Scene(server, exclusive=request.param)
        scene.redirection.install()
        yield scene
        scene.redirection.uninstall()


def post_httpx() -> int:
    return httpx.post(OPENAI, json=BODY, headers=KEY, timeout=None).status_code


def post_httpx2() -> int:
    return httpx2.post(OPENAI, json=BODY, headers=KEY, timeout=None).status_code


def post_requests() -> int:
    return requests.post(OPENAI, json=BODY, headers=KEY, timeout=None).status_code


def post_httpx_async() -> int:
    async def post() -> int:
        async with httpx.AsyncClient(timeout=None) as client:
            return (await client.post(OPENAI, json=BODY, headers=KEY)).status_code

    return asyncio.run(post())


def post_aiohttp() -> int:
    async def post() -> int:
        async with aiohttp.ClientSession(headers=KEY) as session, session.post(OPENAI, json=BODY) as response:
            return response.status

    return asyncio.run(post())


def post_openai() -> int:
    return 200 if sync_client.chat.completions.create(**BODY).choices[0].message.content == "hello" else 0


def post_openai_async() -> int:
    async def post() -> int:
        return 200 if (await async_client.chat.completions.create(**BODY)).choices else 0

    return asyncio.run(post())


def post_azure() -> int:
    return 200 if azure_client.chat.completions.create(**BODY).choices[0].message.content == "hello" else 0


POSTS = [
    post_httpx,
    post_httpx2,
    post_requests,
    post_httpx_async,
    post_aiohttp,
    post_openai,
    post_openai_async,
    post_azure,
]


@pytest.mark.parametrize("post", POSTS, ids=lambda post: post.__name__)
def test_every_client_calls_under_its_rollout_with_the_scoped_key(scene: Scene, post: Any) -> None:
    rollout = scene.rollout("r1")
    scene.redirection.resolvers.append(lambda: CallOrigin(agent="écrivain", trace_id=1, span_id=2))
    with scene.scope.entered(rollout):
        assert post() == 200
    (call,) = scene.server.calls
    assert call.rollout_id == "r1"
    assert call.headers["authorization"] == f"Bearer {rollout.key}"
    assert call.headers["host"] == scene.server.url.removeprefix("http://")
    assert call.agent == "%C3%A9crivain"
    assert call.headers["traceparent"] == f"00-{1:032x}-{2:016x}-01"
    assert call.call_id
    assert "sk-the-users-own" not in str(call.headers)


@pytest.mark.parametrize("post", POSTS[:5], ids=lambda post: post.__name__)
def test_a_call_without_a_rollout_fails_closed(scene: Scene, post: Any) -> None:
    assert post() == 403
    (call,) = scene.server.calls
    assert call.rollout_id is None
    assert "sk-the-users-own" not in str(call.headers)


def test_a_call_after_its_rollout_is_over_fails_closed(scene: Scene) -> None:
    with ThreadPoolExecutor(1) as threads:
        with scene.scope.entered(scene.rollout("r1")):
            sync_client.chat.completions.create(**BODY)
        with pytest.raises(openai.PermissionDeniedError):
            threads.submit(post_openai).result()
    assert [call.rollout_id for call in scene.server.calls] == ["r1", None]


@pytest.mark.parametrize(
    ("url", "moved"),
    [
        ("https://api.openai.com/v1/responses", True),
        ("https://api.openai.com/v1/models/gpt-4o-mini", True),
        ("https://api.anthropic.com/v1/messages", True),
        ("https://llm.example.com:8443/api/v9/embeddings", True),
        ("https://llm.example.com:9/api/v9/embeddings", False),
        ("https://llm.example.com:8443/other/embeddings", False),
        ("https://api.openai.com/v1/files", False),
        ("https://example.com/v1/chat/completions", False),
    ],
)
def test_model_calls_of_known_hosts_move_and_nothing_else(url: str, moved: bool) -> None:
    redirection = Redirection(
        server_url="http://127.0.0.1:1",
        scope=RolloutScope(exclusive=False),
        base_urls=["https://llm.example.com:8443/api"],
    )
    assert (redirection.redirect(url, b"{}") is not None) == moved


def test_the_gateways_own_address_is_attributed_whatever_rollout_it_names() -> None:
    scope = RolloutScope()
    redirection = Redirection(server_url="http://127.0.0.1:1", scope=scope)
    rollout = ActiveRollout(rollout_id="new", attempt=0, base_path="/rollouts/new/attempts/0/v1", key="k")
    with scope.entered(rollout):
        for url in (
            "http://127.0.0.1:1/v1/models?limit=2",
            "http://127.0.0.1:1/rollouts/old/attempts/3/v1/models?limit=2",
        ):
            call = redirection.redirect(url, b"")
            assert call is not None
            assert call.url == "http://127.0.0.1:1/rollouts/new/attempts/0/v1/models?limit=2"
        assert redirection.redirect("http://127.0.0.1:1/api/v1/status", b"") is None


def test_an_sdk_retry_is_the_same_call_and_asking_again_is_a_new_one(scene: Scene) -> None:
    answers: Any = iter([(500, "oops", "try again"), {"content": "a"}, {"content": "b"}])
    scene.server.answer = lambda body: next(answers)
    with scene.scope.entered(scene.rollout("r1")):
        sync_client.chat.completions.create(**BODY)
        sync_client.chat.completions.create(**BODY)
    ids = [call.call_id for call in scene.server.calls]
    assert [call.headers["x-stainless-retry-count"] for call in scene.server.calls] == ["0", "1", "0"]
    assert ids[0] == ids[1] != ids[2]


async def test_concurrent_identical_calls_keep_distinct_ids_through_their_retries(scene: Scene) -> None:
    failures = iter([True] * 8)
    scene.server.answer = lambda body: (503, "busy", "try again") if next(failures, False) else {"content": "a"}
    async with httpx.AsyncClient() as client:

        async def ask() -> None:
            while (await client.post(OPENAI, json=BODY)).status_code != 200:
                pass

        with scene.scope.entered(scene.rollout("r1")):
            await asyncio.gather(*(ask() for _ in range(8)))
    answered = [call.call_id for call in scene.server.calls if call.status == 200]
    assert len(scene.server.calls) == 16
    assert len(set(answered)) == 8
    assert len({call.call_id for call in scene.server.calls}) == 8


def test_a_ledger_reuses_the_id_of_a_lost_answer_when_the_sdk_says_it_resends() -> None:
    ledger = CallLedger()
    first = ledger.claim(b"body")
    assert ledger.claim(b"body", is_retry=True) == first
    assert ledger.claim(b"other", is_retry=True) != first
    assert ledger.claim(b"body") != first


@pytest.mark.parametrize("form", [list, iter, dict])
async def test_aiohttp_takes_headers_in_all_its_forms(scene: Scene, form: Any) -> None:
    headers = [("x-one", "1")]
    with scene.scope.entered(scene.rollout("r1")):
        async with aiohttp.ClientSession() as session:
            async with session.post(OPENAI, json=BODY, headers=form(headers)) as answer:
                assert answer.status == 200
            async with session.get(f"{scene.server.url}/elsewhere", headers=form(headers)) as answer:
                assert answer.status == 404


@pytest.mark.parametrize("library", [httpx, httpx2], ids=["httpx", "httpx2"])
async def test_a_clients_proxy_does_not_stand_before_the_gateway(scene: Scene, library: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = f"http://127.0.0.1:{listener.getsockname()[1]}"  # nobody listens there
    with scene.scope.entered(scene.rollout("r1")), ScriptedServer(lambda body: {"content": "no"}) as other:
        with library.Client(proxy=proxy, timeout=None) as client:
            assert client.post(OPENAI, json=BODY, headers=KEY).status_code == 200
            with pytest.raises(library.ConnectError):
                client.get(other.url)
        async with library.AsyncClient(proxy=proxy, timeout=None) as client:
            assert (await client.post(OPENAI, json=BODY, headers=KEY)).status_code == 200
            with pytest.raises(library.ConnectError):
                await client.get(other.url)


@pytest.mark.parametrize("agent", ["writer", "team/Ärztin", "50%25 sure", "100%", " padded ", "two\nlines"])
def test_a_role_arrives_as_it_was_named(agent: str) -> None:
    headers = {name.encode(): value.strip().encode() for name, value in CallOrigin(agent=agent).headers().items()}
    assert named_role(headers) == agent


def test_import_time_async_clients_survive_one_event_loop_per_rollout(scene: Scene) -> None:
    for number in range(20):
        with scene.scope.entered(scene.rollout(f"r{number}")):
            assert post_openai_async() == 200
    assert [call.rollout_id for call in scene.server.calls] == [f"r{number}" for number in range(20)]


async def test_connections_are_kept_on_the_home_loop(scene: Scene) -> None:
    scene.redirection.home_loop = asyncio.get_running_loop()
    async with httpx2.AsyncClient() as client:
        with scene.scope.entered(scene.rollout("r1")):
            await client.post(OPENAI, json=BODY)
            scene.redirection.home_loop = None
            await client.post(OPENAI, json=BODY)
    assert [call.headers["connection"] for call in scene.server.calls] == ["keep-alive", "close"]


def test_an_async_client_may_run_on_no_loop_of_asyncios(scene: Scene) -> None:
    """As under trio: a coroutine is stepped by whoever runs it. What the transport is given is on its way to the
    gateway."""
    arrived: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        arrived.append(request)
        return httpx.Response(200)

    posting = httpx.AsyncClient(transport=httpx.MockTransport(handle)).post(OPENAI, json=BODY, headers=KEY)
    with scene.scope.entered(scene.rollout("r1")), pytest.raises(StopIteration):
        posting.send(None)
    (request,) = arrived
    assert str(request.url).startswith(f"{scene.server.url}/rollouts/r1/")
    assert request.headers["connection"] == "close"


def test_uninstalling_restores_the_clients() -> None:
    before = (
        httpx.Client.send,
        httpx2.AsyncClient.send,
        requests.Session.send,
        aiohttp.ClientSession._request,
        ThreadPoolExecutor.submit,
    )
    redirection = Redirection(server_url="http://127.0.0.1:1", scope=RolloutScope())
    redirection.install()
    assert httpx.Client.send is not before[0]
    redirection.uninstall()
    after = (
        httpx.Client.send,
        httpx2.AsyncClient.send,
        requests.Session.send,
        aiohttp.ClientSession._request,
        ThreadPoolExecutor.submit,
    )
    assert after == before


def test_an_exclusive_process_runs_one_rollout_at_a_time() -> None:
    scope = RolloutScope()
    one, two = (ActiveRollout(rollout_id=name, attempt=0, base_path="", key="") for name in ("one", "two"))
    with scope.entered(one), pytest.raises(RuntimeError, match="'one'"), scope.entered(two):
        pass


def test_a_task_that_outlives_its_rollout_belongs_to_none() -> None:
    async def scene() -> list[str | None]:
        scope = RolloutScope(exclusive=False)
        one, two = (ActiveRollout(rollout_id=name, attempt=0, base_path="", key="") for name in ("one", "two"))
        asked: asyncio.Queue[None] = asyncio.Queue()
        seen: list[str | None] = []

        async def lazily_started_worker() -> None:
            while True:
                await asked.get()
                current = scope.current()
                seen.append(None if current is None else current.rollout_id)
                asked.task_done()

        with scope.entered(one):
            worker = asyncio.create_task(lazily_started_worker())
            asked.put_nowait(None)
            await asked.join()
        with scope.entered(two):
            asked.put_nowait(None)
            await asked.join()
        worker.cancel()
        return seen

    assert asyncio.run(scene()) == ["one", None]
