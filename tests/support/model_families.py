"""Model families in small: their turns and tool calls in templates of our own, over a tokenizer of bytes that has their
special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightningrl_server.rendering.templates import load_template

__all__ = ["FAMILIES", "SHIPPED_FAMILIES", "Family", "build_tokenizer", "write_folder"]

Calls = Sequence[tuple[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """One family's published format."""

    name: str
    model_type: str
    """The one that transformers knows, whose smallest kind is made."""
    markup: str | None
    """The row that reads it; None = its template has no tools."""
    template: str
    eos: str
    tokens: tuple[str, ...] = ()
    """Special tokens beside it."""
    write: Callable[[Calls], str] | None = None
    """Calls as the model says them."""
    plain: Callable[[str], str] = str
    """Text as the model says it."""
    call_end: str | None = None
    """Token that ends an answer with calls; None = the usual."""
    with_text: bool = True
    """Text may stand before calls."""
    thinks: bool = False
    takes_system: bool = True
    is_strict: bool = False
    """Turns have to alternate."""
    sizes: dict[str, Any] = field(default_factory=dict[str, Any])


def _json(calls: Calls, key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}) for name, arguments in calls]


def _tags(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in _json(calls))


def _python(calls: Calls) -> str:
    said = [f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls]
    return f"[{', '.join(said)}]"


