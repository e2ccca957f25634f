"""Grammars that bound answers: compiled once by llguidance; for each request the tokens that may come next.

grammar (Lark) ─► Grammars.begin ─► GrammarState ─┬─ fill      the tokens that may come, beside the forward pass
                                                  └─ advance   the token that came
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from lightningrl.errors import GrammarError
from lightningrl_torch.sampling import AllowedTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["GrammarState", "Grammars", "MaskThread"]

_MOST_GRAMMARS: Final = 64
"""Compiled grammars that are kept; one of a JSON schema takes some hundred kilobytes."""
_MOST_VOCABULARIES: Final = 4
"""Sets of stop tokens that are kept; a trie of 50,000 tokens takes a quarter of a second and 10 MB."""
_QUOTE = re.compile(r"^\s*\d+ \| ")
"""A line of the grammar in the library's message."""


class GrammarState:
    """The place in its grammar of one request. Belongs to one thread at a time."""

    __slots__ = ("_ahead", "_matcher", "_stops", "error")

    def __init__(self, matcher: LLMatcher, stop_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._stops = list(stop_token_ids)
        self._ahead: deque[int] = deque()
        """Tokens of text that the grammar leaves no choice of, as the tokenizer would write it."""
        self.error: str | None = None
        """The reason why nothing can come; None = something can."""

    def fill(self, words: NDArray[np.int32]) -> None:
        """Write which tokens may come next, a bit each. Where none may, that is an `error`, and all are allowed."""
        if not self._ahead:
            self._ahead.extend(self._matcher.compute_ff_tokens())
        if self._ahead:
            words[:] = 0
            words.view(np.uint8)[self._ahead[0] >> 3] = 1 << (self._ahead[0] & 7)
        else:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)  # without the GIL
        if self._matcher.is_error() or not words.any():
            self.error = _first_line(self._matcher.get_error()) or "no token may come next"
            words[:] = -1

    def is_free(self, tokens: NDArray[np.bool_]) -> bool:
        """True where the allowed tokens (vocabulary,) are a choice; between tokens that all end the answer is none."""
        ends = int(tokens[self._stops].sum())
        return int(tokens.sum()) - ends + min(ends, 1) > 1

    def advance(self, token_id: int) -> None:
        """Take the token that came."""
        if self._ahead:
            self._ahead.popleft()
        if token_id not in self._stops and not self._matcher.consume_token(token_id):
            self.error = _first_line(self._matcher.get_error()) or f"token {token_id} does not fit"


class Grammars:
    """Compiles the grammars of one policy's answers. Any thread may call it."""

    def __init__(self, tokenizer: Callable[[], str], vocabulary: int) -> None:
        """`tokenizer`: text of its `tokenizer.json`; `vocabulary`: logits of a row."""
        self._read = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizers: OrderedDict[tuple[int, ...], LLTokenizer] = OrderedDict()
        self._matchers: OrderedDict[tuple[str, tuple[int, ...]], LLMatcher] = OrderedDict()

    def begin(self, grammar: str, stop_token_ids: Sequence[int]) -> GrammarState:
        """The state before the first token of an answer that one of `stop_token_ids` ends. Blocking: a new schema
        takes milliseconds, the first one of a policy as long as its vocabulary. Raises GrammarError."""
        stops = tuple(sorted(stop_token_ids))
        with self._lock:  # the choices of a call come at once: one compiles, the others copy
            matcher = _recent(self._matchers, (grammar, stops), lambda: self._compile(grammar, stops), _MOST_GRAMMARS)
            return GrammarState(matcher.deep_copy(), stops)

    def _compile(self, grammar: str, stops: tuple[int, ...]) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        if not stops:
            raise GrammarError("the answer cannot be bound to a format: the policy has no token that ends it")
        tokenizer = _recent(self._tokenizers, stops, lambda: self._vocabulary_of(stops), _MOST_VOCABULARIES)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise GrammarError(
                f"the answer cannot be bound to its JSON schema: {_reason(matcher.get_error())}; leave that out of "
                "the schema, or set learner.structured_output = false, which only shows the schema to the policy"
            )
        return matcher

    def _vocabulary_of(self, stops: tuple[int, ...]) -> LLTokenizer:
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(self._read(), n_vocab=self._vocabulary, eos_token=list(stops))
        except Exception as error:  # the library's, of any kind
            raise GrammarError(
                f"the answer cannot be bound to a format: llguidance cannot read the policy's tokenizer "
                f"({_first_line(str(error))}); set learner.structured_output = false"
            ) from error


class MaskThread:
    """Computes the allowed tokens of a batch's bound rows while the forward pass runs."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, rows: Sequence[int], states: Sequence[GrammarState]) -> Future[AllowedTokens]:
        """Start on the states of `rows`, which nobody else touches until the result is there."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "grammar-masks")
        return self._pool.submit(self._compute, rows, states)

    def close(self) -> None:
        """Stop the thread, if there is one."""
        if self._pool is not None:
            self._pool.shutdown()

    def _compute(self, rows: Sequence[int], states: Sequence[GrammarState]) -> AllowedTokens:
        words = np.zeros((len(rows), -(-self._vocabulary // 32)), np.int32)
        for state, line in zip(states, words, strict=True):
            state.fill(line)
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocabulary, bitorder="little")
        tokens = bits.view(np.bool_)
        free = [state.is_free(line) for state, line in zip(states, tokens, strict=True)]
        return AllowedTokens(rows=np.asarray(rows, np.int64), tokens=tokens, free=np.asarray(free, np.bool_))


def _recent(entries: OrderedDict[Any, Any], key: Any, make: Callable[[], Any], most: int) -> Any:
    """Return the entry of a key, made where there is none; the `most` recent ones stay."""
    if key not in entries:
        entries[key] = make()
    entries.move_to_end(key)
    if len(entries) > most:
        entries.popitem(last=False)
    return entries[key]


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _reason(message: str) -> str:
    """The library's complaint in a line: `it has "not", which is not supported`."""
    message = message.split("failed to compile JSON schema: ", 1)[-1]
    if keys := re.match(r"Unimplemented keys: \[(.*)\]", message):
        return f"it has {keys[1]}, which sampling cannot keep to"
    lines = (line.strip() for line in message.split("\n") if not _QUOTE.match(line))
    return " ".join(line for line in lines if line.strip("^"))
