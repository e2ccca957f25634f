"""The tokenizer of a folder that `save_pretrained` of transformers 5 wrote, without importing transformers: a second of a server's start.

Only folders that say nothing but what is done here; all others, and hub names, are transformers'. Tests compare the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

__all__ = ["PlainTokenizer"]

NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
KNOWN: Final = {"backend", "clean_up_tokenization_spaces", "extra_special_tokens", "is_local", "local_files_only", *NAMED} | {
    "model_max_length",
    "tokenizer_class",
}
"""Of `tokenizer_config.json`: keys that change no token, or that are read below."""
FILES: Final = {"special_tokens_map.json", "added_tokens.json", "additional_chat_templates"}
"""Where older versions keep tokens and newer ones more templates."""
THEIRS: Final = {"chat_template", "continue_final_message", "documents", "return_assistant_tokens_mask", "sanitize_control_tokens"}
MOST_TOKENS: Final = 100_000
"""transformers looks at larger vocabularies for a mistake that some were published with."""


class PlainTokenizer:
    """What our gateway asks of a fast tokenizer; for the rest transformers is loaded after all."""

    clean_up_tokenization_spaces = False

    def __init__(self, folder: Path, name: str, core: Any, config: Mapping[str, Any], template: str | None) -> None:
        self.name_or_path = name
        self.backend_tokenizer = core
        self.chat_template = template
        self.special_tokens_map: dict[str, str] = {name: config[name] for name in NAMED if config.get(name)}
        self.all_special_tokens = list(dict.fromkeys([*self.special_tokens_map.values(), *config.get("extra_special_tokens", ())]))
        self.added_tokens_decoder: dict[int, Any] = core.get_added_tokens_decoder()
        self.unk_token_id = self._id("unk_token")
        self.eos_token_id = self._id("eos_token")
        self._folder = folder

    @classmethod
    def load(cls, folder: Path, name: str) -> PlainTokenizer | None:
        """None where the folder says more than is known here."""
        paths = {path.name for path in folder.iterdir()}
        if not {"tokenizer.json", "tokenizer_config.json"} <= paths or FILES & paths:
            return None
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8") if "chat_template.jinja" in paths else None
        if not _is_plain(config) or (template is not None and re.search(r"\{%-?\s*generation", template)):
            return None
        from tokenizers import Tokenizer

        core = Tokenizer.from_file(str(folder / "tokenizer.json"))
        known = {token.content for token in core.get_added_tokens_decoder().values()}
        named = {config[name] for name in NAMED if config.get(name)} | set(config.get("extra_special_tokens", ()))
        if core.truncation or core.padding or not named <= known or core.get_vocab_size() > MOST_TOKENS:
            return None
        return cls(folder, name, core, config, template)

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in sorted(self.added_tokens_decoder.items())}

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Any, *, tokenize: bool = True, **options: Any) -> Any:
        """The template's text; its tokens, and options that are no variables of the template, are transformers'."""
        if tokenize or self.chat_template is None or not THEIRS.isdisjoint(options):
            return self._whole.apply_chat_template(messages, tokenize=tokenize, **options)
        return self._render(messages, **{**self.special_tokens_map, **options})

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._whole(*args, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)

    def _id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    @cached_property
    def _render(self) -> Any:
        from lightningrl.rendering.chat_template import compile_template

        assert self.chat_template is not None
        return compile_template(self.chat_template)

    @cached_property
    def _whole(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(self._folder))


def _is_plain(config: Any) -> bool:
    return (
        isinstance(config, dict)
        and config.keys() <= KNOWN
        and config.get("tokenizer_class") == "TokenizersBackend"
        and config.get("clean_up_tokenization_spaces") is False
        and all(isinstance(config.get(name), str | None) for name in NAMED)
        and isinstance(extra := config.get("extra_special_tokens", []), list)
        and all(isinstance(token, str) for token in extra)
    )
