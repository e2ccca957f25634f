"""What a policy, a tool, a task, an error, an agent, a worker or a recipe writes is shown on the pages, and never
obeyed by them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, BadRequestError
from recorded import RECIPE, write_recipe
from sizes import sized
from viewing import ReadPage, parse_page, read_page, viewing

from lightningrl.records import Score
from lightningrl.sanitize import clean_text, printable
from lightningrl.types import OtherCall, OtherCallKind, Outcome, RolloutSpec, Task
from lightningrl_client.control.client import ServerClient
from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.reader import open_run
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_viewer.report import make_report

MARK = "¤"
"""In every hostile text, so that it is found again."""
WRITTEN = [
    "<script>fetch('//evil')</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "</bdi></pre></td></article></main><h1>mine</h1>",
    "<!--",
    "]]><![CDATA[",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)",
    "&lt;b&gt;&#x3c;b&#x3e;",
    "\x1b]0;mine\x07\x1b[2J\x9b31m",
    "\u202egnp.exe\u2066\u2069",
    "\x00\x08\ufeff\u200b\u2028",
    "\ud800\udfff\udc00",
    "\r\n\t",
    "مرحبا שלום",
    "𝕏" * 40,
]
TAGS = frozenset(
    [
        "a",
        "article",
        "aside",
        "b",
        "bdi",
        "body",
        "br",
        "button",
        "caption",
        "circle",
        "code",
        "dd",
        "details",
        "dialog",
        "div",
        "dl",
        "dt",
        "figcaption",
        "figure",
        "form",
        "g",
        "h1",
        "h2",
        "h3",
        "head",
        "header",
        "html",
        "input",
        "label",
        "li",
        "line",
        "link",
        "main",
        "meta",
        "nav",
        "ol",
        "output",
        "p",
        "path",
        "pre",
        "progress",
        "rect",
        "script",
        "section",
        "span",
        "strong",
        "style",
        "summary",
        "svg",
        "table",
        "tbody",
        "td",
        "text",
        "th",
        "thead",
        "title",
        "tr",
        "ul",
    ]
)
ATTRIBUTES = frozenset(
    [
        "action",
        "aria-current",
        "aria-hidden",
        "aria-label",
        "aria-labelledby",
        "aria-live",
        "charset",
        "class",
        "colspan",
        "content",
        "cx",
        "cy",
        "d",
        "data-back",
        "data-close",
        "data-events",
        "data-first",
        "data-interval",
        "data-key",
        "data-last",
        "data-left",
        "data-live",
        "data-open",
        "data-peek",
        "data-place",
        "data-read",
        "data-right",
        "data-row",
        "data-say",
        "data-theme",
        "dir",
        "height",
        "href",
        "http-equiv",
        "id",
        "inputmode",
        "lang",
        "max",
        "method",
        "name",
        "open",
        "placeholder",
        "preserveaspectratio",
        "r",
        "rel",
        "role",
        "rowspan",
        "scope",
        "size",
        "src",
        "tabindex",
        "text-anchor",
        "title",
        "type",
        "value",
        "viewbox",
        "width",
        "x",
        "x1",
        "x2",
        "y",
        "y1",
        "y2",
    ]
)
HIDDEN = frozenset(
    map(chr, (*range(9), *range(11, 32), *range(127, 160), 0x61C, *range(0x200B, 0x2010), *range(0x2028, 0x202F)))
)
hostile = st.lists(st.sampled_from(WRITTEN) | st.text(max_size=12), min_size=1, max_size=4).map(
    lambda parts: MARK + "".join(parts) + MARK
)


def check_page(page: ReadPage, *, is_report: bool = False) -> None:
    """Nothing in it is markup but ours, and every hostile text stands alone."""
    assert {tag for tag, _ in page.tags} <= TAGS
    assert {name for _, attributes in page.tags for name in attributes} <= ATTRIBUTES
    scripts = [attributes for tag, attributes in page.tags if tag == "script"]
    assert [attributes["src"].startswith("/static/") for attributes in scripts] == ([] if is_report else [True])
    assert all(attributes["href"].startswith(("/", "#")) for _, attributes in page.tags if "href" in attributes)
    assert not set(page.html) & HIDDEN, "control characters are written out"
    for text, around in page.texts:
        if MARK in text:
            assert "bdi" in around or "title" in around, f"not isolated: {text[:80]!r} in {around}"
            assert "script" not in around and "style" not in around
    assert page.around in ([], ["html"]), "all elements are closed where they were opened"


@dataclass
class Stage:
    """A run whose actors write what they are told to."""

    folder: Path
    server: LiveGateway
    control: ServerClient
    client: httpx.AsyncClient
    loop: asyncio.AbstractEventLoop
    numbers: Iterator[int]

    def check(self, text: str) -> None:
        self.loop.run_until_complete(self._check(text))

    async def _check(self, text: str) -> None:
        rollout_id = f"r{next(self.numbers):06d}"
        group = f"g{rollout_id} {' '.join(text.split())[:50]}"  # the trainer names groups, in one line
        await self.play(rollout_id, group, text)
        group = quote(clean_text(group), safe="")
        chosen = {"task": f"t {text[:30]}", "tool": text[:50], "q": text[:20]}
        addresses = ["", "?view=tokens", "?view=tokens&form=table", "/text?part=task", "/text?part=tool-0-0-result"]
        for address in (
            *("/", "/rollouts", f"/rollouts?peek={rollout_id}"),
            *(f"/rollouts?{urlencode({name: clean_text(value)})}" for name, value in chosen.items()),
            *(f"/rollouts/{rollout_id}{rest}" for rest in addresses),
            *(
                f"/groups/{group}",
                f"/credit?group={group}",
                f"/credit?rollout={rollout_id}",
                "/credit",
                "/system",
                "/recipe",
            ),
        ):
            page = await read_page(self.client, address)
            check_page(page)
            assert len(page.html.encode()) < 200_000
        async with open_run(self.folder) as run:
            check_page(parse_page(await make_report(run, self.folder)), is_report=True)
        shown = (await read_page(self.client, f"/rollouts/{rollout_id}/text?part=task")).texts
        said = printable(clean_text(text))
        found = next(found for found, _ in shown if MARK in found and len(found) >= min(len(said), 2000))
        assert found.startswith(said[:2000])

    async def play(self, rollout_id: str, group: str, text: str, tools: Sequence[str] = ()) -> None:
        """Task, policy, role, tools, error, refused call, judge, worker, rewards: all say it; `tools` are called as
        well."""
        task = Task(id=f"t {text[:30]}", input=text, answer={"is": text})
        await self.control.create_rollouts([RolloutSpec(id=rollout_id, task=task, group_id=group)])
        lease = await self.control.lease(f"w {text[:60]}", 3600.0)
        assert lease is not None and lease.rollout_id == rollout_id
        base_url, header = self.server.url + lease.base_path, {"authorization": f"Bearer {lease.key}"}
        engine = self.server.engine
        engine.enqueue(clean_text(text)[:300] or "x")
        role = quote(text[:20].encode("utf-8", "replace"))
        async with AsyncOpenAI(base_url=base_url, api_key=lease.key, max_retries=0) as client:
            messages: Any = [{"role": "user", "content": clean_text(text)[:2000]}]
            said = await client.chat.completions.create(
                model="any", messages=messages, extra_headers={"x-lightningrl-agent": role}
            )
            with pytest.raises(BadRequestError):
                await client.chat.completions.create(model=clean_text(text)[:50], messages=messages, n=0)
        (call,) = await self.server.store.calls(rollout_id, 1)
        tool = {
            "name": text[:50],
            "status": "error",
            "arguments": {"of": text},
            "result": text,
            "error_type": text[:50],
        }
        async with httpx.AsyncClient(base_url=base_url, headers=header) as client:
            called = [{**tool, "call": said.id}, tool, *({**tool, "name": name} for name in tools)]
            answer = await client.post("/tool_calls", content=json.dumps({"tool_calls": called}))
            assert answer.is_success, answer.text
            reward = await client.post("/rewards", content=json.dumps({"rewards": {clean_text(text)[:60]: 1.0}}))
            assert reward.is_success, reward.text
        await self.control.finish_attempt(rollout_id, 1, Outcome.AGENT_ERROR, output={"o": text}, error=text)
        judged = OtherCall(
            kind=OtherCallKind.JUDGE,
            path=text,
            model=text,
            code=text,
            message=text,
            request=text,
            answer=text,
            started_at=2e9,
        )
        credit = {call.transition.id: call.transition.logprobs}
        score = Score(
            rollout_id=rollout_id, attempt=1, reward=1.0, unrewarded=text[:500], asked=[judged], advantages=credit
        )
        await self.control.set_scores([score])
        await self.control.mark_trained(int(rollout_id[1:]) + 1, [rollout_id], {"reward": 1.0, "rollouts": 1.0})


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("hostile")
    write_recipe(folder, RECIPE)
    with asyncio.Runner() as runner:
        gateway = live_gateway(folder)
        server = runner.run(gateway.__aenter__())
        server.engine.tokenizer.save_pretrained(folder / "policy")
        control = ServerClient(server.url, server.run_key)
        runner.run(control.__aenter__())
        viewer = viewing(folder)
        client = runner.run(viewer.__aenter__())
        yield Stage(folder, server, control, client, runner.get_loop(), itertools.count())
        runner.run(viewer.__aexit__(None, None, None))
        runner.run(control.__aexit__(None, None, None))
        runner.run(gateway.__aexit__(None, None, None))


@settings(max_examples=sized(8, 300), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example(MARK + "".join(WRITTEN))
@example(MARK + "<" * 1_000_000)
@given(hostile)
def test_hostile_text_is_shown_and_never_obeyed(stage: Stage, text: str) -> None:
    stage.check(text)


def test_a_run_of_a_thousand_tools_shows_those_that_fail_most(stage: Stage) -> None:
    names = [f"ض{number}" * 8 for number in range(1000)]

    async def look() -> ReadPage:
        await stage.play(f"r{next(stage.numbers):06d}", "g-tools", MARK, [*names, names[700], names[700]])
        return await read_page(stage.client, "/")

    page = stage.loop.run_until_complete(look())
    check_page(page)
    assert len(page.html.encode()) < 200_000 and names[700] in page.text


@settings(max_examples=sized(20, 300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(MARK + "".join(WRITTEN[:12]) + MARK)
@given(hostile)
def test_a_recipe_that_writes_markup_is_shown_as_values(tmp_path: Path, text: str) -> None:
    text = clean_text(text)
    policy = RECIPE.policy.model_copy(update={"model": text})
    write_recipe(
        tmp_path, RECIPE.model_copy(update={"name": text, "policy": policy, "learner": {"loss": text, text: [text]}})
    )
    recipe = RunOrigin.read(tmp_path)
    assert recipe.recipe.name == text

    async def look() -> None:
        if not (tmp_path / "store.sqlite").exists():
            async with live_gateway(tmp_path):
                pass
        async with viewing(tmp_path) as client:
            for address in ("/", "/recipe"):
                check_page(await read_page(client, address))

    asyncio.run(look())


def forwarded(path: str, text: str, request: Any, answer: Any) -> OtherCall:
    return OtherCall(
        kind=OtherCallKind.FORWARDED,
        path=path,
        model=text,
        agent=text,
        code=text,
        message=text,
        request=request,
        answer=answer,
        started_at=2e9,
    )


def dialogues(text: str) -> list[OtherCall]:
    """Calls of each API whose every word is hostile; roles are made to look like what a policy sampled, too."""
    asked = [{"id": text, "type": "function", "function": {"name": text, "arguments": text}}]
    said = {"role": text, "name": text, "content": text, "reasoning_content": text, "tool_calls": asked}
    told = {"role": "tool", "tool_call_id": text, "content": [{"type": "text", "text": text}, {"type": text}]}
    looks = [{"role": role, "content": text} for role in ("sampled", "a\tsampled", 'x" onclick="alert(1)')]
    answer = {"role": "assistant", "content": None, "refusal": {text: text}, "tool_calls": asked}
    stream = f"data: {json.dumps({'choices': [{'delta': {'content': text}, 'finish_reason': text}]})}\n\n"
    block = {"type": "tool_use", "id": text, "name": text, "input": {text: [text]}}
    return [
        forwarded("chat/completions", text, {"messages": [said, told, *looks]}, {"choices": [{"message": answer}]}),
        forwarded("v1/responses", text, {"instructions": {text: text}, "input": [[text, text], said]}, stream),
        forwarded("messages", text, {"system": [text], "messages": [said]}, {"type": "message", "content": [block]}),
    ]


ORIGINS: tuple[Any, ...] = ({}, {"source": 7, "formats": 7}, {"source": [], "formats": {"a": 1}})
"""Where an import says that it is from, in somebody else's folder."""


