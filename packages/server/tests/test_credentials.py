"""A user's keys: read with a sentence that names the variable, in no text that leaves, in no recipe, in no agent's
process."""

from __future__ import annotations

import base64
import gzip
import html
import json
import logging
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lightningrl.credentials import read_key
from lightningrl.errors import ConfigError, JudgeError, describe_raised
from lightningrl.keys import Mask
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import JudgeConfig, TelemetryConfig, UpstreamConfig
from lightningrl.records import Lease
from lightningrl.types import Outcome, RolloutMode, Task
from lightningrl_client.attribution.scope import ActiveRollout
from lightningrl_client.control.client import ServerClient
from lightningrl_client.recipe_file import with_settings
from lightningrl_client.runtime.environment import worker_environment
from lightningrl_client.runtime.recipe_pool import withheld_variables, work_command
from lightningrl_client.runtime.report import report_exception
from lightningrl_server.forwarding import ExportForwarder
from lightningrl_server.gateway.settings import GatewaySettings, Upstream
from lightningrl_server.gateway.upstream import MaskedBytes
from lightningrl_server.settings import read_upstream
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.loopback import serving
from lightningrl_training.judge import LONGEST_ANSWER, Judge, Questions

KEY = "sk-SECRET/KEY+of=the_user"
RECIPE: dict[str, Any] = {
    "agent": "agent.py:answer",
    "tasks": {"train": "data.py:train"},
    "policy": {"model": "m"},
    "rewards": {"right": {"use": "reward.py:right"}},
}
UNCARRIED = ("sk-a\nb", "sk-\u00e4bc", "sk-a\0b", "\u201csk-abc\u201d", "sk-abc\x7f")


