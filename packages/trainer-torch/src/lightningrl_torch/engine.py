"""The engine: serves one policy with continuous batching, prompt ids in, completion ids and logprobs out.

    asyncio loops ─submit─► waiting ─prefill─► rows of one key/value memory ─forward a token─► chunks ─► asyncio loops
                                                     join and leave at any token

One thread decodes. Weights may be changed only inside `engine.held()`, which waits until no request is running and
keeps new ones waiting, so that a call never mixes versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch

from lightningrl.backends import EngineInfo, GenerateRequest, TokenChunk
from lightningrl.errors import BackendError, ContextOverflow, EngineUnavailable, GrammarError
from lightningrl_torch.decoder import Decoder
from lightningrl_torch.grammars import Grammars, GrammarState
from lightningrl_torch.models import check_rotation
from lightningrl_torch.requests import Running, TextOf
from lightningrl_torch.settings import EngineSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightningrl_torch.forward import Forward

__all__ = ["Batch", "TorchEngine"]

logger = logging.getLogger(__name__)

_REMEMBERED = 50_000
"""Prompts whose number of requests is remembered. Beyond it, a prompt that an attempt sends again may get its first
seed again."""


@runtime_checkable
class Batch(Protocol):
    """Requests that are decoded together. Its methods are the engine's thread's, or of whoever holds the engine; what
    `step` raises fails the requests that `evict` returns."""

    @property
    def rows(self) -> int:
        """Number of requests in it."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        ...

    def check(self, request: GenerateRequest) -> None:
        """Raise BackendError for what it cannot sample. In any thread."""
        ...

    def join(self, joining: Sequence[Running]) -> None:
        """Take requests in."""
        ...

    def step(self, version: int) -> None:
        """Sample a next token for them, and deliver chunks that are due."""
        ...

    def drop(self, gone: Collection[Running]) -> None:
        """Free the places of those among `gone`."""
        ...

    def evict(self) -> list[Running]:
        """Free all places and return who had them."""
        ...

    def forget(self) -> None:
        """Drop what is remembered of weights that have changed."""
        ...

    def close(self) -> None:
        """Give back its memory."""
        ...


