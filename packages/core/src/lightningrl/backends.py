"""Trainer backends: an engine that serves a policy, the learner beside it, and what either can tell of itself.

GenerateRequest ─► Engine ─► TokenChunk …           Sample … ─► Backend.learn ─► LearnReport
Continuation … ─► TokenScorer, Valuer ─► numbers    Speed ◄─ SpeedMeter, MemoryPlan
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from lightningrl.types import Array, FinishReason, IntArray, Sample, SamplingSettings

__all__ = [
    "Backend",
    "Capabilities",
    "Continuation",
    "Describer",
    "Engine",
    "EngineInfo",
    "GenerateRequest",
    "LearnReport",
    "MemoryPlan",
    "Returner",
    "Speed",
    "SpeedMeter",
    "TokenChunk",
    "TokenScorer",
    "Valuer",
]

KEPT_LOGITS, PART_LOGITS = 2**28, 2**26
"""Bytes of logits that stay for the gradient, at most, and of those that are computed at a time."""
SLOT_ROWS, SLOT_COLUMNS = 8, 64
"""Rows and columns by which an engine's memory of running calls grows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """Question to an engine: prompt ids in."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingSettings
    session: str = ""
    """Calls of one session (an attempt) grow from each other; an engine of several replicas may send them to one,
    for its prefix cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """Some next tokens of a completion. The last chunk of a request, and only that one, has a `finish_reason`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log π(token) of the *sampling* distribution's untruncated softmax at the request's temperature, float32; one per
    token. At temperature 0 the logprob at temperature 1. 0.0 for a token that a grammar left no other."""
    policy_version: int
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            counts = f"{len(self.token_ids)} tokens but {len(self.logprobs)} logprobs"
            raise ValueError(f"token chunk: {counts}; an engine must return one each")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """Model that an engine serves."""

    policy: str
    version: int
    context_length: int
    """Most tokens of prompt and completion together."""
    grammars: bool = False
    """Samples within `SamplingSettings.grammar`."""


@runtime_checkable
class Engine(Protocol):
    """Serves one policy: prompt ids in, completion ids + logprobs out."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Yield the completion as it is sampled. Closing the iterator early frees the request's place.

        Raises ContextOverflow when the prompt leaves no room for one token.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """Abilities that a trainer backend declares."""

    losses: frozenset[str]
    """Values that `learner.loss` may have."""
    devices: frozenset[str]
    """Values that `learner.device` may have, beside `auto`."""
    lora: bool
    """Takes a table `learner.lora`."""
    reference_kl: bool
    """Takes `learner.kl_coef`, the weight of a KL to the starting policy."""
    own_losses: bool = False
    """`learner.loss` may be the user's own, `"file.py:loss"`."""
    critic: bool = False
    """Can turn a call's reward into token advantages with a learned critic (PPO)."""
    several_policies: bool = False
    """A run may have several of it, one for each policy."""
    services: frozenset[str] = frozenset()
    """Services that evidence may ask for: `logprobs` (it is a `TokenScorer`), `values` (with a critic it is a
    `Valuer`)."""

    def __str__(self) -> str:
        can = {"own losses": self.own_losses, "LoRA": self.lora, "reference KL": self.reference_kl}
        can |= {"critic": self.critic, "several policies": self.several_policies}
        able = [name for name, is_able in can.items() if is_able]
        return ", ".join([*sorted(self.devices), *sorted(self.losses), *able, *sorted(self.services)])


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnReport:
    """Report of one optimisation step."""

    policy_version: int
    """Version of the weights after the step."""
    tokens: int
    """Trained (mask) tokens."""
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """`loss`, `kl_rollout` (mean log-ratio k3 estimate), `clip_fraction`, `grad_norm`, `entropy`, `lr` …"""
    notes: tuple[str, ...] = ()
    """Sentences for whoever watches the run."""


