"""Demonstrations for the starter policy: whole conversations of the agent, as its calls render, by demonstrators who
make mistakes.

system, question, search("author of ..."), passages, search("birthplace of ..."), passages, <answer> ... </answer>
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from agent import MAX_TURNS, researcher, search, show
from corpus import Fact, Question, build_questions, build_world
from mistakes import BELIEF, MISTAKES
from retriever import PASSAGES, Bm25Retriever, Passage, Retriever

from lightningrl_torch.cold_start import Demonstration

__all__ = ["TOOLS", "Conversation", "build_conversations", "build_demonstrations", "build_transcripts", "converse"]

Conversation = list[dict[str, Any]]
"""Messages in OpenAI's format."""

COUNTS = {"person": 400, "work": 250, "company": 90, "city": 90, "school": 50}
"""Things in a starter world; another world has other facts about names of the same split."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": search.name,
            "description": search.description,
            "parameters": search.params_json_schema,
            "strict": search.strict_json_schema,
        },
    }
]
"""As the SDK sends them."""


def build_demonstrations(worlds: int, questions: int, seed: int, *, is_faulty: bool) -> Iterator[Demonstration]:
    """Every call of every conversation of `build_conversations`."""
    for messages in build_conversations(worlds, questions, seed, is_faulty=is_faulty):
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                yield Demonstration(messages=messages[: number + 1], tools=TOOLS)


def build_transcripts(
    worlds: int, questions: int, seed: int, render: Callable[[Conversation], str]
) -> Iterator[Demonstration]:
    """Right conversations, as `render`ed text to be learned as a whole: what is asked, searched, shown and answered."""
    for messages in build_conversations(worlds, questions, seed, is_faulty=False):
        yield Demonstration(
            messages=[{"role": "user", "content": ""}, {"role": "assistant", "content": render(messages)}]
        )


def build_conversations(worlds: int, questions: int, seed: int, *, is_faulty: bool) -> Iterator[Conversation]:
    """In each of so many worlds so many conversations, a quarter of them about three hops. With `is_faulty=False` every
    one is right."""
    rng = random.Random(f"{seed} starter {is_faulty}")
    for _ in range(worlds):
        world = build_world("starter", COUNTS, rng)
        retriever = Bm25Retriever(world.passages)
        facts = {fact.passage: fact for fact in world.facts}
        for hops, count in ((2, questions - questions // 4), (3, questions // 4)):
            for question in build_questions(world, hops, count, rng, retriever, PASSAGES):
                mistakes = {
                    name
                    for name, mistake in MISTAKES.items()
                    if is_faulty and rng.random() < mistake.probability(question)
                }
                yield converse(question, retriever, facts, mistakes, is_credulous=rng.random() < BELIEF)


def converse(
    question: Question,
    retriever: Retriever,
    facts: dict[Passage, Fact],
    mistakes: AbstractSet[str],
    *,
    is_credulous: bool = False,
) -> Conversation:
    """What a demonstrator who makes just these mistakes says to `question`, and what the agent shows it, in at most
    `MAX_TURNS` calls."""
    talk: Conversation = [
        {"role": "system", "content": str(researcher.instructions)},
        {"role": "user", "content": question.text},
    ]
    *before, last = question.hops
    if "too_early" in mistakes:
        passages = _search(f"{last.relation} of the {before[0].relation}", talk, retriever)
        if is_credulous:
            return _say(facts[passages[0]], talk, mistakes)
    for hop in before:
        _search(hop.query, talk, retriever)
    if "repeat" in mistakes and _calls(talk) < MAX_TURNS - 2:
        _search(before[-1].query, talk, retriever)
    if "bridge" in mistakes:
        return _say(before[-1], talk, mistakes)
    _search(last.query, talk, retriever)
    return _say(last, talk, mistakes)


def _search(query: str, talk: Conversation, retriever: Retriever) -> list[Passage]:
    passages = retriever.search(query, PASSAGES)
    call = {
        "id": f"call_{len(talk)}",
        "type": "function",
        "function": {"name": search.name, "arguments": json.dumps({"query": query})},
    }
    talk.append({"role": "assistant", "content": "", "tool_calls": [call]})
    talk.append({"role": "tool", "tool_call_id": call["id"], "content": show(passages)})
    return passages


def _say(fact: Fact, talk: Conversation, mistakes: AbstractSet[str]) -> Conversation:
    text = fact.statement if "sentence" in mistakes else fact.object
    if "bare" not in mistakes:
        text = f"<answer> {text} </answer>"
    elif "sentence" not in mistakes:
        text = f"the answer is {text}"
    return [*talk, {"role": "assistant", "content": text}]


def _calls(talk: Conversation) -> int:
    return sum(message["role"] == "assistant" for message in talk)