def test_a_key_is_read_without_the_line_end_of_its_file() -> None:
    told = {"MINE": f" {KEY}\r\n"}
    assert read_key("MINE", told, where="judge") == KEY
    upstream, _ = read_upstream(UpstreamConfig(base_url="https://h/v1", api_key_env="MINE"), told)
    assert upstream is not None and upstream.api_key == KEY
    place = TelemetryConfig(forward="https://h", headers_env={"authorization": "MINE"}).target(
        {"MINE": f"Bearer {KEY}\n"}
    )
    assert place is not None and place[1] == {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("key", UNCARRIED)
def test_a_key_that_no_header_can_carry_is_refused_by_the_name_of_its_variable(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"MINE": key}
    reads = (
        lambda: read_upstream(UpstreamConfig(base_url="https://h/v1", api_key_env="MINE"), told),
        lambda: TelemetryConfig(forward="https://h", headers_env={"authorization": "MINE"}).target(told),
        lambda: read_key("MINE", told, where="judge"),
    )
    for read in reads:
        with pytest.raises(ConfigError, match=r"'MINE' holds what no HTTP header can carry") as refused:
            read()
        assert "sk-" not in str(refused.value)
    for make in (
        lambda: Judge(JudgeConfig(base_url="http://h", model="m"), key),
        lambda: ServerClient("http://h", key),
    ):
        with pytest.raises(ConfigError, match="no HTTP header can carry") as refused:
            make()
        assert "sk-" not in str(refused.value)


def test_a_key_for_workers_that_no_header_can_carry_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def answer(x): return x\n")
    (tmp_path / "recipe.toml").write_text(
        'agent = "agent.py:answer"\n[tasks]\ntrain = "d.py:t"\n[policy]\nmodel = "m"\n[rewards.r]\nuse = "r.py:r"\n'
    )
    with pytest.raises(
        ConfigError, match=r"--key \(or LIGHTNINGRL_KEY\) holds what no HTTP header can carry"
    ) as refused:
        work_command(tmp_path / "recipe.toml", server="http://127.0.0.1:9", key="worker-0\n1", settings={})
    assert "worker-0" not in str(refused.value)
    with pytest.raises(ConfigError, match="--server: the address names a user or a password") as refused:
        work_command(tmp_path / "recipe.toml", server="http://me:PASS@127.0.0.1:9", key="worker-01", settings={})
    assert "PASS" not in str(refused.value)


ADDRESSES = (
    "https://me:PASSWORD@h/v1",
    "https://PASSWORD@h/v1",
    "https://h/v1?key=PASSWORD",
    "https://h/v1?api-version=1&api_key=PASSWORD",
    "https://h/v1?Api-Key=PASSWORD",
    "https://h/v1?access_token=PASSWORD",
    "https://h/v1?x-goog-api-key=PASSWORD",
    "https://h/v1?%6Bey=PASSWORD",
    "https://h/v1#token=PASSWORD",
    "https://h/v1;key=PASSWORD",
    "https://h/v1/key=PASSWORD/x",
    "https://h/v1?region=eu;key=PASSWORD",
    "https://h/v1?client_secret=PASSWORD",
    "https://h:PASSWORD@[::1/v1",
    "htp://me:PASSWORD@h/v1",
    "https://h/v1/AIzaPASSWORD-abcdefgh0123/models",
    "https://h/v1?x=sk-proj-PASSWORD0123456789",
    "https://h/hook/aB3PASSWORDxk29Qw71LmZr8TtUv5/v1",
    "https://h/v1/hf%5FPASSWORD0123456789",
)
PLACES = (
    "judge.base_url",
    "upstream.base_url",
    "upstream.models.gpt.base_url",
    "telemetry.forward",
    "runtime.base_urls",
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_with_a_secret_in_it_is_refused_by_the_name_of_its_setting(place: str, address: str) -> None:
    recipe = Recipe.model_validate({**RECIPE, "judge": {"base_url": "https://h", "model": "m"}})
    with pytest.raises(ConfigError, match=place) as refused:
        with_settings(recipe, {place: [address] if place.endswith("urls") else address})
    assert "PASSWORD" not in str(refused.value)


@pytest.mark.parametrize("url", ["postgresql://me@h/n?sslpassword=HIDDEN", "postgresql://me@h/n?pass%77ord=HIDDEN"])
def test_a_store_with_a_password_in_its_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="names no password") as refused:
        with_settings(Recipe.model_validate(RECIPE), {"store_url": url})
    assert "HIDDEN" not in str(refused.value)


def test_addresses_that_say_a_version_or_a_deployment_are_taken() -> None:
    told = (
        "https://h/openai/deployments/x?api-version=2024-10-21",
        "http://[::1]:8000/v1",
        "https://gateway.ai.cloudflare.com/v1/0123456789abcdef0123456789abcdef/my-gateway/openai",
        "https://my-workspace--a-deployment-of-Qwen3-30B-A3B-serve.modal.run/v1/Qwen3-30B-A3B-Instruct-2507",
        "https://h/v1/models/DeepSeek-R1-Distill-Qwen-32B-Instruct-2507-FP8",
        "https://h/v1/projects/7f9c24e8-3b1a-4c5d-9e2f-0a1b2c3d4e5f",
        "https://h/v1?alt=sse&beta=true&max_tokens=3",
    )
    assert [str(JudgeConfig(base_url=url, model="m").base_url) for url in told] == list(told)


@pytest.mark.parametrize("place", ["judge.api_key_env", "upstream.api_key_env", "telemetry.headers_env.authorization"])
@pytest.mark.parametrize("key", ["sk-proj-abcdef0123456789", "AIzaSyA0123456789abcdefghij"])
def test_a_key_in_the_place_of_a_variables_name_is_refused_and_not_said_again(place: str, key: str) -> None:
    recipe = Recipe.model_validate({**RECIPE, "judge": {"base_url": "https://h", "model": "m"}})
    with pytest.raises(ConfigError, match="no key stands in a recipe") as refused:
        with_settings(recipe, {place: key})
    assert key not in str(refused.value)


def test_a_python_recipe_that_is_refused_shows_no_secret() -> None:
    with pytest.raises(ValueError, match="names a user or a password") as refused:
        JudgeConfig(base_url="https://me:PASSWORD@h", model="m")
    assert "PASSWORD" not in str(refused.value)


def test_nobody_that_holds_a_key_shows_it() -> None:
    lease = Lease(
        rollout_id="r",
        attempt=1,
        task=Task(id="t", input=1),
        mode=RolloutMode.TRAIN,
        timeout_s=1,
        key=KEY,
        expires_at=0,
    )
    for holder in (
        lease,
        Upstream(base_url="https://h", api_key=KEY),
        Judge(JudgeConfig(base_url="http://h", model="m"), KEY),
    ):
        assert KEY not in repr(holder)


# ---------------------------------------------------------------------- what foreign servers say again


def test_bytes_are_masked_wherever_they_are_cut() -> None:
    said = f"before {KEY} and {json.dumps(KEY)} sk-SEC after sk-SECRET".encode()
    for size in range(1, len(KEY) + 3):
        passing = MaskedBytes(Mask([KEY]))
        left = b"".join(passing.add(said[start : start + size]) for start in range(0, len(said), size)) + passing.end()
        assert left == b'before *** and "***" sk-SEC after sk-SECRET', size


def test_words_that_local_servers_are_given_for_a_key_stay_in_what_is_said() -> None:
    assert Mask(["EMPTY", "none", None, ""]).json({"said": ["none", "EMPTY"]}) == {"said": ["none", "EMPTY"]}


@pytest.mark.parametrize("variable", ["SEARCH_API_KEY", "SEARCH_API_KEY_2", "search_token2", "GITHUB_PAT"])
def test_an_error_of_an_agent_or_of_a_reward_says_no_key_of_its_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, KEY)
    rollout = ActiveRollout(
        rollout_id="r", attempt=1, base_path="/rollouts/r/attempts/1/v1", key="the-attempts-own-key"
    )
    error = ValueError(f"Illegal header value b'Bearer {KEY}\\n' and b'Bearer the-attempts-own-key'")
    for text in (report_exception(error, rollout, duration_s=1.0).error, describe_raised(error)):
        assert text is not None and KEY not in text and "b'Bearer ***" in text
    assert "the-attempts-own-key" not in (report_exception(error, rollout, duration_s=1.0).error or "")


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(base64.b64encode(KEY.encode()).decode(), id="base64"),
        pytest.param(base64.b64encode(f":{KEY}".encode()).decode(), id="basic authorization"),
        pytest.param(base64.b64encode(f"me:{KEY}".encode()).decode(), id="basic authorization of a user"),
        pytest.param(html.escape(f"{KEY}&<>"), id="a page of HTML"),
    ],
)
def test_a_key_is_masked_however_it_is_written(written: str) -> None:
    said = Mask([f"{KEY}&<>" if "&amp;" in written else KEY]).text(written)
    assert "***" in said and len(said) <= len("bWU6***") + 3, (
        "a byte or two at its edges stand in letters that say others, too"
    )