def _deepseek(calls: Calls) -> str:
    said = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(values)}\n```<｜tool▁call▁end｜>"
        for name, values in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(said) + "<｜tool▁calls▁end｜>"


def _deepseek_31(calls: Calls) -> str:
    said = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(values)}<｜tool▁call▁end｜>" for name, values in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(said) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Calls) -> str:
    said = [
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{json.dumps(values)}<|tool_call_end|>"
        for place, (name, values) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(said) + "<|tool_calls_section_end|>"


def _harmony(calls: Calls) -> str:
    said = [
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(values)}<|call|>"
        for name, values in calls
    ]
    return "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + "<|start|>assistant".join(said)


def _turns(start: str, end: str, *, extra: str = "", head: str = "", close: str = "") -> str:
    """A template whose turns all look alike: `start` with the role at ROLE, content, `end`. `extra`: branches of other
    messages, before the general one."""
    opened = start.replace("ROLE", "' + message.role + '")
    prompt = start.replace("ROLE", "assistant")
    return (
        head
        + "{%- for message in messages %}"
        + ("{%- if false %}" + extra + "{%- else %}" if extra else "")
        + "{{- '"
        + opened
        + "' + message.content + '"
        + end
        + "' }}"
        + ("{%- endif %}" if extra else "")
        + "{%- endfor %}"
        + "{%- if add_generation_prompt %}{{- '"
        + prompt
        + "' }}"
        + close
        + "{%- endif %}"
    )


_CHATML = _turns("<|im_start|>ROLE\\n", "<|im_end|>\\n")
_TOOLS_FIRST = "{%- if tools %}{{- 'START' + tools | tojson + 'END' }}{%- endif %}"
_CALLED = "{%- elif message.tool_calls %}"
_RESULT = "{%- elif message.role == 'tool' %}"


def _chatml_tools(hint: str, *, thinks: bool = False) -> str:
    tools = _TOOLS_FIRST.replace("START", f"<|im_start|>system\\n{hint}\\n").replace("END", "<|im_end|>\\n")
    calls = (
        _CALLED
        + "{{- '<|im_start|>assistant\\n' + message.content }}{%- for call in message.tool_calls %}"
        + "{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    )
    result = _RESULT + "{{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}"
    close = (
        "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    )
    return _turns(
        "<|im_start|>ROLE\\n", "<|im_end|>\\n", extra=calls + result, head=tools, close=close if thinks else ""
    )


_MISTRAL_HEAD = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content + '\\n\\n' %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set system = '' %}{%- set turns = messages %}{%- endif %}"
    "{%- set ns = namespace(place=0) %}"
    "{%- for message in turns %}{%- if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}"
    "{%- if (message.role == 'user') != (ns.place % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.place = ns.place + 1 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
)
_NINE = "{%- if ID is not defined or ID | length != 9 %}{{- raise_exception('ids have nine letters') }}{%- endif %}"


def _mistral(calls: str, result: str) -> str:
    return (
        _MISTRAL_HEAD
        + "{%- for message in turns %}{%- if message.role == 'user' %}"
        + "{{- '[INST]' + (system if loop.first else '') + message.content + '[/INST]' }}"
        + "{%- elif message.tool_calls %}"
        + calls
        + "{{- eos_token }}{%- elif message.role == 'tool' %}"
        + _NINE.replace("ID", "message.tool_call_id")
        + result
        + "{%- else %}{{- message.content + eos_token }}{%- endif %}{%- endfor %}"
    )


_OLD_MISTRAL = _mistral(
    "{{- '[TOOL_CALLS] [' }}{%- for call in message.tool_calls %}"
    + _NINE.replace("ID", "call.id")
    + '{{- \'{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments | tojson }}'
    + "{{- ', \"id\": \"' + call.id + '\"}' + (']' if loop.last else ', ') }}{%- endfor %}",
    '{{- \'[TOOL_RESULTS]{"content": \' + message.content | tojson + \', "call_id": "\' + message.tool_call_id }}'
    "{{- '\"}[/TOOL_RESULTS]' }}",
)
_NEW_MISTRAL = _mistral(
    "{{- message.content }}{%- for call in message.tool_calls %}"
    "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{%- endfor %}",
    "{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}",
)
_LLAMA_RESULT = _RESULT + "{{- 'OPENipythonSHUT\\n\\n' + message.content | tojson + 'END' }}"
_LLAMA_3 = _turns(
    "<|start_header_id|>ROLE<|end_header_id|>\\n\\n",
    "<|eot_id|>",
    head="{{- bos_token }}"
    + _TOOLS_FIRST.replace("START", "<|start_header_id|>system<|end_header_id|>\\n\\n").replace(
        "END", "\\nAnswer with {name, parameters}.<|eot_id|>"
    ),
    extra=_CALLED
    + "{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{%- endif %}"
    + "{%- set call = message.tool_calls[0].function %}"
    + '{{- \'<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "\' + call.name + \'", "parameters": \' }}'
    + "{{- call.arguments | tojson + '}<|eot_id|>' }}"
    + _LLAMA_RESULT.replace("OPEN", "<|start_header_id|>")
    .replace("SHUT", "<|end_header_id|>")
    .replace("END", "<|eot_id|>"),
)
_LLAMA_4 = _turns(
    "<|header_start|>ROLE<|header_end|>\\n\\n",
    "<|eot|>",
    head="{{- bos_token }}"
    + _TOOLS_FIRST.replace("START", "<|header_start|>system<|header_end|>\\n\\n").replace(
        "END", "\\nAnswer with [name(key=value)].<|eot|>"
    ),
    extra=_CALLED
    + "{{- '<|header_start|>assistant<|header_end|>\\n\\n' + message.content + '[' }}"
    + "{%- for call in message.tool_calls %}{{- call.function.name + '(' }}"
    + "{%- for key in call.function.arguments %}{{- key + '=\"%s\"' | format(call.function.arguments[key]) }}"
    + "{{- '' if loop.last else ', ' }}{%- endfor %}{{- ')' if loop.last else '), ' }}{%- endfor %}{{- ']<|eot|>' }}"
    + _LLAMA_RESULT.replace("OPEN", "<|header_start|>").replace("SHUT", "<|header_end|>").replace("END", "<|eot|>"),
)
_PHI = (
    "{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}"
    "{%- if message.role == 'system' and message.tools %}{{- '<|tool|>' + message.tools + '<|/tool|>' }}{%- endif %}"
    "{{- '<|end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
_FUNCTOOLS = _turns(
    "<|ROLE|>\\n",
    "<|end|>",
    head=_TOOLS_FIRST.replace("START", "<|system|>\\nList calls as functools[{name, arguments}].\\n").replace(
        "END", "<|end|>"
    ),
)
_GRANITE = _turns(
    "<|start_of_role|>ROLE<|end_of_role|>",
    "<|end_of_text|>\\n",
    head=_TOOLS_FIRST.replace("START", "<|start_of_role|>tools<|end_of_role|>").replace(
        "END", "\\nBegin calls with <|tool_call|> and a JSON list.<|end_of_text|>\\n"
    ),
)
_DEEPSEEK_OUTPUT = "<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>"


def _of_deepseek(call: str, between: str) -> str:
    return (
        "{{- bos_token }}{%- for message in messages %}{%- if message.role == 'system' %}{{- message.content }}{%- endif %}"
        "{%- endfor %}{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for message in messages %}"
        "{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}"
        "{%- elif message.tool_calls %}{{- '<｜Assistant｜>' + message.content + '<｜tool▁calls▁begin｜>' }}"
        "{%- for call in message.tool_calls %}{{- '<｜tool▁call▁begin｜>" + call + "<｜tool▁call▁end｜>' }}"
        "{%- if not loop.last %}{{- '" + between + "' }}{%- endif %}{%- endfor %}"
        "{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
        "{%- elif message.role == 'tool' %}{{- '" + _DEEPSEEK_OUTPUT + "' }}"
        "{%- elif message.role == 'assistant' %}{{- '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' }}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"
    )


_KIMI = _turns(
    "<|im_ROLE|>ROLE<|im_middle|>",
    "<|im_end|>",
    head=_TOOLS_FIRST.replace("START", "<|im_system|>tool_declare<|im_middle|>").replace("END", "<|im_end|>"),
    extra=_CALLED
    + "{{- '<|im_assistant|>assistant<|im_middle|>' + message.content + '<|tool_calls_section_begin|>' }}"
    + "{%- for call in message.tool_calls %}{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
    + "{{- call.function.arguments | tojson + '<|tool_call_end|>' }}{%- endfor %}"
    + "{{- '<|tool_calls_section_end|><|im_end|>' }}"
    + _RESULT
    + "{{- '<|im_system|>tool<|im_middle|>## Return of ' + message.tool_call_id + '\\n' + message.content + '<|im_end|>' }}",
)
_HARMONY = (
    "{%- if tools %}{{- '<|start|>developer<|message|>namespace functions ' + tools | tojson + '<|end|>' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.tool_calls %}"
    "{%- if message.content %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}{%- endif %}"
    "{%- for call in message.tool_calls %}{{- '<|start|>assistant<|channel|>commentary to=functions.' + call.function.name }}"
    "{{- ' <|constrain|>json<|message|>' + call.function.arguments | tojson + '<|call|>' }}{%- endfor %}"
    "{%- elif message.role == 'tool' %}"
    "{{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
_GEMMA = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
    "{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content }}"
    "{{- '<end_of_turn>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
_IM = ("<|im_start|>",)
_THINK = ("<think>", "</think>")
_TOOL_TAGS = ("<tool_call>", "</tool_call>")
_DS = tuple(
    f"<｜{name}｜>"
    for name in (
        "User",
        "Assistant",
        "tool▁calls▁begin",
        "tool▁calls▁end",
        "tool▁call▁begin",
        "tool▁call▁end",
        "tool▁sep",
        "tool▁output▁begin",
        "tool▁output▁end",
    )
)
_KIMI_TOKENS = (
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_HARMONY_TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>")

FAMILIES: tuple[Family, ...] = (
    Family(
        name="qwen2.5",
        model_type="qwen2",
        markup="hermes",
        template=_chatml_tools("Call within <tool_call></tool_call>."),
        eos="<|im_end|>",
        tokens=(*_IM, *_TOOL_TAGS),
        write=_tags,
    ),
    Family(
        name="qwen3",
        model_type="qwen3",
        markup="hermes",
        template=_chatml_tools("Call within <tool_call></tool_call>.", thinks=True),
        eos="<|im_end|>",
        tokens=(*_IM, *_TOOL_TAGS, *_THINK),
        write=_tags,
        thinks=True,
    ),
    Family(
        name="smollm3",
        model_type="smollm3",
        markup="hermes",
        template=_chatml_tools("Call within <tool_call></tool_call>.", thinks=True),
        eos="<|im_end|>",
        tokens=(*_IM, *_THINK),
        write=_tags,
        thinks=True,
    ),
    Family(
        name="hermes3",
        model_type="llama",
        markup="hermes",
        template=_chatml_tools("Call within <tool_call></tool_call>."),
        eos="<|im_end|>",
        tokens=_IM,
        write=_tags,
    ),
    Family(
        name="smollm2",
        model_type="llama",
        markup="hermes",
        template=_chatml_tools("Answer <tool_call>[...]</tool_call>."),
        eos="<|im_end|>",
        tokens=_IM,
        write=lambda calls: f"<tool_call>[{', '.join(_json(calls))}]</tool_call>",
        with_text=False,
    ),
    Family(
        name="granite4",
        model_type="granite",
        markup="hermes",
        template=_chatml_tools("Call within <tool_call></tool_call>."),
        eos="<|im_end|>",
        tokens=(*_IM, *_TOOL_TAGS),
        write=_tags,
    ),
    Family(
        name="granite3",
        model_type="granite",
        markup="granite",
        template=_GRANITE,
        eos="<|end_of_text|>",
        tokens=("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        write=lambda calls: f"<|tool_call|>[{', '.join(_json(calls))}]",
    ),
    Family(
        name="mistral-v3",
        model_type="mistral",
        markup="mistral",
        template=_OLD_MISTRAL,
        eos="</s>",
        tokens=(
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        write=lambda calls: f"[TOOL_CALLS] [{', '.join(_json(calls))}]",
        with_text=False,
        is_strict=True,
    ),
    Family(
        name="mistral-v11",
        model_type="mistral",
        markup="mistral",
        template=_NEW_MISTRAL,
        eos="</s>",
        tokens=("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        write=lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(values)}" for name, values in calls),
        is_strict=True,
    ),
    Family(
        name="llama3.1",
        model_type="llama",
        markup="llama",
        template=_LLAMA_3,
        eos="<|eot_id|>",
        tokens=_HEADERS,
        write=lambda calls: "; ".join(_json(calls, "parameters")),
        with_text=False,
    ),
    Family(
        name="llama3.1-tag",
        model_type="llama",
        markup="llama",
        template=_LLAMA_3,
        eos="<|eot_id|>",
        tokens=_HEADERS,
        write=lambda calls: "<|python_tag|>" + "; ".join(_json(calls, "parameters")),
        call_end="<|eom_id|>",
    ),
    Family(
        name="llama4",
        model_type="llama",
        markup="llama",
        template=_LLAMA_4,
        eos="<|eot|>",
        tokens=("<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"),
        write=_python,
        with_text=False,
    ),
    Family(
        name="phi4-mini",
        model_type="phi3",
        markup="phi",
        template=_PHI,
        eos="<|end|>",
        tokens=("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
        write=lambda calls: f"<|tool_call|>[{', '.join(_json(calls))}]<|/tool_call|>",
    ),
    Family(
        name="phi4-functools",
        model_type="phi3",
        markup="functools",
        template=_FUNCTOOLS,
        eos="<|end|>",
        tokens=("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
        write=lambda calls: f"functools[{', '.join(_json(calls))}]",
    ),
    Family(
        name="deepseek-v3",
        model_type="deepseek_v3",
        markup="deepseek",
        template=_of_deepseek(
            "function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' + call.function.arguments + '\\n```", "\\n"
        ),
        eos="<｜end▁of▁sentence｜>",
        tokens=(*_DS, *_THINK),
        write=_deepseek,
    ),
    Family(
        name="deepseek-v3.1",
        model_type="deepseek_v3",
        markup="deepseek",
        template=_of_deepseek("' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '", ""),
        eos="<｜end▁of▁sentence｜>",
        tokens=(*_DS, *_THINK),
        write=_deepseek_31,
    ),
    Family(
        name="kimi-k2",
        model_type="deepseek_v3",
        markup="kimi",
        template=_KIMI,
        eos="<|im_end|>",
        tokens=_KIMI_TOKENS,
        write=_kimi,
    ),
    Family(
        name="gpt-oss",
        model_type="gpt_oss",
        markup="gpt-oss",
        template=_HARMONY,
        eos="<|return|>",
        tokens=_HARMONY_TOKENS,
        write=_harmony,
        plain=lambda text: f"<|channel|>final<|message|>{text}",
        call_end="",
        with_text=False,
    ),
    Family(
        name="gemma2",
        model_type="gemma2",
        markup=None,
        template=_GEMMA,
        eos="<end_of_turn>",
        tokens=("<start_of_turn>",),
        takes_system=False,
        is_strict=True,
    ),
    Family(name="smollm2-gguf", model_type="llama", markup=None, template=_CHATML, eos="<|im_end|>", tokens=_IM),
)


