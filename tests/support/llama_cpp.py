"""llama.cpp itself, in this process, asked over HTTP: what it makes of a text, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import xllamacpp
from sizes import PATIENCE_S

__all__ = ["LlamaCpp", "running"]


class LlamaCpp:
    """A server of llama.cpp with one model file."""

    def __init__(self, address: str) -> None:
        self._address = address

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        tokens: list[int] = self._ask("/tokenize", content=text, add_special=add_special, parse_special=True)["tokens"]
        return tokens

    def logprobs(self, prompt: Sequence[int], most: int = 20) -> dict[int, float]:
        """Log-probabilities of the likeliest next tokens."""
        answer = self._ask(
            "/completion", prompt=list(prompt), n_predict=1, temperature=0, n_probs=most, cache_prompt=False
        )
        return {token["id"]: token["logprob"] for token in answer["completion_probabilities"][0]["top_logprobs"]}

    def greedy(self, prompt: Sequence[int], most: int) -> list[int]:
        """Token ids of the greedy answer, the end of text left out."""
        answer = self._ask(
            "/completion", prompt=list(prompt), n_predict=most, temperature=0, return_tokens=True, cache_prompt=False
        )
        tokens: list[int] = answer["tokens"]
        return tokens

    def sample(self, prompt: Sequence[int], tokens: int) -> None:
        """Sample so many, past any end of text."""
        answer = self._ask("/completion", prompt=list(prompt), n_predict=tokens, ignore_eos=True, cache_prompt=False)
        assert answer["tokens_predicted"] == tokens, answer

    def chat(self, text: str, most: int) -> str:
        message = [{"role": "user", "content": text}]
        answer = self._ask("/v1/chat/completions", messages=message, max_tokens=most, temperature=0)
        return str(answer["choices"][0]["message"]["content"])

    def apply_template(self, messages: Sequence[Any]) -> str:
        """The prompt that the file's own template writes."""
        return str(self._ask("/apply-template", messages=list(messages))["prompt"])

    def _ask(self, path: str, **body: Any) -> Any:
        answer = httpx.post(self._address + path, json=body, timeout=PATIENCE_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def running(file: Path, context: int = 128, threads: int = 1) -> Iterator[LlamaCpp]:
    """llama.cpp with a model file."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx = context
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.warmup = False
    parameters.verbosity = -1
    server = xllamacpp.Server(parameters)
    try:
        yield LlamaCpp(server.listening_address)
    finally:
        del server