async def told_again(request: Request) -> Response:
    """Say the key again, whole, in JSON's way, or compressed."""
    key = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")
    how = json.loads(await request.body())["messages"][0]["content"]
    text = json.dumps({"error": {"message": f"Incorrect API key provided: {key}"}, "again": key}).replace("/", "\\/")
    if how == "in pieces":

        async def pieces() -> AsyncIterator[bytes]:
            for letter in text:
                yield letter.encode()

        return StreamingResponse(pieces(), 401, media_type="application/json")
    if how == "compressed":
        return Response(
            gzip.compress(text.encode()), 401, {"content-encoding": "gzip", "content-type": "application/json"}
        )
    if how == "unasked":
        return Response(text, 200, {"content-encoding": "br"})
    return Response(text, 200 if how == "well" else 401, {"x-request-id": key})


@pytest.mark.parametrize("how", ["badly", "well", "in pieces", "compressed", "unasked"])
async def test_a_provider_that_says_the_key_again_is_heard_without_it(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="lightningrl")
    async with serving(Starlette(routes=[Route("/{rest:path}", told_again, methods=["POST"])])) as url:
        upstream = Upstream(base_url=url, api_key=KEY)
        async with live_gateway(tmp_path, settings=GatewaySettings(upstream_models={"judge": upstream})) as gateway:
            attempt = await gateway.attempt()
            async with httpx.AsyncClient() as client:
                body = {"model": "judge", "messages": [{"role": "user", "content": how}]}
                headers = {b"authorization": f"Bearer {attempt.key}".encode(), b"accept": b"a\xe4b"}
                answer = await client.post(f"{attempt.base_url}/chat/completions", json=body, headers=headers)
            assert answer.status_code == {"well": 200, "unasked": 502}.get(how, 401)
            assert how == "unasked" or answer.json()["again"] == "***"
            assert "SECRET" not in answer.text + str(answer.headers)
            await attempt.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED)
            (trajectory,) = await attempt.store.trajectories([attempt.rollout_id])
            assert "SECRET" not in repr(trajectory) + caplog.text
            await gateway.gateway.close()


