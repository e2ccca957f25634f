"""vLLM on a CPU keeps plain weights, so that a trainer can replace them, and pauses as verl asks it to.

vLLM packs every linear weight for oneDNN when it has loaded the model, and drops the parameter (vllm 0.32:
model_executor/layers/linear.py:207, layers/utils.py:470): nothing can be loaded afterwards. With tied embeddings
lm_head keeps a packed copy, which `reload_weights` does not refresh: wrong logprobs and no error. Plain weights cure
both.

verl 0.9.1 was made for vLLM 0.24; what it asks of vLLM otherwise than 0.32 takes it is put right here as well.

vLLM calls `keep_plain_weights` in each of its processes before it loads a model (entry point group
`vllm.general_plugins`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lightningrl_verl_cpu.settings import is_active

__all__ = ["keep_plain_weights", "load_in_buckets", "pause_as_verl_asks"]


def keep_plain_weights() -> None:
    """Make layers multiply with `layer.weight` as it is at the time of the call."""
    if not is_active():
        return
    from vllm.model_executor.layers import utils

    # linear.py:214 and vocab_parallel_embedding.py:69 import the name when they need it, so this reaches both
    utils.dispatch_cpu_unquantized_gemm = _keep_weight
    load_in_buckets()
    pause_as_verl_asks()


def _keep_weight(layer: Any, remove_weight: bool = False) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def load_in_buckets() -> None:
    """verl loads weights bucket by bucket. vLLM 0.32 takes each for a whole checkpoint and refuses one that has
    `lm_head` without the embeddings it is tied to (models/utils.py:491), and verl then waits for ever."""
    from vllm.model_executor.models.utils import AutoWeightsLoader

    AutoWeightsLoader._check_skipped_aliases = lambda self, loaded: None


def pause_as_verl_asks() -> None:
    """verl 0.9.1 pauses its vLLM with `wait_for_inflight_requests` (vllm_async_server.py:992), which vLLM 0.32 calls
    `mode`."""
    from vllm.v1.engine.async_llm import AsyncLLM

    pause = AsyncLLM.pause_generation

    @functools.wraps(pause)
    async def pause_generation(self: Any, *, wait_for_inflight_requests: bool | None = None, **options: Any) -> None:
        if wait_for_inflight_requests is not None:
            options["mode"] = "wait" if wait_for_inflight_requests else "abort"
        await pause(self, **options)

    AsyncLLM.pause_generation = pause_generation