@settings(max_examples=sized(4, 100), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example(MARK + "".join(WRITTEN[:12]) + MARK)
@example(MARK + "[" * 50_000)
@given(hostile)
def test_an_imported_dialogue_that_writes_markup_is_shown_and_never_obeyed(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    folder, text = tmp_path_factory.mktemp("imported"), clean_text(text)

    def write(traces: Any) -> None:
        origin: dict[str, Any] = {
            "source": None,
            "folder": str(folder),
            "run": str(folder),
            "models": {},
            "settings": {},
        }
        (folder / "run.json").write_text(json.dumps({**origin, "traces": traces}), encoding="utf-8")

    async def look() -> None:
        write({"source": text, "formats": [text, text]})
        (folder / "grades.jsonl").write_text(json.dumps({"grade": text}) + "\n", encoding="utf-8")
        async with live_gateway(folder) as server, ServerClient(server.url, server.run_key) as control:
            state = {"messages": [{"role": "user", "content": text}]}
            await control.create_rollouts([RolloutSpec(id="r", task=Task(id="t", input=state), group_id="g")])
            assert await control.lease("w", 3600.0) is not None
            end = {"messages": [{"role": "assistant", "content": text}]}
            await control.finish_attempt("r", 1, Outcome.SUCCEEDED, output=end)
            await control.set_scores([Score(rollout_id="r", attempt=1, reward=1.0, asked=dialogues(text))])
        async with viewing(folder) as client:
            texts = [
                f"/rollouts/r/text?part={part}" for part in ("task", "output-1", "talk-0-0", "talk-0-tool-0-arguments")
            ]
            for address in ("/", "/rollouts", "/rollouts?peek=r", "/rollouts/r", "/rollouts/r?call=2", *texts):
                page = await read_page(client, address)
                check_page(page)
                turns = [attributes.get("class", "").split() for _, attributes in page.tags]
                assert sum("sampled" in turn for turn in turns) <= 2, "what a message says of itself is no answer"
            async with open_run(folder) as run:
                check_page(parse_page(await make_report(run, folder)), is_report=True)
        for traces in ORIGINS:
            write(traces)
            async with viewing(folder) as client:
                check_page(await read_page(client, "/"))

    asyncio.run(look())