async def test_a_judge_that_says_the_key_again_is_recorded_without_it() -> None:
    async with serving(Starlette(routes=[Route("/{rest:path}", told_again, methods=["POST"])])) as url:
        for how in ("badly", "well", "in pieces", "compressed"):
            questions = Questions(Judge(JudgeConfig(base_url=url, model="m", retries=0), KEY))
            with pytest.raises(JudgeError) as failed:
                await questions(how)
            assert "***" in str(failed.value)
            assert "SECRET" not in str(failed.value) + repr(questions.asked)


async def test_a_collector_that_says_the_key_again_is_logged_without_it(caplog: pytest.LogCaptureFixture) -> None:
    async def refuse(request: Request) -> Response:
        return Response(
            f"who is {request.headers['authorization']}? {request.headers['authorization'].split()[1]}?", 401
        )

    async with serving(Starlette(routes=[Route("/{rest:path}", refuse, methods=["POST"])])) as url:
        forwarder = ExportForwarder(f"{url}/v1/traces", {"authorization": f"Bearer {KEY}"})
        async with httpx.AsyncClient() as client:
            await forwarder._send(client, b"", 1)
    assert "it answered 401: 'who is ***? ***?'" in caplog.text


# ---------------------------------------------------------------------- how much of an answer is read


async def bomb(request: Request) -> Response:
    how = json.loads(await request.body())["messages"][0]["content"]

    async def pieces() -> AsyncIterator[bytes]:
        squeezing = zlib.compressobj(wbits=31)
        zeros = b" " * 10_000_000
        for _ in range(60):
            yield squeezing.compress(zeros) if how == "compressed" else zeros
        yield squeezing.flush()

    if request.headers["accept-encoding"] != "identity":
        return Response("compressed answers are not asked for", 400)
    return StreamingResponse(
        pieces(), 500 if how == "error" else 200, {"content-encoding": "gzip"} if how == "compressed" else {}
    )


@pytest.mark.parametrize("levels", [150, 600, 900, 5000])
async def test_a_judges_answer_of_any_depth_is_read_or_is_its_failure(levels: int) -> None:
    async def deep(_: Request) -> Response:
        return Response(b'{"choices": [{"message": {"content": "5"}}], "more": ' + b"[" * levels + b"]" * levels + b"}")

    async with serving(Starlette(routes=[Route("/{rest:path}", deep, methods=["POST"])])) as url:
        questions = Questions(Judge(JudgeConfig(base_url=url, model="m", retries=0), KEY))
        with pytest.raises(JudgeError, match="answered without a text"):
            await questions("how good?")
        (asked,) = questions.asked
        assert asked.status == 200 and isinstance(asked.answer, str)


