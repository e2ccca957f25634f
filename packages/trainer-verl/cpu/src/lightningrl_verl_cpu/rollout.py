"""Replica `lightningrl_transformers`: a transformers model behind verl's rollout interface, for machines without vLLM.

    trainer worker: TransformersAdapter ──named weights──► Ray actor: TransformersServer ──► lightningrl_torch's engine
    LLMServerClient ──generate (token ids in, token ids out)──► the same actor

It serves Ray calls only: there is no HTTP endpoint. Calls are batched continuously and never mix versions.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

import ray
import torch
from torch import Tensor
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.errors import BackendError
from lightningrl.types import SamplingSettings
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.settings import EngineSettings
from lightningrl_verl_cpu.settings import REPLICA

__all__ = ["TransformersAdapter", "TransformersReplica", "TransformersServer"]

_UNSENT = -1
"""Version of weights that the trainer has not sent."""


def _leave_out_padding(model: Any, tokens: int) -> None:
    """Sample from the tokenizer's tokens alone, as verl's vLLM replicas do (workers/rollout/vllm_rollout/utils.py)."""

    def mask(module: Any, inputs: Any, logits: Tensor) -> Tensor:
        logits[..., tokens:] = torch.finfo(logits.dtype).min / 2
        return logits

    model.get_output_embeddings().register_forward_hook(mask)


class TransformersServer:
    """The actor: one model, one engine. `generate` has vLLMHttpServer's parameters and results."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.path = str(model_config.local_path)
        self._config = config
        model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32, attn_implementation="sdpa")
        self._model = model.eval()
        _leave_out_padding(self._model, len(model_config.tokenizer))
        self._context_length = config.max_model_len or int(self._model.config.max_position_embeddings)
        self._stop_token_ids = _end_tokens(model_config)
        self._engine = TorchEngine(
            self._model,
            policy=str(model_config.path),
            context_length=self._context_length,
            text_of=model_config.tokenizer.decode,
            version=_UNSENT,
            seed=int(config.seed) + replica_rank,
            settings=EngineSettings(max_batch=int(config.max_num_seqs), threads=1),
        )
        self._aborted = asyncio.Event()
        self._gates = {"awake": asyncio.Event(), "resumed": asyncio.Event()}
        for gate in self._gates.values():
            gate.set()
        self._rejects = False

    def address(self) -> str:
        """A name for the load balancer; nothing listens there."""
        return ray.get_runtime_context().get_actor_id()  # type: ignore[no-any-return]

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
    ) -> TokenOutput:
        """Complete the prompt. An aborted call returns the tokens it has, with stop_reason "aborted"."""
        if image_data or video_data:
            raise BackendError(
                f"request {request_id!r} has images or videos, which replica {REPLICA!r} cannot read; use vLLM"
            )
        request = GenerateRequest(
            id=request_id, prompt_ids=tuple(prompt_ids), sampling=self._read_sampling(sampling_params, len(prompt_ids))
        )
        if not await self._admit():
            return self._output([], "aborted")
        chunks: list[TokenChunk] = []
        stream = self._engine.generate(request)
        aborted = asyncio.ensure_future(self._aborted.wait())
        try:
            while (chunk := await _next_or_abort(stream, aborted)) is not None:
                chunks.append(chunk)
                if chunk.finish_reason is not None:
                    return self._output(chunks, "completed")
            return self._output(chunks, "aborted")
        finally:
            aborted.cancel()
            await stream.aclose()  # type: ignore[attr-defined]

    async def update_weights(self, weights: Sequence[tuple[str, Tensor]], global_steps: int | None) -> None:
        """Replace the named weights when no call is running; calls that come meanwhile wait."""
        await asyncio.to_thread(self._load, weights, global_steps)

    def _load(self, weights: Sequence[tuple[str, Tensor]], global_steps: int | None) -> None:
        current = self._model.state_dict()
        unknown = [name for name, _ in weights if name not in current]
        if unknown:
            raise BackendError(
                f"replica {REPLICA!r} has no weight {unknown[0]!r}; for LoRA set model.lora.merge=true, or use vLLM"
            )
        with self._engine.held():
            with torch.no_grad():
                for name, value in weights:
                    current[name].copy_(value)
            self._engine.set_version(self._engine.info.version if global_steps is None else global_steps)

    async def sleep(self) -> None:
        """Let new calls wait; running ones end."""
        self._gates["awake"].clear()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Serve again. verl wakes the weights alone before it replaces them: that opens nothing."""
        if tags is None or "kv_cache" in tags:
            self._gates["awake"].set()

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> None:
        """End running calls with what they have; new ones wait for `resume_generation`, or are aborted at once."""
        self._rejects = reject_request
        self._gates["resumed"].clear()
        self._aborted.set()
        if reject_request:
            # wakes the calls that wait already; `_admit` looks again
            self._gates["resumed"].set()

    async def resume_generation(self) -> None:
        self._rejects = False
        self._aborted.clear()
        self._gates["resumed"].set()

    async def clear_kv_cache(self) -> None:
        """Nothing to do: the engine forgets prefixes when its version changes."""

    async def release_kv_cache(self) -> None:
        """Nothing to do: no accelerator memory."""

    async def resume_kv_cache(self) -> None:
        """Nothing to do: no accelerator memory."""

    async def start_profile(self, **_: Any) -> None:
        """Nothing to profile."""

    async def stop_profile(self) -> None:
        """Nothing to profile."""

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.close()

    async def _admit(self) -> bool:
        """Wait until calls are served; False when they are turned away."""
        while not all(gate.is_set() for gate in self._gates.values()):
            for gate in self._gates.values():
                await gate.wait()
        return not self._rejects

    def _output(self, chunks: Sequence[TokenChunk], stop_reason: str) -> TokenOutput:
        version = chunks[0].policy_version if chunks else self._engine.info.version
        return TokenOutput(
            token_ids=[token for chunk in chunks for token in chunk.token_ids],
            log_probs=[logprob for chunk in chunks for logprob in chunk.logprobs],
            stop_reason=stop_reason,
            extra_fields={"global_steps": None if version == _UNSENT else version},
        )

    def _read_sampling(self, params: dict[str, Any], prompt_length: int) -> SamplingSettings:
        params = dict(params)
        limit = params.pop("max_tokens", None) or params.pop("max_new_tokens", None)
        if limit is None:
            limit = min(
                self._config.response_length, self._config.prompt_length + self._config.response_length - prompt_length
            )
        stops = tuple(params.pop("stop_token_ids", None) or ())
        settings = SamplingSettings(
            temperature=float(params.pop("temperature", 1.0)),
            top_p=float(params.pop("top_p", 1.0)),
            top_k=max(0, int(params.pop("top_k", 0))),
            max_tokens=max(1, int(limit)),
            stop_token_ids=stops
            if params.pop("ignore_eos", self._config.ignore_eos)
            else (*stops, *self._stop_token_ids),
            stop=_strings(params.pop("stop", None)),
            seed=params.pop("seed", None),
        )
        params.pop("logprobs", None)
        unknown = {name for name, value in params.items() if name != "repetition_penalty" or value != 1.0}
        if unknown:
            raise BackendError(
                f"replica {REPLICA!r} cannot honour sampling parameter {min(unknown)!r}; leave it out, or use vLLM"
            )
        return settings


class TransformersReplica(RolloutReplica):  # type: ignore[misc]
    """The driver's side: starts the actor."""

    async def launch_servers(self) -> None:
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import HFModelConfig

        if self.world_size != 1:
            raise BackendError(
                f"replica {REPLICA!r} cannot be split over {self.world_size} workers; set every parallel size to 1"
            )
        server = (
            ray.remote(TransformersServer)
            .options(
                name=_actor_name(self.replica_rank, self.name_suffix), num_cpus=0, max_concurrency=self.max_concurrency
            )
            .remote(
                self.config, omega_conf_to_dataclass(self.model_config, dataclass_type=HFModelConfig), self.replica_rank
            )
        )
        self.servers = [server]
        self._server_handle = server
        self._server_address = await server.address.remote()