def _with_shipped(name: str, template: str, **changes: Any) -> Family:
    family = next(family for family in FAMILIES if family.name == name)
    text = load_template(template, Path(), name)
    changes = {"takes_system": True, "is_strict": False, **changes}
    return replace(family, name=f"shipped-{template}", template=text, **changes)


SHIPPED_FAMILIES = (
    _with_shipped("smollm2-gguf", "chatml", markup="hermes", write=_tags),
    _with_shipped("gemma2", "gemma", markup="hermes", write=_tags),
    _with_shipped("llama3.1", "llama"),
    _with_shipped("mistral-v3", "mistral"),
)
"""Base models with the shipped template that fits them."""


def build_tokenizer(family: Family) -> Any:
    """A fast tokenizer of bytes with the family's special tokens and template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: place for place, token in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast
    tokenizer = build(tokenizer_object=core, bos_token="<s>", clean_up_tokenization_spaces=False)
    special = [
        AddedToken(token, normalized=False, special=token not in _THINK) for token in (family.eos, *family.tokens)
    ]
    tokenizer.add_tokens(special)
    tokenizer.eos_token = tokenizer.pad_token = family.eos
    tokenizer.chat_template = family.template
    return tokenizer


_SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "n_routed_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 64,
    "tie_word_embeddings": True,
}


def write_folder(family: Family, folder: Path, *, weights: bool = False) -> Path:
    """A transformers folder of the family, as small as it can be; random weights where asked for."""
    from transformers import AutoConfig

    tokenizer = build_tokenizer(family)
    tokenizer.save_pretrained(folder)
    known: Any = AutoConfig.for_model(family.model_type)
    sizes = {name: value for name, value in _SMALL.items() if hasattr(known, name)}
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id,
    }
    config: Any = AutoConfig.for_model(family.model_type, vocab_size=len(tokenizer), **sizes, **ids)
    if weights:
        import transformers

        models: Any = transformers.AutoModelForCausalLM
        models.from_config(config).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    return folder
