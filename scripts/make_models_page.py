"""Writes docs/reference/models.md, the models that work: each row is tried while it is written, with the templates of
tests/support/model_families.py and the readers of the server.

python scripts/make_models_page.py            writes the page
python scripts/make_models_page.py --check    fails where it would be another
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "reference" / "models.md"
SIZES: Final = {"0.135": 0.135e9, "0.5": 0.494e9, "1.5": 1.54e9, "3": 3.09e9, "7": 7.62e9}
FULL: Final = 4 + 4 + 8
"""Bytes of a parameter that learns: float32 weight, gradient, Adam's two moments."""
ADAPTERS: Final = 0.012
"""Share of parameters that LoRA of rank 16 adds, on all linear layers of Qwen2.5-0.5B (8.8 of 494 million is 0.018) to
7B (40.4 of 7,616 is 0.005)."""
USER: Final = {"role": "user", "content": "hi"}
SYSTEM: Final = {"role": "system", "content": "be brief"}
TOOL: Final = {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
CALL: Final = [("add", {"a": 1})]
HEAD: Final = """# Models that work

A policy is a transformers folder, a name of the Hugging Face hub or a GGUF file. Its prompts are written by its own
chat template. `scripts/make_models_page.py` writes this page, and tries each row.

## Tools, by family

The markup of calls is told by the chat template, else by `model_type` of `config.json`. Where turns are strict,
neighbours are joined. A call that is malformed or cut off stays text, and the agent is shown it.
"""
OF_TEMPLATES: Final = {
    "chatml": "SmolLM, Qwen, Yi (also named `hermes`)",
    "gemma": "Gemma 2 and 3",
    "llama": "Llama 3",
    "mistral": "Mistral from its tokenizer's version 3",
}
OWN: Final = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' }}
    {%- if loop.first and tools %}
        {{- 'To call a tool: <tool_call>{"name": "…", "arguments": {}}</tool_call>\\n' + tools | tojson + '\\n' }}
    {%- endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
SHAPES: Final = {
    "text_arguments": "arguments as JSON text",
    "tools_in_system": "tools in the system message",
    "in_content": "calls in the content",
    "one_each": "one call a turn",
}


def page() -> str:
    """The page's text."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    families = import_module("model_families").FAMILIES
    return "\n".join([HEAD, *_families(families), *_readers(), *_templates(), *_library(), *_memory()]) + "\n"


def _families(families: Any) -> Iterator[str]:
    yield "| tried with | a call | its template wants | thinking | system prompt | turns |"
    yield "|---|---|---|---|---|---|"
    for family in families:
        yield f"| {' | '.join(_row(family))} |"
    yield ""
    yield (
        "Each is tried as a folder with random weights (`tests/test_model_folders.py`, "
        "`packages/server/tests/test_rendering_families.py`), with templates of ours in each family's published "
        "format; SmolLM2-135M-Instruct with its own weights (`tests/test_smollm2_tools.py`)."
    )
    yield ""


def _row(family: Any) -> Iterator[str]:
    from lightningrl_server.rendering.renderer import PolicyRenderer

    build: Any = import_module("model_families").build_tokenizer
    renderer = PolicyRenderer(build(family), name=family.name)
    yield f"{family.name} (`{family.model_type}`)"
    if not renderer.supports_tools:
        yield from ("none", "no tools: set `policy.chat_template`")
    else:
        ids = renderer.tokenizer.encode(family.write(CALL))
        (call,) = renderer.parse(ids, renderer.render([USER], [TOOL])).tool_calls
        assert (call.name, call.arguments) == CALL[0], family.name
        yield "`" + family.write(CALL).replace("\n", " ").replace("|", "\\|") + "`"
        shaped = [words for name, words in SHAPES.items() if getattr(renderer._turns, name)]
        yield "; ".join(shaped) or "–"
    yield "`enable_thinking`" if renderer.unlike({"enable_thinking": False}) else "–"
    text = renderer.decode(renderer.render([SYSTEM, USER], None))
    own = renderer.tokenizer.apply_chat_template
    yield "yes" if _is_taken(own, [SYSTEM, USER]) and "be brief" in text else "as the user's"
    yield "any" if _is_taken(own, [USER, USER]) else "strict"


def _is_taken(render: Any, messages: Any) -> bool:
    try:
        render(messages, tokenize=False)
    except Exception:  # noqa: BLE001  (whatever a template raises)
        return False
    return True


def _readers() -> Iterator[str]:
    from lightningrl_server.rendering.markups import MARKUPS

    yield "Markups, and what tells them:"
    yield ""
    for markup in MARKUPS:
        marks = " and ".join(f"`{mark}`" for mark in markup.marks)
        kinds = ", ".join(f"`{kind}`" for kind in markup.models)
        yield f"- {markup.name}, {markup.families}: {marks}{f'; else {kinds}' if kinds else ''}."
    yield ""
    yield (
        "A family more is one more row of `MARKUPS` in `packages/server/src/lightningrl_server/rendering/markups.py`, "
        "with a reader in `call_readers.py` where none of those there fits."
    )
    yield ""


def _templates() -> Iterator[str]:
    from lightningrl_server.rendering.renderer import PolicyRenderer
    from lightningrl_server.rendering.templates import SHIPPED

    support: Any = import_module("model_families")
    yield "## My GGUF has no chat template"
    yield ""
    yield (
        "Base models have none, and some templates know no tools. `policy.chat_template` puts another in its place: a "
        "shipped one, or a Jinja file beside the recipe. An exported folder has it as its own."
    )
    yield ""
    for family in support.SHIPPED_FAMILIES:
        name = family.name.removeprefix("shipped-")
        renderer = PolicyRenderer(support.build_tokenizer(family))
        (call,) = renderer.parse(renderer.tokenizer.encode(family.write(CALL)), ()).tool_calls
        assert (call.name, call.arguments) == CALL[0], name
        listed = ", ".join(f"`{token}`" for token in SHIPPED[name])
        written = family.write(CALL).replace("\n", " ")
        yield f'- `policy.chat_template = "{name}"`, for {OF_TEMPLATES[name]} with {listed}: `{written}`.'
    yield ""
    yield "## Write a chat template: an example for Gemma"
    yield ""
    yield (
        "A template writes every message, its calls and the tools, and the beginning of the answer last. A call "
        "stands in one of the forms above; earlier turns are written alike whatever follows. `lightningrl try RECIPE "
        "--full` shows the prompt."
    )
    yield ""
    yield f"```jinja title=gemma_of_mine.jinja\n{OWN}```"
    yield ""


def _library() -> Iterator[str]:
    models: Mapping[str, str] = import_module("renderers.base").MODEL_RENDERER_MAP
    kinds = sorted({*models.values()} - {"default"})
    yield "## Models with a renderer of their own"
    yield ""
    yield (
        f"{len(models)} names of the hub have a renderer in the `renderers` library, which then writes prompts"
        f" and reads answers: {', '.join(f'`{kind}`' for kind in kinds)}. `policy.renderer` names one for a "
        "folder whose tokens fit it."
    )
    yield ""


def _memory() -> Iterator[str]:
    yield "## Memory"
    yield ""
    yield (
        "Weights, gradients and Adam's moments in GB, without activations and the engine's cache, which "
        f"`lightningrl doctor` measures: {FULL} bytes for a parameter that learns, 4 (float32) or 2 (bfloat16)"
        f" for one that is frozen. LoRA adds about {ADAPTERS:.1%} of the parameters at rank 16."
    )
    yield ""
    yield "| billion parameters | full | LoRA, float32 | LoRA, bfloat16 |"
    yield "|---|---|---|---|"
    for name, parameters in SIZES.items():
        adapters = FULL * ADAPTERS
        sizes = (parameters * each / 1e9 for each in (FULL, 4 + adapters, 2 + adapters))
        yield f"| {name} | {' | '.join(f'{size:.1f}' for size in sizes)} |"
    yield ""
    yield "[What a laptop can train](../how-to/laptop.md) has measured figures."


def main() -> int:
    """Write the page, or with `--check` compare it. Returns the exit status."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is not current; run: python scripts/make_models_page.py")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
