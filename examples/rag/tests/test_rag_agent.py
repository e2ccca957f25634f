"""The unchanged agent against a real gateway, and demonstrations that are its calls, token for token."""

from pathlib import Path
from typing import Any

import data
import pytest

pytest.importorskip("torch")

from agents import set_default_openai_client
from demonstrations import TOOLS, build_conversations, build_demonstrations, converse
from mistakes import MISTAKES
from openai import AsyncOpenAI
from retriever import Passage, build_index, open_retriever
from starter import starter_tokenizer

from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_testing.live_gateway import LiveAttempt, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_torch.cold_start import Demonstration, encode

PASSAGES = [
    Passage("Silent Harbor", "The author of this novel is Mara Holt."),
    Passage("Mara Holt", "Her birthplace is Port Alder."),
]


def searching(query: str) -> str:
    return f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


async def ask(
    folder: Path, tokenizer: Any, script: list[str], task: dict[str, str]
) -> tuple[str, LiveAttempt, list[Any]]:
    """The agent's answer and the recorded calls, with a model that says `script`."""
    import agent

    engine = ScriptedEngine(tokenizer)
    engine.enqueue(*script)
    async with live_gateway(folder, engine=engine, renderer=PolicyRenderer(tokenizer)) as gateway:
        attempt = await gateway.attempt()
        async with AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.key) as client:
            set_default_openai_client(client, use_for_tracing=False)
            said = await agent.answer(task)
        return said, attempt, list(await attempt.transitions())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return starter_tokenizer(list(build_demonstrations(1, 400, 1, is_faulty=True)))


@pytest.fixture
def index(tmp_path: Path) -> str:
    build_index(PASSAGES, tmp_path / "index")
    return str(tmp_path / "index")


async def test_the_agent_searches_and_answers(tmp_path: Path, tokenizer: Any, index: str) -> None:
    script = [
        searching("author of Silent Harbor"),
        searching("birthplace of Mara Holt"),
        "<answer> Port Alder </answer>",
    ]
    said, _, calls = await ask(
        tmp_path, tokenizer, script, {"question": "where was the author of Silent Harbor born?", "index": index}
    )
    assert said == "<answer> Port Alder </answer>"
    prompt = tokenizer.decode(list(calls[-1].prompt_ids))
    assert "# Tools\nsearch(query)" in prompt
    assert "<tool_response>\n[1] Mara Holt: Her birthplace is Port Alder.\n[2] Silent Harbor: The author" in prompt


async def test_the_agent_gives_up_after_five_turns(tmp_path: Path, tokenizer: Any, index: str) -> None:
    said, _, calls = await ask(tmp_path, tokenizer, [searching("zebra")] * 6, {"question": "who?", "index": index})
    assert (said, len(calls)) == ("", 5)
    assert "<tool_response>\nnothing found\n</tool_response>" in tokenizer.decode(list(calls[-1].prompt_ids))


def find_conversation(names: set[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A demonstrator who makes just these mistakes, about a task that the agent can be given."""
    task = next(task for task in data.validation_tasks() if task["metadata"]["hops"] == 2)
    question = next(one for one in data.build_splits()["validation"] if one.text == task["input"]["question"])
    facts = {fact.passage: fact for world in data.build_worlds().values() for fact in world.facts}
    return converse(
        question, open_retriever(task["input"]["index"]), facts, names, is_credulous="bridge" in names
    ), task["input"]


@pytest.mark.parametrize("names", ["", "too_early", "too_early bridge sentence", "repeat bare", "bare sentence"])
async def test_a_demonstration_is_what_the_agents_calls_render_to(
    tmp_path: Path, tokenizer: Any, names: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNINGRL_CACHE", str(cache))
    conversation, task = find_conversation(set(names.split()))
    demonstrations = [
        Demonstration(messages=conversation[: number + 1], tools=TOOLS)
        for number, message in enumerate(conversation)
        if message["role"] == "assistant"
    ]
    encoded = [encode(one, tokenizer) for one in demonstrations]
    script = [tokenizer.decode(ids[prompt:]).removesuffix("<|im_end|>") for ids, prompt in encoded]
    said, _, calls = await ask(tmp_path, tokenizer, script, task)
    assert said == conversation[-1]["content"]
    assert [(list(call.prompt_ids), list(call.completion_ids)) for call in calls] == [
        (ids[:prompt], ids[prompt:]) for ids, prompt in encoded
    ]


def test_no_demonstrator_takes_more_turns_than_the_agent_has() -> None:
    lengths = {
        sum(message["role"] == "assistant" for message in talk)
        for talk in build_conversations(1, 400, 1, is_faulty=True)
    }
    assert lengths == {2, 3, 4, 5}


def test_every_mistake_is_made_about_as_often_as_it_says() -> None:
    talks = list(build_conversations(1, 800, 1, is_faulty=True))
    bare = sum("<answer>" not in talk[-1]["content"] for talk in talks) / len(talks)
    assert MISTAKES["bare"].seldom < bare < MISTAKES["bare"].often


def test_the_agent_knows_nothing_of_us() -> None:
    for name in ("agent.py", "retriever.py"):
        assert "lightningrl" not in (Path(__file__).parent.parent / name).read_text().lower()
