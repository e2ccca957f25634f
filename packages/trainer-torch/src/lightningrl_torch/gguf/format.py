"""GGUF as a format of models: a file becomes a transformers folder, a transformers folder becomes a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl_torch.gguf.header import GgufHeader, read_header

__all__ = ["GgufFormat"]


class GgufFormat:
    """Files of llama.cpp: all its precisions in, float32, float16, bfloat16 and Q8_0 out."""

    version = 1
    """Raised when files are read otherwise than before."""

    def describe(self, file: Path) -> Mapping[str, Any]:
        """Look at a file's head alone, as `ModelFormat` says. Raises ConfigError where it cannot be read."""
        from lightningrl_torch.gguf.config import check_architecture
        from lightningrl_torch.gguf.tokenizer import check_tokenizer

        header = read_header(file)
        check_architecture(header)
        check_tokenizer(header)
        return {
            "architecture": header.architecture,
            "precision": header.precision,
            "parameters": header.parameters,
            "dtype": header.dtype,
            "has_template": bool(header.metadata.get("tokenizer.chat_template")),
            "bytes": header.parameters * (2 if header.dtype == "bfloat16" else 4),
        }

    def read(self, file: Path, folder: Path, progress: Callable[[float], None]) -> None:
        """Write a transformers folder of a file into `folder`, which is there and empty. Raises ConfigError."""
        from lightningrl_torch.gguf.weights import write_weights

        header = read_header(file)
        _write_tokenizer(header, folder)
        model = _empty_model(header)
        write_weights(header, model, folder, progress)
        model.config.architectures = [type(model).__name__]
        model.config.dtype = header.dtype
        model.config.save_pretrained(folder)
        _write_generation(header, folder)

    def write(self, folder: Path, file: Path | None, precision: str) -> None:
        """Write a file of a transformers folder, which may lack weights where `file` is None: it is only checked that
        one can be written. Raises ConfigError."""
        from lightningrl_torch.gguf.writing import check_writable, write_gguf

        if file is None:
            check_writable(folder, precision)
        else:
            write_gguf(folder, file, precision)


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
    try:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"model file {str(header.file)!r} describes no model that transformers can make "
            f"({' '.join(str(error).split())[:200]}); take the model's transformers folder"
        ) from error


def _write_generation(header: GgufHeader, folder: Path) -> None:
    from lightningrl_torch.gguf.tokenizer import stop_token_ids

    stops = stop_token_ids(header)
    ids = {key: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for key, name in _GENERATION.items()}
    generation = {key: value for key, value in ids.items() if value is not None}
    if stops:
        generation["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    path = folder / "generation_config.json"
    path.write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n", encoding="utf-8")


_GENERATION = {"bos_token_id": "bos", "pad_token_id": "padding"}
