"""Messages ⇄ tokens of one policy: prompts through the `renderers` library, bridged turns, parsed completions.

messages ─► prompt_ids            (rendered once per distinct prompt)
earlier prompt + completion, new messages ─► prompt_ids whose beginning is exactly those tokens
completion_ids ─► content, reasoning, tool calls
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from lightningrl.errors import ConfigError, ContextOverflow
from lightningrl_server.lru import LruCache
from lightningrl_server.rendering import families
from lightningrl_server.rendering.call_forms import CallForm, find_form
from lightningrl_server.rendering.markups import Markup, TextReading, read_text
from lightningrl_server.rendering.templates import (
    GIVEN,
    check_template_kwargs,
    no_template,
    no_tools,
    template_variables,
)
from lightningrl_server.rendering.tokenizer import (
    QuickTokenizer,
    TemplateBridge,
    late_systems,
    load_tokenizer,
    ways_to_say,
)
from lightningrl_server.rendering.tool_turns import ToolTurns, find_tool_turns

__all__ = ["PROMPT_TAIL", "ParsedCompletion", "PolicyRenderer", "TextParser", "changes_prompts", "pack", "parsed_calls"]

logger = logging.getLogger(__name__)

_pack = msgspec.msgpack.Encoder().encode

_OPENING_TOKENS = 192
"""Longest opening: a name of 128 bytes, each a token of its own."""
_THINKING_TOKENS = 48
PROMPT_TAIL: Final = _OPENING_TOKENS + _THINKING_TOKENS
"""Last tokens of a prompt that say all that reading its completion takes."""
_SPEAKER: Final = "lightningrlspeaker"
_MOST_PROMPTS = 256
_MOST_RAW = 240
"""Characters of a malformed call that are kept."""
_MOST_TOKENS = 2**20
"""Tokens of all prompts that are kept for the next call with the same messages; each takes some forty bytes."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A completion's tokens as content, reasoning and tool calls."""

    content: str
    reasoning: str
    tool_calls: tuple[Any, ...]
    """`renderers.ParsedToolCall`, well-formed or not."""
    problems: tuple[tuple[str, str], ...] = ()
    """Text of each block of markup that is no call, and why; the text is content, too."""


