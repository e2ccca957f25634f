"""GGUF as a format of models: a file becomes a transformers folder, a transformers folder becomes a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError, LightningError
from lightningrl_torch.gguf.header import GgufHeader, read_header

__all__ = ["GgufFormat"]


class GgufFormat:
    """Files of llama.cpp: all its precisions in, float32, float16, bfloat16 and Q8_0 out."""

    version = 1
    """Raised when files are read otherwise than before."""

    def describe(self, file: Path) -> Mapping[str, Any]:
        """Look at a file's head alone, as `ModelFormat` says. Raises ConfigError where it cannot be read."""
        from lightningrl_torch.gguf.tokenizer import ADDED

        header = _read_checked(file)
        types = header.metadata.get("tokenizer.ggml.token_type") or ()
        tokens = zip(header.metadata["tokenizer.ggml.tokens"], types, strict=False)
        return {
            "architecture": header.architecture,
            "precision": header.precision,
            "parameters": header.parameters,
            "dtype": header.dtype,
            "has_template": bool(header.metadata.get("tokenizer.chat_template")),
            "special_tokens": [token for token, kind in tokens if kind in ADDED],
            "bytes": header.parameters * (2 if header.dtype == "bfloat16" else 4),
        }

    def read(self, file: Path, folder: Path, progress: Callable[[float], None]) -> None:
        """Write a transformers folder of a file into `folder`, which is there and empty. Raises ConfigError."""
        from lightningrl_torch.gguf.weights import write_weights

        header = _read_checked(file)
        try:
            _write_tokenizer(header, folder)
            model = _empty_model(header)
            write_weights(header, model, folder, progress)
            model.config.architectures = [type(model).__name__]
            model.config.dtype = header.dtype
            model.config.save_pretrained(folder)
            _write_generation(header, folder)
        except (LightningError, OSError, MemoryError):
            raise
        except Exception as error:  # of transformers, tokenizers, numpy: what the file says fits together nowhere
            raise ConfigError(
                f"model file {str(file)!r} describes no model that can be made "
                f"({' '.join(f'{type(error).__name__}: {error}'.split())[:200]}); take the model's transformers folder"
            ) from error

    def write(self, folder: Path, file: Path | None, precision: str) -> None:
        """Write a file of a transformers folder, which may lack weights where `file` is None: it is only checked that
        one can be written. Raises ConfigError."""
        from lightningrl_torch.gguf.writing import check_writable, write_gguf

        if file is None:
            check_writable(folder, precision)
        else:
            write_gguf(folder, file, precision)


def _read_checked(file: Path) -> GgufHeader:
    from lightningrl_torch.gguf.config import check_architecture
    from lightningrl_torch.gguf.tokenizer import check_tokenizer

    header = read_header(file)
    check_architecture(header)
    check_tokenizer(header)
    return header


def _write_tokenizer(header: GgufHeader, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from lightningrl_torch.gguf.tokenizer import make_tokenizer, special_tokens

    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=make_tokenizer(header),
        model_max_length=int(header.get("context_length", 2048)),
        clean_up_tokenization_spaces=False,
        **special_tokens(header),
    )
    if header.metadata.get("tokenizer.chat_template"):
        tokenizer.chat_template = header.metadata["tokenizer.chat_template"]
    tokenizer.save_pretrained(folder)


def _empty_model(header: GgufHeader) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightningrl_torch.gguf.config import make_config

    values = make_config(header)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def _write_generation(header: GgufHeader, folder: Path) -> None:
    from lightningrl_torch.gguf.tokenizer import stop_token_ids, token_id

    stops = stop_token_ids(header)
    ids = {key: token_id(header, name) for key, name in _GENERATION.items()}
    generation: dict[str, int | list[int]] = {key: value for key, value in ids.items() if value is not None}
    if stops:
        generation["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    path = folder / "generation_config.json"
    path.write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_GENERATION = {"bos_token_id": "bos", "pad_token_id": "padding"}
