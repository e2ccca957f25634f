"""Settings that a run fixed beside the weights, written into an exported folder: how it asks and how it samples.

chat_template_kwargs ─► chat_template.jinja, at its head     sampling ─► generation_config.json     both ─► README.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightningrl.types import SamplingSettings
from lightningrl_server.rendering.templates import read_template

__all__ = ["describe", "fix_template", "read_json", "set_sampling", "write_card", "write_json"]

SAMPLERS = (
    *("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "num_beams", "penalty_alpha"),
    *("length_penalty", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "bad_words_ids"),
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias"),
)
"""Settings of transformers' generation that change which tokens come; a run has those of its recipe and no others."""


def fix_template(folder: Path, template: str | None, switches: Mapping[str, Any]) -> None:
    """Write the template that the run asked by, where the folder's is another: the recipe's own (`template`), or the
    folder's, with the recipe's switches (`chat_template_kwargs`) as defaults that a caller can still override."""
    text = read_template(folder) if template is None else template
    if text is None or (template is None and not switches):
        return
    head = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}\n"
        for name, value in switches.items()
    )
    (folder / "chat_template.jinja").write_text(head + text, encoding="utf-8")


def set_sampling(folder: Path, sampling: SamplingSettings) -> None:
    """Put a run's sampling in place of what a folder's generation configuration says of it. Its stops stay."""
    path = folder / "generation_config.json"
    config = {name: value for name, value in read_json(path).items() if name not in SAMPLERS}
    config.pop("_from_model_config", None)  # by which transformers would make it anew from the model's
    config |= {"do_sample": sampling.temperature > 0, "max_new_tokens": sampling.max_tokens}
    if sampling.temperature > 0:
        config |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    write_json(path, config)


def write_card(folder: Path, head: Sequence[str], title: str, notes: Sequence[str]) -> None:
    """Write README.md, which the hub shows: its metadata, a sentence, paragraphs."""
    (folder / "README.md").write_text(
        "\n".join(["---", *head, "---", title, *(line for paragraph in notes for line in ("", paragraph)), ""]),
        encoding="utf-8",
    )


def describe(sampling: SamplingSettings, switches: Mapping[str, Any]) -> list[str]:
    """Paragraphs of a card: what the folder's files set, so that a server asks and samples as the run did."""
    drawn = (
        f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, top-k {sampling.top_k or 'off'}"
        if sampling.temperature > 0
        else "the likeliest token"
    )
    notes = [f"It was trained with answers of at most {sampling.max_tokens} tokens, drawn by {drawn}."]
    if switches:
        named = ", ".join(f"`{name} = {json.dumps(value)}`" for name, value in switches.items())
        notes.append(
            f"Its prompts were written with {named}; `chat_template.jinja` sets this where nobody asks otherwise."
        )
    return notes


def read_json(path: Path) -> dict[str, Any]:
    """An object of a file; empty where the file is not there."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