@pytest.mark.parametrize("how", ["whole", "in two parts", "cut"])
async def test_what_is_compressed_is_read_to_its_end_or_is_a_failure(how: str) -> None:
    said = json.dumps({"choices": [{"message": {"content": "5" * 1000}}]}).encode()

    async def compressed(_: Request) -> Response:
        body = gzip.compress(said[:50]) + gzip.compress(said[50:]) if how == "in two parts" else gzip.compress(said)
        return Response(body[:-9] if how == "cut" else body, headers={"content-encoding": "gzip"})

    async with serving(Starlette(routes=[Route("/{rest:path}", compressed, methods=["POST"])])) as url:
        questions = Questions(Judge(JudgeConfig(base_url=url, model="m", retries=0)))
        if how == "cut":
            with pytest.raises(JudgeError, match="its answer ends in the midst"):
                await questions("how good?")
        else:
            assert await questions("how good?") == "5" * 1000


@pytest.mark.parametrize("how", ["long", "compressed", "error"])
async def test_no_more_than_a_megabyte_of_a_judges_answer_is_read(how: str) -> None:
    import resource

    async with serving(Starlette(routes=[Route("/{rest:path}", bomb, methods=["POST"])])) as url:
        questions = Questions(Judge(JudgeConfig(base_url=url, model="m", retries=0)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(
            JudgeError, match="HTTP 500" if how == "error" else f"its answer has more than {LONGEST_ANSWER} bytes"
        ):
            await questions(how)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000, "kB: 600 MB were sent"
        assert len(repr(questions.asked)) < 1000


# ---------------------------------------------------------------------- what agents' processes get


def test_variables_that_a_recipe_names_as_secrets_do_not_reach_agents() -> None:
    recipe = Recipe.model_validate(
        {
            **RECIPE,
            "judge": {"base_url": "https://h", "model": "m", "api_key_env": "JUDGE_KEY"},
            "upstream": {
                "base_url": "https://h",
                "api_key_env": "UPSTREAM_KEY",
                "models": {"x": {"base_url": "https://i", "api_key_env": "X_KEY"}},
            },
            "telemetry": {"forward": "https://h", "headers_env": {"authorization": "COLLECTOR"}},
            "store_url": "postgresql://me@h/n",
            "loggers": ["wandb"],
        }
    )
    secrets = (
        "JUDGE_KEY",
        "UPSTREAM_KEY",
        "X_KEY",
        "COLLECTOR",
        "PGPASSWORD",
        "PGPASSFILE",
        "WANDB_API_KEY",
        "LIGHTNINGRL_KEY",
    )
    given = {**dict.fromkeys(secrets, KEY), "SEARCH_API_KEY": "tool"}
    left = worker_environment("http://h:1", given, withheld=withheld_variables(recipe, {}))
    assert KEY not in left.values()
    assert left["SEARCH_API_KEY"] == "tool"
    shared = with_settings(recipe, {"runtime.environment": ["PGPASSWORD"]})
    assert "PGPASSWORD" in worker_environment("http://h:1", given, withheld=withheld_variables(shared, {}))


def test_a_recipe_without_them_leaves_the_environment_as_it_is() -> None:
    assert withheld_variables(Recipe.model_validate(RECIPE), {}) == ()


def test_exceptions_from_the_proxy_are_those_of_both_spellings() -> None:
    for given in (
        {"no_proxy": "localhost,.corp"},
        {"NO_PROXY": "localhost", "no_proxy": " .corp , localhost"},
        {"NO_PROXY": "localhost,.corp"},
    ):
        left = worker_environment("http://10.0.0.1:8600", given)
        assert left["NO_PROXY"] == left["no_proxy"] == "localhost,.corp,10.0.0.1"
    for everything in ({"NO_PROXY": "*"}, {"NO_PROXY": "localhost", "no_proxy": "*"}):
        assert worker_environment("http://10.0.0.1:8600", everything)["no_proxy"] == "*", (
            "beside others it is no exception to curl and urllib"
        )