class PolicyRenderer:
    """Renders, bridges and parses for one policy."""

    def __init__(
        self,
        tokenizer: str | Path | Any,
        renderer_config: Any = "auto",
        *,
        name: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`tokenizer` is a folder, a hub name or a loaded fast tokenizer. `renderer_config` is "auto", a name of the
        `renderers` library ("qwen3", "llama-3", …) or one of its config records. `template_kwargs` are given to the
        chat template with every prompt. `chat_template` is the text of one that takes the place of the tokenizer's."""
        if isinstance(tokenizer, str | Path):
            self.name = name or str(tokenizer)
            tokenizer = load_tokenizer(tokenizer)
        else:
            self.name = name or str(getattr(tokenizer, "name_or_path", "") or "the policy")
        self._template_kwargs = dict(template_kwargs or {})
        replaced = {} if chat_template is None else {"chat_template": chat_template}
        self.tokenizer = QuickTokenizer(tokenizer, {**self._template_kwargs, **replaced})
        template = families.template_of(tokenizer) if chat_template is None else chat_template
        added: Mapping[str, int] = tokenizer.get_added_vocab()
        markup = families.markup_of(str(getattr(tokenizer, "name_or_path", "") or ""), template, added)
        wanted = "default" if chat_template is not None and renderer_config == "auto" else renderer_config
        config = families.resolve_config(tokenizer, self.name, wanted, self._template_kwargs, markup)
        self._renderer = families.create_renderer(self.tokenizer, config, self.name)
        self.is_default: bool = config.name == "default"
        """The policy's own chat template renders; no model-specific renderer is known for it."""
        template = self._check_template(template, added)
        self._markup = markup if self.is_default else None
        self.family: str = markup.name if self._markup and markup and markup.has_channels else config.name
        """Name of its renderer, or of markup around all that it says."""
        turns = find_tool_turns(self._text, markup) if self.is_default else None
        self._turns = turns or ToolTurns(markup=self._markup)
        self._bridge = TemplateBridge(self.tokenizer, self._turns) if template else None
        self.stop_token_ids: tuple[int, ...] = self._find_stops(added)
        if self._bridge is not None:
            self._bridge.stop_token_ids = frozenset(self.stop_token_ids)
        self.is_tagged = config.name in ("default", "qwen3")
        """Reasoning and tool calls stand between tokens of their own; all text outside them is content."""
        self.has_atomic_thinking = "<think>" in added and "</think>" in added
        self.may_think: bool = self.has_atomic_thinking and ("<think>" in template or not self.is_default)
        """Its answers may begin with a reasoning block of their own accord."""
        self._think_id, self._think_end_id = added.get("<think>"), added.get("</think>")
        self.supports_tools = not self.is_default or bool(markup and turns) or config.tool_parser is not None
        self._parser = TextParser(self.tokenizer, markup) if self.is_default and markup and markup.read else None
        self.marks: tuple[str, ...] = markup.tokens if self._parser and markup else ()
        """Texts that begin or end markup, which may come in several tokens."""
        # of the library's own, which read the beginning of a call in the prompt, it is one alone
        opens = markup.name if self._parser and markup else "qwen3" if config.name == "qwen3" else ""
        self.call_form: CallForm | None = find_form(opens, template)
        """Form of the calls that it can be made to begin with."""
        self._opening = self.call_form.pattern if self.call_form else None
        self.marker_ids = frozenset(tokenizer.added_tokens_decoder) - frozenset(self.stop_token_ids)
        self._has_joined = False
        self._prompts, self._suffixes = (
            LruCache[bytes, tuple[int, ...]](_MOST_PROMPTS, _MOST_TOKENS, together=_MOST_TOKENS) for _ in range(2)
        )

    def _check_template(self, template: str, added: Mapping[str, int]) -> str:
        """Return the template that renders, None where a family's renderer needs none; ConfigError where it cannot."""
        try:
            self._variables = template_variables(template, f"policy {self.name!r}")
        except ConfigError:
            if self.is_default:
                raise
            self._variables = frozenset[str]()
            return ""
        if self.is_default and not template:
            raise ConfigError(no_template(f"policy {self.name!r}", added))
        if self.is_default:
            check_template_kwargs(self._template_kwargs, self._variables, f"the chat template of policy {self.name!r}")
        return template

    def _find_stops(self, added: Mapping[str, int]) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's, the template's, the markup's."""
        stops = set(self._renderer.get_stop_token_ids())
        if self.is_default and self._bridge is not None and self._bridge.close_token_id is not None:
            stops.add(self._bridge.close_token_id)
        if self._markup is not None:
            stops |= {added[token] for token in self._markup.stops if token in added}
            stops -= {added[token] for token in self._markup.closes if token in added}
        return tuple(sorted(stops))

    def render(self, messages: Messages, tools: Messages | None, context_length: int | None = None) -> tuple[int, ...]:
        """Prompt ids of a whole conversation, with the generation prompt. Raises ValueError with the template's
        complaint, ContextOverflow where they are far beyond a known `context_length`. Any thread may call it."""
        key = _digest((messages, tools))
        recent = self._prompts.get(key)
        if recent is not None:
            return recent
        with self.tokenizer.within(context_length):
            ids = self._render(messages, tools)
        return self._prompts.put(key, ids, len(ids))

    def _render(self, messages: Messages, tools: Messages | None) -> tuple[int, ...]:
        """Render, with neighbours joined and system messages among the user's where the template takes no others."""
        wrong: Exception | None = None
        for turns in ways_to_say(messages):
            try:
                ids = tuple(self._ids(turns, tools))
                self._check_systems(turns)
            except ContextOverflow:
                raise
            except Exception as error:  # noqa: BLE001  (a template is user code: this is about these messages)
                wrong = wrong or error
                continue
            if wrong is not None and not self._has_joined:
                self._has_joined = True
                logger.warning(
                    "policy %r: its chat template takes not all conversations (%s), so turns are joined for it",
                    self.name,
                    wrong,
                )
            return ids
        raise ValueError(
            f"the chat template of {self.name!r} cannot render these messages: {wrong}; {_remedy(messages)}"
        ) from wrong

    def render_answered(self, messages: Messages, tools: Messages | None) -> tuple[int, ...]:
        """Ids of a conversation whose last turn is an answer, and nothing after it; raises what the template does."""
        return tuple(self._ids(messages, tools, prompt=False))

    def _ids(self, messages: Messages, tools: Messages | None, *, prompt: bool = True) -> list[int]:
        if not self.is_default:
            listed = list(tools) if tools else None
            return list(self._renderer.render_ids(messages, tools=listed, add_generation_prompt=prompt))
        shaped, offered = self._turns.shape(messages, tools or None)
        options: dict[str, Any] = {} if offered is None else {"tools": list(offered)}
        return list(self.tokenizer.apply_chat_template(shaped, add_generation_prompt=prompt, **options))

    def _shaped_text(self, messages: Messages, **options: Any) -> str:
        return self._text(self._turns.shape(messages, None)[0], **options)

    def _text(self, messages: Messages, **options: Any) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))

    def _check_systems(self, turns: Messages) -> None:
        """Raise ValueError where the policy's own template passes over a system message in silence."""
        systems = late_systems(turns)
        if systems and self.is_default:
            text = self._shaped_text(turns)
            if not all(system in text for system in systems):
                raise ValueError("it leaves out a system message")

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Messages,
        tools: Messages | None,
        context_length: int | None = None,
    ) -> tuple[int, ...] | None:
        """Tokens that the new messages add after an earlier call's own tokens, up to the next completion; None = cannot
        be told. Raises ContextOverflow where that is far beyond a known `context_length`. Any thread may call it."""
        with self.tokenizer.within(context_length):
            if self.is_default:
                return self._template_suffix(completion_ids, self._with_written_ids(completion_ids, new_messages))
            past = [*prompt_ids, *completion_ids]
            try:
                rendered = self._renderer.bridge_to_next_turn(
                    list(prompt_ids), list(completion_ids), list(new_messages), tools=list(tools) if tools else None
                )
            except (ValueError, KeyError, TypeError, IndexError, AttributeError):
                rendered = None  # a shape of messages this renderer does not know; the template decides below
            if rendered is not None and list(rendered.token_ids[: len(past)]) == past:
                return tuple(rendered.token_ids[len(past) :])
            return self._template_suffix(completion_ids, new_messages)

    def unlike(self, kwargs: Mapping[str, Any]) -> list[str]:
        """Names of a call's template kwargs by which its prompts would differ from this policy's. A family's renderer
        says what each is; an unknown template is tried with a conversation that has all there is."""
        fields: Mapping[str, Any] = (
            {}
            if self.is_default
            else self._renderer.config.model_dump(include=self._renderer.config.template_field_names())
        )
        own = {**fields, **self._template_kwargs}
        differ = [name for name, value in kwargs.items() if not (name in own and own[name] == value)]
        return [
            name
            for name in differ
            if name in fields
            or (name in self._variables - GIVEN and changes_prompts(self._shaped_text, name, kwargs[name]))
        ]

    @cached_property
    def reads_names(self) -> bool:
        """True where prompts show who of a role speaks, a message's `name`."""
        try:
            return _SPEAKER in self.decode(self._ids([{"role": "user", "content": "hi", "name": _SPEAKER}], None))
        except Exception:  # noqa: BLE001  (a template is user code)
            return False

    @cached_property
    def without_tools(self) -> str:
        """Sentence on a policy that cannot be offered tools: why, and what to do."""
        return no_tools(self.name, self.tokenizer.get_added_vocab()) + families.renderers_that_fit(self.tokenizer)

    def open_call(self, prompt_ids: Sequence[int], name: str | None) -> tuple[int, ...] | None:
        """Tokens that begin a tool call (of the tool `name`; None = of any) after a prompt. None = no such markup is
        known for this policy, or the prompt leaves its reasoning open."""
        form = self.call_form
        if form is None or self._is_thinking_open(prompt_ids):
            return None
        return tuple(self.tokenizer.encode(form.open_with(name), add_special_tokens=False))

    def split_opening(self, prompt_ids: Sequence[int]) -> tuple[Sequence[int], tuple[int, ...]]:
        """A prompt, and the beginning of a tool call that was written at its end; empty where there is none."""
        tail = list(prompt_ids[-_OPENING_TOKENS:])
        opening = self._opening.search(self.decode(tail)) if self._opening else None
        if opening is not None:
            for count in range(1, len(tail) + 1):
                if self.decode(tail[-count:]) == opening[0]:
                    return prompt_ids[: len(prompt_ids) - count], tuple(tail[-count:])
        return prompt_ids, ()

    @property
    def has_channels(self) -> bool:
        """True where an answer stands in a channel of its markup, as GPT-OSS's."""
        return self._markup is not None and self._markup.has_channels

    def opens_call(self, text: str, place: int = 0, *, tools: bool = True) -> bool:
        """True for text that may be or become a tool call by what begins near `place`."""
        if self._parser is None or self._markup is None or not (tools or self._markup.has_channels):
            return False
        return self._parser.opens_call(text, place)

    def parse(
        self, completion_ids: Sequence[int], prompt_ids: Sequence[int], *, tools: bool = True, final: bool = True
    ) -> ParsedCompletion:
        """Content, reasoning and tool calls of a completion; stop tokens may be on it. With `final` False its rest may
        still come. Without `tools` a call may stay text."""
        end = len(completion_ids)
        while end and completion_ids[end - 1] in self.stop_token_ids:
            end -= 1
        ids = list(completion_ids[:end])
        tail = list(prompt_ids[-_THINKING_TOKENS:])
        if self.is_tagged and self.marker_ids.isdisjoint(ids) and self.marker_ids.isdisjoint(tail[-4:]):
            text = self.decode(ids)
            is_thought = not self.has_atomic_thinking and text.lstrip().startswith("<think>")
            if not is_thought and not self.opens_call(text, tools=tools):
                return ParsedCompletion(text if self.is_default else text.strip(), "", ())
        # The tail of the prompt says whether it left a reasoning block open; scanning all of it costs, and says no
        # more.
        # A renderer reads its own stop tokens: one of gpt-oss's closes a tool call.
        if self._parser is not None:
            read = self._parser.parse(completion_ids, tail, self.stop_token_ids, tools=tools, final=final)
            return ParsedCompletion(read.content, read.reasoning, parsed_calls(read), read.problems)
        try:
            parsed = self._renderer.parse_response(ids if self.is_default else list(completion_ids), prompt_ids=tail)
        except RecursionError:  # arguments nested beyond any parser are no tool call: what the model said stays text
            return ParsedCompletion(self.decode(ids), "", ())
        content = parsed.content or ""
        return ParsedCompletion(
            content if self.is_default else content.strip(), parsed.reasoning_content or "", tuple(parsed.tool_calls)
        )

    def explain_malformed(self, raw: str, problem: str) -> str:
        """Sentence on what an answer wrote where a tool call begins: what, why it is none, and the form of one."""
        form = f"a call in the markup of {self.family!r}" if self.call_form is None else self.call_form.example
        return f"{raw[:_MOST_RAW]!r} is no tool call: {problem}; expected {form}"

    def may_be_call(self, content: str) -> bool:
        """True for text that may still prove to be a tool call: some markups put no token in front of one."""
        kind = self._renderer.config.name
        return kind == "inkling" or (kind == "llama-3" and content.startswith("{"))

    def is_thinking(self, completion_ids: Sequence[int], prompt_ids: Sequence[int]) -> bool:
        """True where a reasoning block is open; a tool call in it may still prove to be a draft."""
        if not self.has_atomic_thinking:
            return False
        opened = self._think_id in completion_ids or self._is_thinking_open(prompt_ids)
        return opened and self._think_end_id not in completion_ids

    def _is_thinking_open(self, prompt_ids: Sequence[int]) -> bool:
        """True if the prompt ends in a reasoning block that the completion goes on with."""
        return self.decode(prompt_ids[-8:]).rstrip().endswith("<think>")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return self.tokenizer.decode(token_ids)

    def _with_written_ids(self, completion_ids: Sequence[int], new_messages: Messages) -> Messages:
        """Results of calls with the ids that the policy itself wrote, where the family's markup has them."""
        if self._markup is None or self._markup.call_id is None or self._parser is None:
            return new_messages
        calls = [call for call in self.parse(completion_ids, ()).tool_calls if call.id is not None]
        messages: list[Mapping[str, Any]] = []
        for message in new_messages:
            if message["role"] == "tool" and calls:
                call = next((call for call in calls if call.name == message.get("name")), calls[0])
                calls.remove(call)
                message = {**message, "tool_call_id": call.id}
            messages.append(message)
        return messages

    def _template_suffix(self, completion_ids: Sequence[int], new_messages: Messages) -> tuple[int, ...] | None:
        if self._bridge is None:
            return None
        key = _digest(new_messages)
        suffix = self._suffixes.get(key)
        if suffix is None:
            suffix = self._bridge.suffix(new_messages)
            if suffix is None:
                return None
            self._suffixes.put(key, suffix, len(suffix))
        return self._bridge.join(completion_ids, suffix)


