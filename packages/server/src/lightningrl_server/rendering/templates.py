"""A chat template before it renders anything: does it compile, which variables it reads, what it writes.

folder ─► read_template  ─► template_variables    {"messages", "tools", "enable_thinking", …}
recipe ─► load_template ─┘  template_text         the text of a conversation
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from lightningrl.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = [
    "GIVEN",
    "SHIPPED",
    "added_tokens",
    "check_shipped",
    "check_template_kwargs",
    "load_template",
    "no_template",
    "no_tools",
    "read_template",
    "template_text",
    "template_variables",
]

GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}
)
"""Variables of a template that are a call's own."""
_SPECIAL = frozenset({"bos_token", "eos_token", "pad_token", "unk_token"})
_OF_ALL = GIVEN | _SPECIAL | {"raise_exception", "strftime_now", "namespace"}
"""Variables that no recipe sets."""
SHIPPED: Final[Mapping[str, tuple[str, ...]]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama": ("<|start_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
}
"""Chat templates that come with this package, each with the tokens between which it writes turns."""
_OTHER_NAMES: Final = {"hermes": "chatml"}
_SHIPPED: Final = Path(__file__).with_name("chat_templates")


class _AddedToken(msgspec.Struct):
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def read_template(folder: Path) -> str | None:
    """The chat template of a saved tokenizer, of several that for tools; None where it has none."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    saved = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path.is_file() else None
    if isinstance(saved, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in saved if isinstance(entry, dict)}
        saved = named.get("tool_use") or named.get("default")
    return saved if isinstance(saved, str) else None


def added_tokens(folder: Path) -> frozenset[str]:
    """Tokens of a saved tokenizer that its vocabulary was given beside its own."""
    saved = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_Tokenizer)
    return frozenset(token.content for token in saved.added_tokens)


def template_variables(template: str, what: str) -> frozenset[str]:
    """Names that a template reads and does not set. Raises ConfigError where `what`'s template does not compile."""
    from jinja2 import TemplateError
    from jinja2.meta import find_undeclared_variables

    jinja = _environment()
    try:
        tree = jinja.parse(template)
        jinja.compile(tree)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"the chat template of {what} does not compile: {error}{f' (line {line})' if line else ''}; mend "
            "chat_template.jinja in its folder, or name the policy's renderer"
        ) from error
    return frozenset(find_undeclared_variables(tree))


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates are written in it; the worker's installation has none."""
    from jinja2 import TemplateError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, by which templates mark what an assistant said."""

        tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def check_template_kwargs(kwargs: Mapping[str, Any], read: Collection[str], what: str) -> None:
    """Raise ConfigError for those of the recipe's `chat_template_kwargs` that are not `read`, with those that are."""
    names = sorted(set(read) - _OF_ALL)
    there = f"it reads {', '.join(names)}" if names else "it reads none"
    problems = {
        name: f"each call gives {what} its own {name}" if name in _OF_ALL else f"{what} never reads {name!r}; {there}"
        for name in kwargs
        if name not in names
    }
    if problems:
        raise ConfigError(*(f"chat_template_kwargs.{name}: {problem}" for name, problem in problems.items()))


def load_template(wanted: str, folder: Path, policy: str) -> str:
    """The chat template that a recipe names: a shipped one, or a file beside the recipe. Raises ConfigError."""
    if wanted in SHIPPED:
        return (_SHIPPED / f"{_OTHER_NAMES.get(wanted, wanted)}.jinja").read_text(encoding="utf-8")
    path = folder / wanted
    if not path.is_file():
        raise ConfigError(
            f"policy {policy!r}: no chat_template {wanted!r}; give a Jinja file beside the recipe, or a shipped one: "
            f"{', '.join(SHIPPED)}"
        )
    return path.read_text(encoding="utf-8")


def check_shipped(wanted: str | None, added: Collection[str], policy: str) -> None:
    """Raise ConfigError where a shipped template writes turns between tokens that the tokenizer does not have."""
    missing = [token for token in SHIPPED.get(wanted or "", ()) if token not in added]
    if wanted is not None and missing:
        raise ConfigError(
            f"policy {policy!r}: chat_template {wanted!r} writes turns between {' and '.join(SHIPPED[wanted])}, and "
            f"its tokenizer has no token {missing[0]}; give a Jinja file that writes the model's own turns"
        )


def template_text(template: str) -> Callable[..., str]:
    """A call that renders messages with a template alone, without its tokenizer."""
    compiled = _environment().from_string(template)

    def render(messages: Any, tools: Any = None) -> str:
        tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        return str(compiled.render(messages=messages, tools=tools, add_generation_prompt=True, **tokens))

    return render


def no_tools(policy: str, added: Collection[str]) -> str:
    """The sentence of a policy that cannot be offered tools: why, and what to do."""
    remedy = " or ".join((*_fitting(added), "policy.chat_template = a Jinja file that writes tools, calls and results"))
    return f"policy {policy!r} has no tool-call markup that we can read, so it cannot be offered tools; set {remedy}"


def no_template(what: str, added: Collection[str]) -> str:
    """The sentence of a model without a chat template, as base models are: the shipped one whose tokens it has."""
    own = "policy.chat_template = a Jinja file beside the recipe"
    remedy = " or ".join((*_fitting(added), own))
    others = "" if _fitting(added) else f" (it has the tokens of none of the shipped ones: {', '.join(SHIPPED)})"
    return (
        f"{what} has no chat template, so messages cannot become its prompt; set {remedy}{others}, or take the "
        "instruct model of the family"
    )


def _fitting(added: Collection[str]) -> list[str]:
    """Settings of the shipped templates between whose tokens a vocabulary can write turns."""
    names = [name for name, tokens in SHIPPED.items() if name not in _OTHER_NAMES and set(tokens) <= set(added)]
    return [f"policy.chat_template = {name!r}" for name in names]
