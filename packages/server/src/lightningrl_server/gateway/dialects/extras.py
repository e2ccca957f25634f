"""Fields of a call that stand in no API's own list: what servers of open models take beside it, and what nobody here reads.

sampling that is the run's (`min_p`, `repetition_penalty`)        ─► counted as overridden
`chat_template_kwargs`, `enable_thinking`                         ─► taken where they are the policy's own, else refused
`stop_token_ids`                                                  ─► honoured
what would change prompt or answer (`guided_json`, `min_tokens`)  ─► refused by name
anything else                                                     ─► counted as ignored
the same within `extra_body`, `nvext`, `sampling_params`          ─► as if it stood beside them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lightningrl_server.gateway.dialects.checks import check_count, is_nothing, read_asked, read_whole
from lightningrl_server.gateway.errors import Refusal
from lightningrl_server.gateway.request import Extras

__all__ = ["read_extras"]

_NEUTRAL = {"top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""Sampling settings that are the run's, and the value by which each asks for nothing."""
_CONSTRAINED = "sampling is not constrained here, so that the recorded logprobs hold; say the format in the messages or by {form}"
_ITS_OWN_END = "where an answer ends is the policy's to learn, and the recorded logprobs are those it was sampled with; leave it out"
_ITS_PROMPT = "messages become a prompt as the recipe says (policy.chat_template_kwargs, the model's chat_template.jinja); leave it out"
_ONE_BY_ONE = "each answer is sampled by itself; leave it out"
_AS_SAMPLED = "the recorded logprobs would not be the ones sampled from; leave it out"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("guided_json", "guided_choice", "guided_regex", "guided_grammar", "structured_outputs"), _CONSTRAINED),
    **dict.fromkeys(("guided_decoding", "structural_tag", "json_schema", "regex", "ebnf", "grammar"), _CONSTRAINED),
    **dict.fromkeys(("min_tokens", "min_new_tokens", "ignore_eos"), _ITS_OWN_END),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "banned_tokens", "logits_processors", "custom_logit_processor"), _AS_SAMPLED),
    **dict.fromkeys(("chat_template", "documents", "continue_final_message", "echo", "truncate_prompt_tokens"), _ITS_PROMPT),
    **dict.fromkeys(("add_generation_prompt",), _ITS_PROMPT),
    **dict.fromkeys(("use_beam_search", "best_of", "length_penalty"), _ONE_BY_ONE),
}
"""Why, by name."""
_NOTHING = {"add_generation_prompt": True, "best_of": 1, "length_penalty": 1}
"""Values by which a field asks for nothing, where it is another than of all fields."""
_NO_MATTER = frozenset(
    {
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_control"),
        *("prediction", "betas", "anthropic_version", "client_metadata", "request_id", "priority", "cache_salt"),
    }
)
"""Fields that say nothing of prompt or answer."""
_WRAPPERS = ("extra_body", "nvext", "sampling_params")
"""Objects in which some clients and servers have these fields, one level deep."""
_MOST_STOPS = 64

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def read_extras(data: bytes, known: type[msgspec.Struct], *, form: str) -> Extras:
    """Fields that a body has beside those of `known`, which its dialect reads. `form`: its field for a format. Raises Refusal."""
    raw = _decode(data)
    fields = {name: msgspec.json.decode(raw[name]) for name in sorted(raw.keys() - _fields(known) - _NO_MATTER)}
    if not fields:
        return Extras()
    fields = _unwrapped(fields)
    kwargs = fields.pop("chat_template_kwargs", None) or {}
    if not isinstance(kwargs, dict):
        raise Refusal("chat_template_kwargs is no object; give names with values", param="chat_template_kwargs")
    if (thinks := fields.pop("enable_thinking", None)) is not None:  # as some providers have it
        kwargs = {"enable_thinking": thinks, **kwargs}
    asking = {name: value for name, value in fields.items() if value is not None and not _asks_nothing(name, value)}
    for name in sorted(asking.keys() & _REFUSED):
        raise Refusal(f"{name} is not supported: {_REFUSED[name].format(form=form)}", param=name)
    asked = read_asked(**{name: asking.pop(name, None) for name in _NEUTRAL})
    return Extras(
        template_kwargs={name: value for name, value in kwargs.items() if value is not None},
        stop_token_ids=_stop_token_ids(asking.pop("stop_token_ids", [])),
        asked={name: value for name, value in asked.items() if value > 0 or name.endswith("penalty")},
        ignored=tuple(asking),
    )


def _unwrapped(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields with those of wrappers beside them, where they mean something here; others are named by their place."""
    meaning = {*_REFUSED, *_NEUTRAL, "chat_template_kwargs", "enable_thinking", "stop_token_ids"}
    outer = {name: value for name, value in fields.items() if name not in _WRAPPERS or not isinstance(value, dict)}
    inner = {
        key if key in meaning else f"{name}.{key}": value
        for name in fields.keys() - outer.keys()
        for key, value in fields[name].items()
        if key not in _NO_MATTER
    }
    return {**inner, **outer}


def _asks_nothing(name: str, value: Any) -> bool:
    neutral = {**_NOTHING, **_NEUTRAL}.get(name)
    return is_nothing(value) if neutral is None else bool(value == neutral)


def _fields(known: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(known.__struct_encode_fields__)


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    name = "stop_token_ids"
    if not isinstance(ids, list) or any(isinstance(value, bool) or not isinstance(value, int | float) for value in ids):
        raise Refusal(f"{name} is no list of token ids; give numbers", param=name)
    check_count(name, ids, _MOST_STOPS)
    return tuple(read_whole(name, value, 0, 2**31 - 1) or 0 for value in ids)