def pack(value: Any) -> bytes:
    """Bytes that tell messages or tools apart."""
    try:
        return _pack(value)
    except OverflowError:  # a number in a schema is beyond 64 bits
        return json.dumps(value).encode()


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(pack(value), digest_size=16).digest()


def _remedy(messages: Messages) -> str:
    """Remedy for a template that refuses a conversation, also with its turns joined."""
    functions = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    for function in functions:
        if not isinstance(function["arguments"], Mapping):
            quoted = json.dumps(function["arguments"])[:80]
            return f"the arguments of a call of {function['name']!r} are no object but {quoted}; send an object"
    return (
        "send turns of user and assistant that alternate, the user's first, or write a chat_template.jinja that takes "
        "others to the model's folder"
    )


_TOOL: Final = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
_EVERYTHING: Final[list[Mapping[str, Any]]] = [
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "c",
        "tool_calls": [{"id": "call12345", "type": "function", "function": {"name": "f", "arguments": {}}}],
    },
    {"role": "tool", "content": "d", "name": "f", "tool_call_id": "call12345"},
    {"role": "assistant", "content": "e", "reasoning_content": "f"},
    {"role": "user", "content": "g"},
]
"""A conversation in which a template's switches show."""


def changes_prompts(render: Callable[..., str], name: str, value: Any) -> bool:
    """True where a switch would change some prompt that `render(messages, tools=…)` writes."""

    def text(messages: list[Mapping[str, Any]], **kwargs: Any) -> str | None:
        try:
            return render(messages, **kwargs)
        except Exception:  # noqa: BLE001  (a template may take no tools; another conversation shows what it does)
            return None

    tried = [
        (messages, {"tools": tools})
        for messages in (_EVERYTHING, _EVERYTHING[-2:], _EVERYTHING[-1:])
        for tools in (None, [_TOOL])
    ]
    return any(text(messages, **tools) != text(messages, **tools, **{name: value}) for messages, tools in tried)