class TransformersAdapter(BaseRollout):  # type: ignore[misc]
    """The trainer worker's side: sends weights, wakes and puts to sleep."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        await self._server().wake_up.remote(tags)

    async def release(self) -> None:
        await self._server().sleep.remote()

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **_: Any
    ) -> None:
        if wire_format != "named_tensors":
            raise BackendError(
                f"replica {REPLICA!r} takes whole weights, not {wire_format!r}; choose another checkpoint engine"
            )
        named = [
            (name, weight.detach().to("cpu", torch.float32)) async for name, weight in ensure_async_iterator(weights)
        ]
        await self._server().update_weights.remote(named, global_steps)

    def _server(self) -> Any:
        return ray.get_actor(_actor_name(self.replica_rank))


def _actor_name(replica_rank: int, suffix: str = "") -> str:
    return f"{REPLICA}_server_{replica_rank}_0{suffix}"


def _end_tokens(model_config: Any) -> tuple[int, ...]:
    """Tokens that end a completion, as for vLLM: the tokenizer's and the generation config's end tokens."""
    ends = {model_config.tokenizer.eos_token_id}
    generation = getattr(model_config, "generation_config", None)
    configured = getattr(generation, "eos_token_id", None)
    ends.update(configured if isinstance(configured, list) else [configured])
    return tuple(sorted(end for end in ends if end is not None))


def _strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


async def _next_or_abort(stream: AsyncIterator[TokenChunk], aborted: asyncio.Future[Any]) -> TokenChunk | None:
    """The next chunk; None when the call was aborted first."""
    chunk = asyncio.ensure_future(anext(stream))
    await asyncio.wait({chunk, aborted}, return_when=asyncio.FIRST_COMPLETED)
    if chunk.done():
        return chunk.result()
    chunk.cancel()
    await asyncio.wait({chunk})
    return None
