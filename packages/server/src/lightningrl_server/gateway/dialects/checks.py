"""Checks of all dialects: bodies, ranges, text parts, tool-call ids, JSON schemas of answers and tools, and fields of
no API's own.

What servers of open models take beside an API, and what nobody here reads:

sampling that is the run's (`min_p`, `repetition_penalty`)        ─► counted as overridden
`chat_template_kwargs`, `enable_thinking`                         ─► taken where they are the policy's own, else refused
`stop_token_ids`                                                  ─► honoured
what would change prompt or answer (`guided_json`, `min_tokens`)  ─► refused by name
another API's name for a field (`stop` of messages)               ─► refused with this API's
anything else                                                     ─► counted as ignored
the same within `extra_body`, `nvext`, `sampling_params`          ─► as if it stood beside them
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from lightningrl.sanitize import is_deeper
from lightningrl_server.gateway.request import AnswerFormat, Extras, Refusal
from lightningrl_server.rendering.arguments import MAX_DEPTH, TooDeep, parse_arguments

__all__ = [
    "DOCUMENTS",
    "Flag",
    "Number",
    "check_count",
    "check_schema",
    "check_tool_call_ids",
    "decode_body",
    "decode_clean",
    "is_nothing",
    "is_parts",
    "join_text",
    "read_arguments",
    "read_asked",
    "read_extras",
    "read_format",
    "read_stop",
    "read_top_logprobs",
    "read_whole",
    "refuse_fields",
    "with_instruction",
]

T = TypeVar("T")

Number = int | float | None
"""A whole number as clients send it: `256`, `256.0`, nothing."""
Flag = bool | int | None
"""Yes or no as clients send it: `true`, `1`, nothing."""
DOCUMENTS = ("document", "search_result")
"""Parts that hold a text with a title or an origin."""
_TEXT_KEYS = {"text": "data", "content": "content"}
"""Keys of a document's source that hold its text, by its type."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_MOST_MESSAGES = 4096
_MOST_STOPS = 16
_LONGEST_STOP, _MOST_STOP_IDS = 1024, 64
_NEUTRAL = {"top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""Sampling settings that are the run's, and the value by which each asks for nothing."""
_DRAWN = ("temperature", "top_p", "top_k")
"""Settings that every engine has, so that any value of them asks for something."""
_CONSTRAINED = "answers are bound to JSON schemas alone; give one by {form}, or say the format in the messages"
_ITS_OWN_END = (
    "where an answer ends is the policy's to learn, and the recorded logprobs are those it was sampled with; "
    "leave it out"
)
_ITS_PROMPT = (
    "messages become a prompt as the recipe says (policy.chat_template_kwargs, the model's chat_template.jinja); "
    "leave it out"
)
_ONE_BY_ONE = "each answer is sampled by itself; leave it out"
_AS_SAMPLED = "the recorded logprobs would not be the ones sampled from; leave it out"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("guided_json", "guided_choice", "guided_regex", "guided_grammar", "structured_outputs"), _CONSTRAINED
    ),
    **dict.fromkeys(("guided_decoding", "structural_tag", "json_schema", "regex", "ebnf", "grammar"), _CONSTRAINED),
    **dict.fromkeys(("min_tokens", "min_new_tokens", "ignore_eos"), _ITS_OWN_END),
    **dict.fromkeys(
        ("bad_words", "allowed_token_ids", "banned_tokens", "logits_processors", "custom_logit_processor"), _AS_SAMPLED
    ),
    **dict.fromkeys(
        ("chat_template", "documents", "continue_final_message", "echo", "truncate_prompt_tokens"), _ITS_PROMPT
    ),
    **dict.fromkeys(("add_generation_prompt",), _ITS_PROMPT),
    **dict.fromkeys(("use_beam_search", "best_of", "length_penalty"), _ONE_BY_ONE),
}
"""Why, by name."""
_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("system", "instructions"), "instructions"),
    **dict.fromkeys(("response_format", "output_format"), "format"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"), "bound"),
    **dict.fromkeys(("stop", "stop_sequences"), "stop"),
    **dict.fromkeys(("functions", "function_call"), "tools"),
    **{name: name for name in ("n", "logit_bias")},
}
"""Fields of one API or another that change prompt or answer, and what each is about."""
_NOTHING = {"add_generation_prompt": True, "best_of": 1, "length_penalty": 1, "n": 1}
"""Values by which a field asks for nothing, where it is another than of all fields."""
_NO_MATTER = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier", "cache_control", "cache_salt", "priority"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction", "betas", "anthropic_version", "client_metadata"),
        "request_id",
    }
)
"""Fields that say nothing of prompt or answer."""
_WRAPPERS = ("extra_body", "nvext", "sampling_params")
"""Objects in which some clients and servers have these fields, one level deep."""

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_HIGH, _LOW = rb"\\u[dD][89aAbB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(rb"\\\\|%s%s|(%s|%s)" % (_HIGH, _LOW, _HIGH, _LOW))
"""A backslash, a pair of surrogates, or (in a group) a lone one."""