_THINK_END: Final = "</think>"
_BACK: Final = 32
"""Characters before new ones that may begin a mark which they end."""


class TextParser:
    """Reads the completions of one policy."""

    def __init__(self, tokenizer: QuickTokenizer, markup: Markup) -> None:
        self._tokenizer = tokenizer
        self._markup = markup
        self._opens = re.compile(markup.opens or "|".join(map(re.escape, markup.tokens)))
        framing = sorted({*tokenizer.all_special_tokens} - {"<think>", _THINK_END, *markup.tokens})
        self._framing = re.compile("|".join(map(re.escape, framing))) if framing else None
        self._own_ids = frozenset(tokenizer.convert_tokens_to_ids(list(markup.tokens)))

    def opens_call(self, text: str, place: int = 0) -> bool:
        """True where what begins near a place of a text may be or become a call."""
        return self._opens.search(text, max(0, len(text[:place].rstrip()) - _BACK)) is not None

    def parse(
        self,
        completion_ids: Sequence[int],
        prompt_tail: Sequence[int],
        stop_ids: Collection[int],
        *,
        tools: bool,
        final: bool,
    ) -> TextReading:
        """Read a completion after the last tokens of its prompt. Without `tools`, calls stay text."""
        reasoning: Any = import_module("renderers.reasoning")
        end = len(completion_ids)
        while end and completion_ids[end - 1] in stop_ids and completion_ids[end - 1] not in self._own_ids:
            end -= 1
        ids = list(completion_ids[:end])
        is_open = reasoning.prompt_ends_in_reasoning(self._tokenizer, list(prompt_tail), stop_ids=frozenset(stop_ids))
        thought = reasoning.scan_reasoning(self._tokenizer, ids, prefilled=is_open)
        if thought.is_open:
            return TextReading(content="", reasoning=thought.text)
        text = self._tokenizer.decode(ids)
        if thought.text is not None:
            text = text.partition(_THINK_END)[2]
        if self._framing is not None:
            text = self._framing.sub("", text)
        if not tools and not self._markup.has_channels:
            return TextReading(content=text, reasoning=thought.text or "")
        read = read_text(self._markup, text, final=final)
        return TextReading(
            content=read.content, calls=read.calls, reasoning=thought.text or read.reasoning, problems=read.problems
        )


def parsed_calls(reading: TextReading) -> tuple[Any, ...]:
    """The calls of a reading as `renderers.ParsedToolCall`."""
    library: Any = import_module("renderers.base")
    return tuple(
        library.ParsedToolCall(raw=raw, name=call.name, arguments=call.arguments, id=call.id)
        for call, raw in reading.calls
    )
