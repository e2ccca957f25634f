"""A folder's tokenizer without transformers says, token for token and word for word, what transformers' says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from lightningrl.rendering.plain_tokenizer import PlainTokenizer
from lightningrl.rendering.tokenizer import load_tokenizer
from lightningrl.testing.tokenizers import CHATML_TEMPLATE, tiny_tokenizer

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
POLICIES = [*sorted(EXAMPLES.glob("*/starter")), EXAMPLES / "two_policies" / "critic"]
TOOL = {"type": "function", "function": {"name": "run", "description": "Größe <b>", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "run", "arguments": {"sql": "SELECT 'é' < 3", "limit": None}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "How many singers? <|im_end|> &amp; <b>"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": ""}, {"role": "assistant", "content": "a", "reasoning": "r"}],
    [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "1"}],
    [{"role": "user", "content": [{"type": "text", "text": "parts"}]}],
    [],
]
TEMPLATES = [
    CHATML_TEMPLATE,
    "{% for m in messages %}{{ m | tojson }}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}{{ bos_token }}{{ eos_token }}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson(indent=2, sort_keys=true) }}\n{% endfor %}\n",
    "  {% if tools %}\n{{ tools | tojson }}{% endif %}\n  {{ pad_token }}\n",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ dict(a=1) }}{{ dict.fromkeys('ab') }}",
    "{{ strftime_now('%Y') }}{{ style | default('plain') }}{{ documents }}{{ add_generation_prompt }}{{ messages | length }}",
    "{{ raise_exception('roles must alternate') }}",
    "{% set ns = namespace(_x=1) %}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__ }}{{ dict.__class__ }}",
    "{{ messages[0].content + 1 }}",
]


def pair(folder: Path) -> tuple[PlainTokenizer, Any]:
    ours = load_tokenizer(folder)
    assert isinstance(ours, PlainTokenizer)
    return ours, PreTrainedTokenizerFast.from_pretrained(str(folder))


def said(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """The text, or what it is refused with."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # templates raise what they like
        return f"{type(error).__name__}: {str(error)[:60]}"


@pytest.mark.parametrize("folder", POLICIES, ids=lambda folder: f"{folder.parent.name}/{folder.name}")
def test_a_policys_own_tokenizer_is_read_like_transformers_reads_it(folder: Path) -> None:
    ours, theirs = pair(folder)
    for name in ("name_or_path", "chat_template", "special_tokens_map", "all_special_tokens", "eos_token_id", "unk_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert {key: str(token) for key, token in ours.added_tokens_decoder.items()} == {
        key: str(token) for key, token in theirs.added_tokens_decoder.items()
    }
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.convert_tokens_to_ids(["<|im_end|>", "nowhere"]) == theirs.convert_tokens_to_ids(["<|im_end|>", "nowhere"])
    for messages in CONVERSATIONS:
        for options in ({}, {"tools": [TOOL], "add_generation_prompt": True}):
            assert said(ours, messages, **options) == said(theirs, messages, **options)
            assert said(ours, messages, chat_template="{{ messages }}") == said(theirs, messages, chat_template="{{ messages }}")
            assert not messages or ours.decode(ours.encode(said(ours, messages))) == theirs.decode(theirs.encode(said(theirs, messages)))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_writes_and_refuses_what_it_does_in_transformers(template: str, tmp_path: Path) -> None:
    tiny_tokenizer(chat_template=template).save_pretrained(tmp_path)
    ours, theirs = pair(tmp_path)
    for messages in CONVERSATIONS:
        for options in ({}, {"tools": [TOOL], "add_generation_prompt": True, "style": "loud", "eos_token": "mine"}):
            assert said(ours, messages, **options) == said(theirs, messages, **options)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)
names = st.sampled_from(["role", "content", "tool_calls", "reasoning", "thinking", "reasoning_content", "name"])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainTokenizer, Any]:
    folder = tmp_path_factory.mktemp("policy")
    tiny_tokenizer(chat_template="{% for m in messages %}{{ m | tojson }}\n{{ m.content }}{% endfor %}").save_pretrained(folder)
    return pair(folder)


@given(messages=st.lists(st.dictionaries(names, values), max_size=3))
def test_any_messages_are_rendered_alike(both: tuple[PlainTokenizer, Any], messages: list[dict[str, Any]]) -> None:
    assert said(both[0], messages) == said(both[1], messages)


def change(folder: Path, file: str, **entries: Any) -> None:
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**values, **entries}))


@pytest.mark.parametrize(
    "case", ["older files", "a key", "a class", "a new token", "cleaned text", "truncation", "a generation block", "more templates"]
)
def test_a_folder_that_says_more_is_left_to_transformers(case: str, tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    if case == "older files":
        (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    if case == "a key":
        change(tmp_path, "tokenizer_config.json", split_special_tokens=True)
    if case == "a class":
        change(tmp_path, "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
    if case == "a new token":
        change(tmp_path, "tokenizer_config.json", bos_token="<s>")
    if case == "cleaned text":
        change(tmp_path, "tokenizer_config.json", clean_up_tokenization_spaces=True)
    if case == "truncation":
        cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        change(tmp_path, "tokenizer.json", truncation=cut)
    if case == "a generation block":
        (tmp_path / "chat_template.jinja").write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    if case == "more templates":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)


def test_a_policy_is_rendered_without_transformers_openai_and_torch_and_the_renderers_are_all_there_for_who_asks() -> None:
    code = (
        "import sys\nfrom lightningrl.rendering.renderer import PolicyRenderer\n"
        f"policy = PolicyRenderer({str(POLICIES[0])!r})\n"
        "ids = policy.render([{'role': 'user', 'content': 'hi'}], None)\n"
        "policy.parse(ids, ids)\n"
        "print([name for name in ('transformers', 'openai', 'torch', 'renderers.qwen3') if name in sys.modules])\n"
        "from renderers import Qwen3Renderer, create_renderer\n"
        "import renderers\n"
        "print(renderers.OverlongPromptError.__name__, 'openai' in sys.modules, renderers.base is sys.modules['renderers.base'])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["[]", "OverlongPromptError True True"]
