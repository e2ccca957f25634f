"""Answers that a grammar bounds: what is sampled, what is recorded, what is trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import sized

from lightningrl.backends import GenerateRequest
from lightningrl.types import FinishReason, SamplingSettings
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.testing import make_model, make_tokenizer

jsonschema: Any = import_module("jsonschema")
TOKENIZER = make_tokenizer()
END = 256
CLOSE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
PET = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}


def lark(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps({**schema, 'x-guidance': CLOSE})}"


@pytest.fixture(scope="module")
def engine() -> Iterator[TorchEngine]:
    engine = TorchEngine(
        make_model(max_position_embeddings=512),
        policy="p",
        context_length=512,
        stop_token_ids=[END],
        text_of=lambda ids: str(TOKENIZER.decode(list(ids))),
        tokenizer=TOKENIZER.backend_tokenizer.to_str,
    )
    yield engine
    engine.close()


async def sample(engine: TorchEngine, prompt: str = "a: ", **sampling: Any) -> tuple[list[int], list[float], Any]:
    settings = SamplingSettings(**{"max_tokens": 200, **sampling})
    request = GenerateRequest(id=f"r{id(sampling)}", prompt_ids=tuple(TOKENIZER.encode(prompt)), sampling=settings)
    ids: list[int] = []
    logprobs: list[float] = []
    reason = None
    async for chunk in engine.generate(request):
        ids += chunk.token_ids
        logprobs += chunk.logprobs
        reason = chunk.finish_reason
    return ids, logprobs, reason


def text(ids: Sequence[int]) -> str:
    assert ids[-1] == END
    return str(TOKENIZER.decode(list(ids[:-1])))


SCALARS = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, *[st.integers(0, 50)] * 2),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
    st.builds(lambda words: {"enum": words}, st.lists(st.text('abé"\\ ', max_size=4), min_size=1, unique=True)),
    st.just({"type": "string", "pattern": "^[A-C]{2}-[0-9]$"}),
    st.just({"type": "string", "format": "date"}),
)


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.dictionaries(st.text("xyz", min_size=1, max_size=3), inner, min_size=1, max_size=3).map(
        lambda fields: {
            "type": "object",
            "properties": fields,
            "required": sorted(fields)[:1],
            "additionalProperties": False,
        }
    )
    arrays = st.builds(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}, inner)
    return objects | arrays | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)


@settings(max_examples=sized(25, 500), deadline=None)
@given(schema=st.recursive(SCALARS, grown, max_leaves=4), temperature=st.sampled_from([0.0, 1.0, 2.0]))
def test_every_answer_fits_its_schema(engine: TorchEngine, schema: dict[str, Any], temperature: float) -> None:
    ids, logprobs, reason = asyncio.run(
        sample(engine, grammar=lark(schema), temperature=temperature, max_tokens=400, top_p=0.9)
    )
    assert reason is FinishReason.STOP and len(ids) == len(logprobs)
    jsonschema.validate(json.loads(text(ids)), schema)