class Backend(Protocol):
    """Owns engine and optimiser; knows nothing of tasks, rewards or credit."""

    @property
    def serves_while_learning(self) -> bool:
        """True where the engine answers calls while `learn` runs, each by one version; else the caller holds them
        until it is over."""
        ...

    @property
    def engine(self) -> Engine:
        """The engine that serves the policy's current weights."""
        ...

    def learn(self, samples: Iterable[Sample]) -> LearnReport:
        """Take one optimisation step (all minibatches and epochs of it). Blocking; run it in a thread. The engine
        serves the new version afterwards.

        Rows without any advantage are among `samples`: leave them out
        (`lightningrl.advantages.teaching_rows`) where the loss has no other term, and where none is left
        make no step: the version stays."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimiser, schedule and RNG; complete when it returns (written beside, then renamed)."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote; learning continues as if it had never stopped."""
        ...

    def export(self, folder: Path, *, dtype: str | None = None, adapter: bool = False) -> None:
        """Write an ordinary transformers folder that `AutoModelForCausalLM` loads (LoRA merged): the policy that
        `engine` serves. `dtype`: `float32`, `bfloat16` or `float16`; None = the policy's own. `adapter`: write what
        LoRA learned alone, a folder that `peft` loads. Raises BackendError for what it cannot write."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Describer(Protocol):
    """A backend that says what learns, before the first step."""

    def describe(self) -> str:
        """In a line: parameters, which of them learn, at what rate, in which numbers, where."""
        ...


@runtime_checkable
class Returner(Protocol):
    """A backend whose policy can go back to saved weights while a run goes on."""

    def go_back(self, folder: Path, *, slower: float) -> float:
        """Restore the weights and the optimiser that `save` wrote, as a new version, and learn on at `slower` times the
        present rate. Returns that rate."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Speed that a backend measured before the first call, in tokens a second."""

    parameters: int
    trained: int
    """Number of those that learn; adapters alone where a policy learns by adapters."""
    read: float
    """Tokens of prompts."""
    sampled: float
    """Tokens of all calls together, `calls` at once."""
    calls: int
    learned: float
    """In rows of a step, prompts included."""
    read_cpu: float | None = None
    """Tokens of prompts in a second of CPU time of all cores together, which a busy machine gives as an idle one
    does; so the next two. None = the backend does not say."""
    sampled_cpu: float | None = None
    learned_cpu: float | None = None
    weight_bytes: int | None = None
    """Memory of the weights. None = 4 bytes for each parameter."""
    moment_bytes: float = 8.0
    """Memory of the optimiser for each parameter that learns."""


@runtime_checkable
class SpeedMeter(Protocol):
    """A backend that knows how fast it is, so that the run can say what a step will take."""

    def measure(self) -> Speed | None:
        """Blocking, before anything is asked of it; nothing is learned. None = fast enough that nobody waits for it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Bytes that a policy takes, by what for."""

    parameters: int
    trained: int
    """Parameters that learn: adapters alone where a policy learns by adapters."""
    weights: int
    """In the engine's and the learner's shared form, adapters included."""
    gradient: int
    optimizer: int
    """AdamW's two moments of all that learns, in 32 bits or in 8."""
    copies: int
    """Weights that stand twice: the engine's own in other numbers or while the learner learns, a reference's, a
    critic's, and what several updates a step go back to."""
    token: int
    """Bytes that a token of a microbatch keeps for the gradient."""
    microbatch: int
    """Most tokens of a microbatch."""
    vocabulary: int
    key_values: int
    """Bytes of a token's keys and values in all layers."""
    remembered: int
    """Most prompt tokens that the engine remembers."""
    max_batch: int
    """Most calls that are decoded together."""
    packed: int = 0
    """Weights that stand a second time while several calls are decoded, in the order in which a CPU reads them."""
    base: str | None = None
    """Equal for policies of one process whose adapters stand on the same frozen weights; None = all weights
    learn."""
    shared: int = 0
    """Bytes of `weights` that are there once for all policies of one `base`."""
    on_gpu: bool = False

    @property
    def states(self) -> int:
        """Bytes that are there from the second step on, whatever is computed."""
        return self.weights + self.gradient + self.optimizer + self.copies

    def activations(self, tokens: float = math.inf) -> int:
        """Bytes that a step of so many different tokens keeps at a time."""
        return int(min(tokens, self.microbatch)) * self.token

    def logits(self, tokens: float = math.inf) -> int:
        """Bytes of the words' numbers for so many trained tokens."""
        return int(min(4 * self.vocabulary * min(tokens, self.microbatch), KEPT_LOGITS)) + PART_LOGITS

    def caches(self, calls: int, longest: int, prompts: int) -> int:
        """Bytes of keys and values while `calls` are decoded together: of running calls, the longest of `longest`
        tokens; of their prompts when they join; and of `prompts` tokens that are remembered."""
        rows = min(calls, self.max_batch)
        columns = SLOT_COLUMNS * math.ceil((longest + 1 + longest // 2) / SLOT_COLUMNS)
        running = SLOT_ROWS * math.ceil(rows / SLOT_ROWS) * columns
        return (running + rows * longest + min(prompts, self.remembered)) * self.key_values


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Continuation:
    """Tokens after a context, which is not empty."""

    context: IntArray
    tokens: IntArray
    temperature: float = 1.0
    """Temperature of the softmax that logprobs are taken from."""


@runtime_checkable
class TokenScorer(Protocol):
    """A backend that tells how likely tokens are, beside serving and learning. Blocking; call it in a thread."""

    def logprobs(self, continuations: Sequence[Continuation], *, reference: bool = False) -> Sequence[Array]:
        """For each its tokens' logprobs, of the weights of now; `reference`: of those that it started from. Raises
        BackendError where it keeps no reference, or tokens are not the policy's."""
        ...


@runtime_checkable
class Valuer(Protocol):
    """A backend with a critic. Blocking; call it in a thread."""

    def values(self, continuations: Sequence[Continuation]) -> Sequence[Array]:
        """For each the value after its context and after each of its tokens, one more than tokens. Raises
        BackendError where there is no critic, or tokens are not the policy's."""
        ...