class TorchEngine:
    """Implements `lightningrl.backends.Engine` on a transformers causal language model, or on a `Batch` of one's own.

    `stop_token_ids` end every completion, beside those of the request. `text_of` turns token ids into text for stop
    strings. `tokenizer` gives the text of its `tokenizer.json`, by which answers are bound to grammars; None = they
    are not.
    """

    def __init__(
        self,
        model: PreTrainedModel | Forward | Batch,
        *,
        policy: str,
        context_length: int,
        stop_token_ids: Sequence[int] = (),
        text_of: TextOf | None = None,
        tokenizer: Callable[[], str] | None = None,
        version: int = 0,
        seed: int = 0,
        settings: EngineSettings | None = None,
    ) -> None:
        if (config := getattr(model, "config", None)) is not None and hasattr(config, "get_text_config"):
            check_rotation(config, policy, context_length)
        self._info = EngineInfo(
            policy=policy, version=version, context_length=context_length, grammars=tokenizer is not None
        )
        self._settings = settings or EngineSettings()
        self._decoder: Batch = (
            model if isinstance(model, Batch) else Decoder(model, policy=policy, settings=self._settings)
        )
        self._grammars = None if tokenizer is None else Grammars(tokenizer, self._decoder.vocabulary)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._text_of = text_of
        self._seeds = _RequestSeeds(seed)
        self._waiting: deque[Running] = deque()
        self._cancelled: set[Running] = set()
        self._changed = threading.Condition()
        self._holds = 0
        self._idle = True
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name=f"engine-{policy}", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        return self._info

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield the completion as it is sampled. Closing the iterator early frees the request's place."""
        running = self._admit(request, await self._begin_grammar(request) if request.sampling.grammar else None)
        try:
            while True:
                item = await running.chunks.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._cancel(running)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait until no request is running; new ones wait until the block ends. Blocking: not for an event loop's
        thread."""
        with self._changed:
            self._holds += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._idle or self._closed)
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def rest(self) -> None:
        """Give back what decoding keeps from one request to the next: keys and values, remembered prompts. Only inside
        `held()`."""
        self._decoder.evict()

    def set_model(self, model: PreTrainedModel) -> None:
        """Serve this model from now on, which is of the same policy and version. Only inside `held()`."""
        self._decoder.close()
        self._decoder = Decoder(model, policy=self._info.policy, settings=self._settings)

    def set_version(self, version: int) -> None:
        """Say that the weights are now of `version`. Only inside `held()`."""
        if not self._holds:
            raise BackendError(
                f"policy version {version} was set while requests may run; set it inside `with engine.held():`"
            )
        self._decoder.forget()
        self._info = replace(self._info, version=version)

    def random_state(self) -> list[object]:
        """State of the generator that seeds requests without a seed and without a session (JSON)."""
        return self._seeds.random_state()

    def set_random_state(self, state: list[object]) -> None:
        """Go on from what `random_state` returned."""
        self._seeds.set_random_state(state)

    def close(self) -> None:
        """Stop the thread; running requests fail with EngineUnavailable."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._decoder.close()

    async def _begin_grammar(self, request: GenerateRequest) -> GrammarState:
        if self._grammars is None:
            raise GrammarError(f"request {request.id!r} has a grammar, and this engine keeps to none; leave it out")
        stops = self._stop_token_ids.union(request.sampling.stop_token_ids)
        return await asyncio.to_thread(self._grammars.begin, request.sampling.grammar, tuple(stops))

    def _admit(self, request: GenerateRequest, grammar: GrammarState | None) -> Running:
        length, limit = len(request.prompt_ids), self._info.context_length
        if length >= limit:
            raise ContextOverflow(
                f"request {request.id!r}: a prompt of {length} tokens leaves no room in a context of {limit}; "
                "shorten the prompt"
            )
        if not length:
            raise BackendError(f"request {request.id!r} has no prompt tokens; send at least one")
        if request.sampling.max_tokens < 1:
            raise BackendError(
                f"request {request.id!r} asks for max_tokens={request.sampling.max_tokens}; ask for at least 1"
            )
        vocabulary = self._decoder.vocabulary
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocabulary:
            raise BackendError(
                f"request {request.id!r} has token ids outside 0..{vocabulary - 1}; use the tokenizer of policy "
                f"{self._info.policy!r}"
            )
        if request.sampling.stop and self._text_of is None:
            raise BackendError(
                f"request {request.id!r} has stop strings, but the engine has no tokenizer; send stop_token_ids"
            )
        self._decoder.check(request)
        running = Running(
            request,
            limit=min(request.sampling.max_tokens, limit - length),
            stop_token_ids=self._stop_token_ids.union(request.sampling.stop_token_ids),
            text_of=self._text_of,
            loop=asyncio.get_running_loop(),
            grammar=grammar,
        )
        with self._changed:
            if self._closed:
                raise EngineUnavailable(
                    f"the engine of policy {self._info.policy!r} is closed; request {request.id!r} was not served"
                )
            seed = request.sampling.seed
            running.seed = self._seeds.draw(request) if seed is None else seed & (2**64 - 1)
            self._waiting.append(running)
            self._changed.notify_all()
        return running

    def _cancel(self, running: Running) -> None:
        with self._changed:
            if not running.finished:
                self._cancelled.add(running)
                self._changed.notify_all()

    def _serve(self) -> None:
        """The decoding thread: admit, decode one token for every row, deliver; until closed."""
        if self._settings.threads is not None:
            torch.set_num_threads(self._settings.threads)
        with torch.inference_mode():
            while self._wait():
                try:
                    self._drop_cancelled()
                    joining = self._take()
                    if joining:
                        self._decoder.join(joining)
                    self._decoder.step(self._info.version)
                except Exception as error:
                    # whatever the model raises fails the requests it served; the engine serves the next ones
                    logger.exception("engine of policy %s failed in mid-decode", self._info.policy)
                    self._fail(
                        BackendError(f"the engine of policy {self._info.policy!r} failed: {_describe(error)}"),
                        self._decoder.evict(),
                    )
        self._fail(
            EngineUnavailable(
                f"the engine of policy {self._info.policy!r} was closed while the request ran; send it again"
            ),
            [*self._decoder.evict(), *self._waiting],
        )

    def _wait(self) -> bool:
        """Sleep until there is something to do; False once closed."""
        with self._changed:
            while not self._closed:
                if self._cancelled or self._decoder.rows or (self._waiting and not self._holds):
                    self._idle = False
                    return True
                self._idle = True
                self._changed.notify_all()
                self._changed.wait()
            self._idle = True
            self._changed.notify_all()
            return False

    def _take(self) -> list[Running]:
        with self._changed:
            free = 0 if self._holds else self._settings.max_batch - self._decoder.rows
            return [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]

    def _drop_cancelled(self) -> None:
        with self._changed:
            if not self._cancelled:
                return
            gone, self._cancelled = self._cancelled, set()
            self._waiting = deque(running for running in self._waiting if running not in gone)
        self._decoder.drop(gone)

    def _fail(self, error: Exception, requests: Sequence[Running]) -> None:
        for running in requests:
            running.fail(error)


def _describe(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


class _RequestSeeds:
    """Seeds of the requests that bring none: one seed of a run gives one seed to each call of a rollout, whichever call
    comes first. Not thread-safe."""

    def __init__(self, seed: int) -> None:
        self._key = blake2b(str(seed).encode(), digest_size=32).digest()
        self._random = random.Random(seed)  # noqa: S311 - sampling, not secrets
        self._asked: OrderedDict[bytes, int] = OrderedDict()

    def draw(self, request: GenerateRequest) -> int:
        """64 bits: of the run's seed, the session, the prompt, and how often the session has sent that prompt. Without
        a session, the generator's next."""
        if not request.session:
            return self._random.getrandbits(64)
        place = blake2b(request.session.encode(), digest_size=16, key=self._key)
        place.update(np.asarray(request.prompt_ids, np.int64).tobytes())
        asked = self._asked.pop(place.digest(), 0)
        self._asked[place.digest()] = asked + 1
        if len(self._asked) > _REMEMBERED:
            self._asked.popitem(last=False)
        place.update(asked.to_bytes(8, "little"))
        return int.from_bytes(place.digest()[:8], "little")

    def random_state(self) -> list[object]:
        version, internal, gauss = self._random.getstate()
        return [version, list(internal), gauss]

    def set_random_state(self, state: list[object]) -> None:
        version, internal, gauss = state
        self._random.setstate((version, tuple(internal), gauss))  # type: ignore[arg-type]