def decode_clean(decode: Callable[[bytes], T], data: bytes) -> T:
    """Decode JSON; half an emoji, which JSON may hold as `\\ud83d` and UTF-8 may not, is U+FFFD."""
    try:
        return decode(data)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        clean = _ESCAPES.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], data)
        if clean == data:
            raise
        return decode(clean)


def decode_body(decode: Callable[[bytes], T], data: bytes, what: str) -> T:
    """The body as a struct. `what` it should be, for the sentence."""
    try:
        return decode_clean(decode, data)
    except msgspec.ValidationError as error:
        raise Refusal(f"the request is no {what}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(f"the request body is not JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise Refusal("the request body is nested too deeply; flatten it", code="invalid_json") from error


def refuse_fields(body: msgspec.Struct, sentences: Mapping[str, str]) -> None:
    """Raise Refusal, with its sentence, for the first field that is set."""
    for name, sentence in sentences.items():
        if getattr(body, name):
            raise Refusal(sentence, param=name)


def is_parts(content: Any) -> bool:
    """True for a content that is text, parts, or nothing."""
    if isinstance(content, list):
        return all(isinstance(part, dict | str) for part in content)
    return content is None or isinstance(content, str)


def is_nothing(value: Any) -> bool:
    """True for a field that says no more than one left out: nothing, no, zero, empty, or only such values."""
    if isinstance(value, Mapping):
        return all(map(is_nothing, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_nothing, value))
    return not value


def read_whole(name: str, value: Number, low: int, high: int | None = None) -> int | None:
    """A whole number within bounds, also where it is written as a float; None where nobody says one."""
    if value is None:
        return None
    if isinstance(value, float):
        if not value.is_integer():
            raise Refusal.at(name, f"is {value}; it must be a whole number")
        value = int(value)
    if value < low or (high is not None and value > high):
        raise Refusal.at(
            name, f"is {value}; it must be at least {low}" + (f" and at most {high}" if high is not None else "")
        )
    return value


def read_top_logprobs(value: Number) -> int:
    """Refuse to ask for more than the engine reports, which is the sampled token's."""
    most = read_whole("top_logprobs", value, 0, 20) or 0
    if most > 1:
        raise Refusal.at("top_logprobs", f"is {most}; only the sampled token's logprob is known: ask for at most 1")
    return most


def check_count(name: str, items: Sequence[Any] | None, most: int = _MOST_MESSAGES) -> None:
    """No more than can be read in a moment."""
    if items is not None and len(items) > most:
        raise Refusal.at(name, f"has {len(items)} entries; send at most {most}")


def read_stop(name: str, stop: str | Sequence[str | None] | None) -> tuple[str, ...]:
    """Stop strings, without empty ones."""
    stops = [stop] if isinstance(stop, str) else [text for text in stop or () if text]
    check_count(name, stops, _MOST_STOPS)
    for text in stops:
        if len(text.encode()) > _LONGEST_STOP:
            raise Refusal.at(name, f"has a text of {len(text.encode())} bytes; stop at one of at most {_LONGEST_STOP}")
    return tuple(text for text in stops if text)


def read_asked(**settings: Any) -> dict[str, float]:
    """The settings that are numbers; the recipe decides them, so another value does not matter."""
    numbers: dict[str, float] = {}
    for name, value in settings.items():
        if not isinstance(value, bool) and isinstance(value, int | float | str):
            with contextlib.suppress(ValueError, OverflowError):
                numbers[name] = float(value)
    return {name: value for name, value in numbers.items() if -1e9 <= value <= 1e9}


def read_arguments(arguments: Any, where: str) -> Any:
    """A tool call's arguments as a value; empty ones of any spelling are an empty object, other text stays text."""
    try:
        value = parse_arguments(arguments.strip()) if isinstance(arguments, str) else arguments
        if value is None or value == [] or (isinstance(value, str) and value.strip() in ("", "null")):
            return {}
        if is_deeper(value, MAX_DEPTH):
            raise TooDeep
        return value
    except TooDeep as error:
        raise Refusal.at(where, f"has a tool call with {error}") from None


def join_text(content: str | Sequence[Mapping[str, Any] | str] | None, where: str) -> str:
    """The text of a message's content, documents and search results with their titles in paragraphs of their own; parts
    that are no text are refused, as the policy reads text only."""
    if isinstance(content, str):
        return content
    joined, gap = "", ""  # between texts a newline, as vLLM joins them
    for part in content or ():
        kind = "text" if isinstance(part, str) else part.get("type", "text")
        if not isinstance(part, str) and kind in DOCUMENTS:
            joined, gap = "\n\n".join(filter(None, (joined.rstrip(), _document(part, where)))), "\n\n"
            continue
        text = part if isinstance(part, str) else part.get("refusal" if kind == "refusal" else "text")
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise Refusal.at(where, f"has a part of type {kind!r}; the policy reads text only", field=".content")
        if text:
            joined, gap = joined + gap + (text.lstrip("\n") if gap == "\n\n" else text), "\n"
    return joined


def _document(part: Mapping[str, Any], where: str) -> str:
    """Title, origin or context, and text."""
    source = part.get("source")
    heads = (part.get("title"), source)
    body = part.get("content")
    if part["type"] != "search_result":
        inner: Mapping[Any, Any] = source if isinstance(source, Mapping) else {}
        heads, body = (part.get("title"), part.get("context")), inner.get(_TEXT_KEYS.get(str(inner.get("type"))))
    if body is None or not is_parts(body):
        problem = f"has a part of type {part['type']!r} that holds no text"
        remedy = "the policy reads text only: send the document's text"
        raise Refusal.at(where, f"{problem}; {remedy}", field=".content")
    return "\n\n".join([head for head in heads if isinstance(head, str) and head] + [join_text(body, where)])


def check_tool_call_ids(messages: Sequence[Mapping[str, Any]], *, goes_on: bool = False, once: bool = False) -> None:
    """Open calls have ids of their own, and a call has one result; else nobody can tell which result belongs to which
    call. An id may come back after its result, as some servers number the calls of each answer anew; with `once` it may
    not. Empty ids are none. `goes_on`: the calls may stand in an earlier answer that these messages follow."""
    open_calls: set[str] = set()
    asked: set[str] = set()
    answered: set[str] = set()
    for message in messages:
        if message["role"] == "assistant":
            for call in message.get("tool_calls") or ():
                call_id = call.get("id")
                if not call_id:
                    continue
                if call_id in open_calls or (once and call_id in asked):
                    raise Refusal(
                        f"the tool-call id {call_id!r} is used by two calls of the conversation; give each its own",
                        param="messages",
                    )
                open_calls.add(call_id)
                asked.add(call_id)
        elif message["role"] == "tool" and (call_id := message.get("tool_call_id")):
            if call_id not in open_calls and call_id in answered and (goes_on or call_id in asked):
                raise Refusal(f"the tool call {call_id!r} has two results; send one", param="messages")
            open_calls.discard(call_id)
            answered.add(call_id)


def read_extras(data: bytes, body: type[msgspec.Struct], *, own: Mapping[str, str]) -> Extras:
    """Fields of a request beside those of its dialect's `body`. `own`: where it has its `instructions`, its answer's
    `format` and `bound`, and `stop`; without those that it has not. Raises Refusal."""
    raw = decode_body(_decode, data, "request")
    named = set(body.__struct_encode_fields__)
    names = sorted(raw.keys() - named - _NO_MATTER)
    fields = {name: _decode_extra(name, raw[name]) for name in names}
    if not fields:
        return Extras()
    _refuse_misplaced(fields, raw, named, own)
    fields = _unwrapped(fields)
    kwargs = fields.pop("chat_template_kwargs", None) or {}
    if not isinstance(kwargs, dict):
        raise Refusal.at("chat_template_kwargs", "is no object; give names with values")
    if (thinks := fields.pop("enable_thinking", None)) is not None:  # as some providers have it
        kwargs = {"enable_thinking": thinks, **kwargs}
    asking = {
        name: value
        for name, value in fields.items()
        if value is not None and (name in _DRAWN or not _asks_nothing(name, value))
    }
    for name in sorted(asking.keys() & _REFUSED):
        raise Refusal.at(name, f"is not supported: {_REFUSED[name].format(form=own['format'])}")
    asked = read_asked(**{name: asking.pop(name, None) for name in (*_NEUTRAL, *_DRAWN[:2])})
    if "top_k" in asked:
        asked["top_k"] = max(0.0, asked["top_k"])  # -1, too, is no limit
    return Extras(
        template_kwargs={name: value for name, value in kwargs.items() if value is not None},
        stop_token_ids=_stop_token_ids(asking.pop("stop_token_ids", [])),
        asked={name: value for name, value in asked.items() if value > 0 or name in _DRAWN or name.endswith("penalty")},
        ignored=tuple(asking),
    )


def _decode_extra(name: str, raw: msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.MsgspecError as error:  # a number beyond any float's range
        raise Refusal.at(name, f"cannot be read: {error}") from error


def _refuse_misplaced(
    fields: Mapping[str, Any], raw: Mapping[str, msgspec.Raw], named: set[str], own: Mapping[str, str]
) -> None:
    """Refuse what another API calls so, unless this API's field is there as well; and a field of this one's (`named`)
    within a wrapper."""
    given = {_ELSEWHERE[name] for name in raw.keys() & _ELSEWHERE.keys() & named}
    inner = [(f"{name}.", fields[name]) for name in _WRAPPERS if isinstance(fields.get(name), dict)]
    for place, values in [("", fields), *inner]:
        for name in sorted(values.keys() & {*_ELSEWHERE, *named} - _NO_MATTER - {"temperature", "top_p"}):
            about = _ELSEWHERE.get(name, "")
            if about in given or (name in named and name in raw) or _asks_nothing(name, values[name]):
                continue
            here = own.get(about, name if name in named else "")
            remedy = f"send {here} in its place" if here else "leave it out"
            raise Refusal.at(f"{place}{name}", f"is not read in this API; {remedy}")


def _unwrapped(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with those of wrappers beside them, where they mean something here; others are named by their place."""
    meaning = {*_REFUSED, *_NEUTRAL, *_DRAWN, "chat_template_kwargs", "enable_thinking", "stop_token_ids"}
    outer = {name: value for name, value in fields.items() if name not in _WRAPPERS or not isinstance(value, dict)}
    inner = [(name, *entry) for name in fields.keys() - outer.keys() for entry in fields[name].items()]
    mattering = [(name, key, value) for name, key, value in inner if key not in _NO_MATTER]
    return {key if key in meaning else f"{name}.{key}": value for name, key, value in mattering} | outer


def _asks_nothing(name: str, value: Any) -> bool:
    neutral = {**_NOTHING, **_NEUTRAL}.get(name)
    return is_nothing(value) if neutral is None else bool(value == neutral)


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    name = "stop_token_ids"
    if not isinstance(ids, list) or any(isinstance(value, bool) or not isinstance(value, int | float) for value in ids):
        raise Refusal.at(name, "is no list of token ids; give numbers")
    check_count(name, ids, _MOST_STOP_IDS)
    return tuple(read_whole(name, value, 0, 2**31 - 1) or 0 for value in ids)


_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_BY_NAME = ("properties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "allOf")
_PLAIN = frozenset({"type", "description", "title", "default", "enum"})
_MAX_SCHEMA_DEPTH = 64
_OF_FORMATS = ("type", "schema", "json_schema", "name", "description", "strict")
"""Keys of an answer's format, in any of the APIs."""


def check_schema(schema: Any, where: str, *, param: str | None = None, depth: int = 0) -> None:
    """Raise Refusal for a schema that is none. Each call sends its schemas, so this is quick and takes older drafts;
    `jsonschema` needs milliseconds, and would refuse draft 4's `"exclusiveMinimum": true`."""
    if isinstance(schema, dict) and schema.keys() <= _PLAIN and isinstance(schema.get("type"), str):
        if schema["type"] in _TYPES:
            return  # most of them
    elif isinstance(schema, bool) and depth <= _MAX_SCHEMA_DEPTH:
        return
    problem = f"is nested more than {_MAX_SCHEMA_DEPTH} deep" if depth > _MAX_SCHEMA_DEPTH else _problem(schema)
    if problem is not None:
        raise Refusal(f"{where}: its JSON schema {problem}", param=param or where)
    for inner in _inner(schema):
        check_schema(inner, where, param=param, depth=depth + 1)


def _problem(schema: Any) -> str | None:
    if not isinstance(schema, dict):
        return f"has {schema!r:.80} where a schema belongs"
    types = schema.get("type")
    for kind in types if isinstance(types, list) else [types]:
        if kind is not None and (not isinstance(kind, str) or kind not in _TYPES):
            return f"has the type {kind!r:.80}; known are {', '.join(sorted(_TYPES))}"
    for key in _BY_NAME:
        if not isinstance(schema.get(key) or {}, dict):
            return f"has {key} that are no object"
    required = schema.get("required")
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        return "has 'required' that is no list of names"
    for key in _IN_LISTS:
        if not isinstance(schema.get(key) or [], list):
            return f"has {key} that is no list"
    return None


def _inner(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas within a schema."""
    for key in _BY_NAME:
        yield from (schema.get(key) or {}).values()
    for key in _IN_LISTS:
        yield from schema.get(key) or ()
    items = schema.get("items")
    if items is not None and not isinstance(items, list):
        yield items


def read_format(wanted: Mapping[str, Any], param: str) -> AnswerFormat | None:
    """The format that a request asks its answer in. The policy reads it in its prompt, because a policy that expects
    its format loses less to being bound to it, and because not every engine binds. None = plain text."""
    kind, named = wanted.get("type"), wanted.get("json_schema")
    parts = {**wanted, **named} if isinstance(named, dict) else wanted
    schema, about = parts.get("schema"), parts.get("description")
    if kind in (None, "text"):
        return None
    if kind == "json_object" and schema not in (None, {}):  # as Together, Fireworks and llama.cpp have it
        kind = "json_schema"
    unread = sorted(key for key, value in wanted.items() if key not in _OF_FORMATS and not is_nothing(value))
    if kind in ("json_object", "json_schema") and unread:
        raise Refusal.at(param, f"has {unread[0]!r}, which is not read; give a JSON schema as its 'schema'")
    if kind == "json_object":
        sentence = "Answer with one JSON object only, without any text around it."
        return AnswerFormat(param=param, schema={"type": "object"}, instruction=sentence)
    if kind != "json_schema":
        raise Refusal(f"the format {kind!r} is not supported; use 'text', 'json_object' or 'json_schema'", param=param)
    if not isinstance(schema, dict):
        raise Refusal.at(param, "has no schema; give a JSON schema as an object")
    check_schema(schema, param)
    shown = json.dumps(schema, ensure_ascii=False)
    sentence = f"Answer with JSON only, without any text around it, that fits this JSON schema:\n{shown}"
    if isinstance(about, str) and about:
        sentence = f"{sentence}\nDescription of the answer: {about}"
    return AnswerFormat(param=param, schema=schema, instruction=sentence)


def with_instruction(messages: Sequence[dict[str, Any]], wanted: AnswerFormat) -> tuple[dict[str, Any], ...]:
    """The conversation with the instruction of a format at the end of its system message."""
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return ({**first, "content": f"{first['content']}\n\n{wanted.instruction}".lstrip("\n")}, *messages[1:])
    return ({"role": "system", "content": wanted.instruction}, *messages)
