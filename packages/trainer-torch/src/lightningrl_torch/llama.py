"""Llama-shaped models (Llama, Qwen2, Qwen3, with LoRA or without) computed in few wide operations, on transformers' own
weights.

transformers' forward passes are the reference: `tests/test_torch_llama.py` holds logits to within 1e-5 of theirs. For a
policy of a million parameters they spend most of a token's time between operations; and they cannot begin a prompt
where a remembered one ends.

Prompts are computed in one pass, and those of similar length are rows of one call of attention:

flat tokens of the pass     a a a a b b b c          projections: nothing is padded
call 0                      a a a a                  attention: padded on the right, where causal attention never looks
                            b b b ·
call 1                      c
call 2, after prefixes      [ p p · | d d d ]        keys: what stands before, then the new ones; a mask leaves
                            [ p p p | e e · ]        the padding out
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightningrl_torch.quantized import QuantizedLinear
from lightningrl_torch.slots import CAN_SHARE, KeyValues, SharedPrompt, SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["FAMILIES", "LARGE", "LlamaForward", "Write", "find_forward", "join_rows", "multiply", "plan_calls"]

Write = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Keeps a layer's keys and values of one token, each (rows, heads, 1, head_dim); returns all that there are."""
FAMILIES: Final = frozenset({"llama", "qwen2", "qwen3"})
LARGE: Final = 2**18
"""Numbers in a matrix that does not stay in a core's cache beside others."""
MOST_PACKED: Final = 2**31
"""Bytes of matrices beyond which a second copy of them, in the order in which oneDNN reads them, is no bargain."""
PACKED: Final[WeakValueDictionary[tuple[int, torch.Size], Tensor]] = WeakValueDictionary()
"""Frozen matrices in that order, by where they lie in memory: policies on one base read the same ones."""
PACKING: Final = threading.Lock()
ONE_DNN: Final = (
    torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)
LINEAR: Final = frozenset({nn.Linear, QuantizedLinear})
STATIC_ROTARY: Final = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose frequencies stay what they are, however long a text."""
LEAST: Final = {"cpu": 0.9, "cuda": 0.4}
"""Share of a call's pairs of tokens that must be no padding. A GPU waits for the host to start calls, a CPU for the
arithmetic."""
MOST_KEYS: Final = 2**17
"""Keys of a call, padding included."""


def join_rows(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor whose rows are theirs, one parameter after the other. They become views of it, so that it learns with
    them."""
    data = [parameter.data for parameter in parameters]
    first, ends = data[0], 0
    for part in data:
        if (
            part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
            or part.storage_offset() != first.storage_offset() + ends
        ):
            break
        ends += part.numel()
    else:
        return first.as_strided(
            (sum(len(part) for part in data), *first.shape[1:]), first.stride(), first.storage_offset()
        )
    joined = torch.cat(data)
    parts = joined.split([len(part) for part in data])  # type: ignore[no-untyped-call]
    for parameter, rows in zip(parameters, parts, strict=True):
        parameter.data = rows
    return joined


def takes_one_dnn(weight: Tensor) -> bool:
    """True for a large float32 matrix on a CPU that has oneDNN."""
    return weight.numel() >= LARGE and weight.dtype is torch.float32 and weight.device.type == "cpu" and ONE_DNN


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`. On a CPU that takes large float32 matrices to MKL, which repacks them for a few rows; oneDNN reads
    them as they lie, in half the time at eight rows."""
    if takes_one_dnn(weight):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def pack(weight: Tensor, *, frozen: bool) -> Tensor:
    """A matrix in the order in which oneDNN reads it; of a frozen one, the same for all who ask while one has it."""
    if not frozen:
        made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return made
    key = (weight.data_ptr(), weight.shape)
    with PACKING:
        packed = PACKED.get(key)
        if packed is None:
            packed = PACKED[key] = pack(weight, frozen=False)
        return packed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Adapter:
    """A low-rank addition to some of a projection's outputs."""

    columns: slice
    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Projection:
    """Linear maps of one input, side by side in one matrix."""

    weight: Tensor | None
    """None where it is quantised."""
    bias: Tensor | None
    adapters: tuple[_Adapter, ...]
    quantized: tuple[QuantizedLinear, ...] = ()
    packed: list[Tensor] = field(default_factory=list)
    """The weight once more, in the order in which oneDNN reads it; nothing = not made."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            y = torch.cat([part(x) for part in self.quantized], -1)
        else:
            x = x.to(self.weight.dtype)
            y = multiply(x, self.packed[0] if self.packed else self.weight, self.bias)
        for adapter in self.adapters:
            y[:, adapter.columns].addmm_(F.linear(x, adapter.down), adapter.up.t(), alpha=adapter.scale)
        return y


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Layer:
    before_attention: Tensor
    queries_keys_values: _Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: _Projection
    before_mlp: Tensor
    gate_up: _Projection
    down: _Projection


class LlamaForward:
    """Implements `Forward`. Weights are the model's own where they have `dtype`, else copies; see `refresh`."""

    packs = True

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """`model` has transformers' attributes: `config`, `model.layers` and so on."""
        config: Any = model.config
        trunk: Any = model.model
        self.layers = len(trunk.layers)
        self.vocabulary = len(trunk.embed_tokens.weight)
        self.device: torch.device = trunk.embed_tokens.weight.device
        # in bfloat16 the two parts, rounded each, would move logprobs by 0.03
        self.shares = CAN_SHARE and self.device.type == "cpu" and dtype is torch.float32
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._dtype = dtype
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._eps = float(config.rms_norm_eps)
        self._embeddings: Tensor = trunk.embed_tokens.weight.data
        self._norm: Tensor = trunk.norm.weight.data
        self._head = self._project([model.lm_head])
        self._layers = [self._read_layer(layer) for layer in trunk.layers]
        self._projections = [self._head]
        for layer in self._layers:
            self._projections += (layer.queries_keys_values, layer.output, layer.gate_up, layer.down)
        self._frequencies: Tensor = trunk.rotary_emb.inv_freq.float()
        self._rotary_scale = float(trunk.rotary_emb.attention_scaling)
        self._cosines = self._sines = self._embeddings.new_empty((0, self._head_dim))

    def refresh(self) -> None:
        """The weights have changed: bring copies up to date."""
        self.rest()
        for source, copied in self._copies:
            copied.copy_(source)

    def rest(self) -> None:
        """See `Forward`."""
        for projection in self._projections:
            projection.packed.clear()

    def _pack(self) -> None:
        """Several rows read a matrix in oneDNN's order in two thirds of the time; a single one reads it as it lies."""
        weights = [(one, one.weight) for one in self._projections if one.weight is not None]
        large = [(projection, weight) for projection, weight in weights if takes_one_dnn(weight)]
        if not large or large[0][0].packed or sum(weight.nbytes for _, weight in large) > MOST_PACKED:
            return
        frozen = any(projection.adapters for projection in self._projections)  # then nothing else learns
        for projection, weight in large:
            projection.packed.append(pack(weight, frozen=frozen))

    def decode(self, token_ids: Tensor, positions: Tensor, cache: SlotCache, allowed: Tensor | None) -> Tensor:
        """See `Forward`."""
        cosines, sines = self._rotation(positions, int(positions.max()) + 1)
        if len(token_ids) > 1:
            self._pack()

        def write(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return cache.layers[layer].update(keys, values)

        mask = None if allowed is None else allowed[:, None, None]
        if cache.shared is not None and mask is not None:  # its kernel adds a mask
            mask = torch.zeros_like(mask, dtype=self._dtype).masked_fill(~mask, -torch.inf)
        return self.step(token_ids, cosines, sines, write, mask, cache.shared)

    def step(
        self,
        token_ids: Tensor,
        cosines: Tensor,
        sines: Tensor,
        write: Write,
        mask: Tensor | None,
        shared: SharedPrompt | None = None,
    ) -> Tensor:
        """Logits (rows, vocabulary) after one token of each row. `mask` (rows, 1, 1, columns): what each may read; None
        = all that `write` returns. `shared`: what rows read before that."""
        rows = len(token_ids)
        x = self._embeddings[token_ids]
        for number, layer in enumerate(self._layers):
            queries, keys, values = self._attended(layer, x, cosines, sines)
            keys, values = write(number, keys[:, :, None], values[:, :, None])
            # a key's queries are few and in line with it: heads that share keys are queries of one attention
            grouped = queries.view(rows, self._kv_heads, -1, self._head_dim)
            if shared is None:
                mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            else:
                mixed = shared.attend(number, grouped, keys, values, mask)
            x = x + layer.output(mixed.reshape(rows, -1))
            x = x + self._mlp(layer, x)
        return self._head(F.rms_norm(x, x.shape[-1:], self._norm, self._eps))

    def prefill(self, sequences: Sequence[Sequence[int]], before: Sequence[KeyValues]) -> list[KeyValues]:
        """One pass over all tokens of all sequences, which only attention pads."""
        device = self._embeddings.device
        starts = [past[0].shape[2] if past else 0 for past in before]
        attention = _PromptAttention(
            [len(sequence) for sequence in sequences], [past[0] if past else None for past in before], device
        )
        order = attention.order
        flat = torch.tensor([token for number in order for token in sequences[number]], device=device)
        places = [range(starts[number], starts[number] + len(sequences[number])) for number in order]
        positions = torch.tensor([position for place in places for position in place], device=device)
        cosines, sines = self._rotation(positions, max(place.stop for place in places))
        states = self._embeddings.new_empty(
            (2 * self.layers, self._kv_heads, len(flat), self._head_dim), dtype=self._dtype
        )
        x = self._embeddings[flat]
        last = self._layers[-1]
        for number, layer in enumerate(self._layers):
            queries, keys, values = self._attended(layer, x, cosines, sines)
            states[2 * number], states[2 * number + 1] = keys.transpose(0, 1), values.transpose(0, 1)
            if layer is not last:  # of the last one nobody reads more than keys and values
                x = x + layer.output(attention.attend(number, queries, keys, values))
                x = x + self._mlp(layer, x)
        remembered: list[KeyValues] = [[] for _ in sequences]
        at = 0
        for number in order:
            new = states[:, :, at : (at := at + len(sequences[number]))]
            remembered[number] = [torch.cat((*before[number], new), 2)]
        return remembered

    def _attended(self, layer: _Layer, x: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of tokens, each (tokens, heads, head_dim), turned to their positions."""
        fused = layer.queries_keys_values(F.rms_norm(x, x.shape[-1:], layer.before_attention, self._eps))
        fused = fused.view(len(x), -1, self._head_dim)
        turning, values = fused[:, : self._heads + self._kv_heads], fused[:, self._heads + self._kv_heads :]
        if layer.query_norm is not None:
            heads = turning.split((self._heads, self._kv_heads), 1)  # type: ignore[no-untyped-call]
            parts = zip(heads, (layer.query_norm, layer.key_norm), strict=True)
            turning = torch.cat([F.rms_norm(part, part.shape[-1:], weight, self._eps) for part, weight in parts], 1)
        turned = torch.addcmul(turning * cosines, turning.roll(self._head_dim // 2, -1), sines).to(self._dtype)
        return turned[:, : self._heads], turned[:, self._heads :], values

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(F.rms_norm(x, x.shape[-1:], layer.before_mlp, self._eps)).chunk(2, -1)
        return layer.down(F.silu(gate) * up)

    def rotations(self, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (positions, head_dim) of at least `end` positions, from a table that grows; the sines of
        the first half are negative."""
        if end > len(self._cosines):
            angles = (
                torch.arange(max(end, 2 * len(self._cosines)), device=self._frequencies.device)[:, None]
                * self._frequencies
            )
            cosines, sines = angles.cos() * self._rotary_scale, angles.sin() * self._rotary_scale
            self._cosines = torch.cat((cosines, cosines), -1).to(self._embeddings.dtype)
            self._sines = torch.cat((-sines, sines), -1).to(self._embeddings.dtype)
        return self._cosines, self._sines

    def _rotation(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of tokens, each (tokens, 1, head_dim)."""
        cosines, sines = self.rotations(end)
        return cosines[positions][:, None], sines[positions][:, None]

    def _read_layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [
            getattr(attention, name).weight.data if hasattr(attention, name) else None for name in ("q_norm", "k_norm")
        ]
        return _Layer(
            before_attention=layer.input_layernorm.weight.data,
            queries_keys_values=self._project([attention.q_proj, attention.k_proj, attention.v_proj]),
            query_norm=norms[0],
            key_norm=norms[1],
            output=self._project([attention.o_proj]),
            before_mlp=layer.post_attention_layernorm.weight.data,
            gate_up=self._project([mlp.gate_proj, mlp.up_proj]),
            down=self._project([mlp.down_proj]),
        )

    def _project(self, modules: Sequence[Any]) -> _Projection:
        linears = [getattr(module, "base_layer", module) for module in modules]
        biases = [linear.bias for linear in linears]
        adapters, start = [], 0
        for module, linear in zip(modules, linears, strict=True):
            columns = slice(start, start := start + _outputs(linear))
            for name in getattr(module, "active_adapters", ()):
                down, up = (self._converted(one[name].weight.data) for one in (module.lora_A, module.lora_B))
                adapters.append(_Adapter(columns=columns, down=down, up=up, scale=float(module.scaling[name])))
        if isinstance(linears[0], QuantizedLinear):
            return _Projection(weight=None, bias=None, adapters=tuple(adapters), quantized=tuple(linears))
        return _Projection(
            weight=self._converted(join_rows([linear.weight for linear in linears])),
            bias=None if biases[0] is None else self._converted(join_rows(biases)),
            adapters=tuple(adapters),
        )

    def _converted(self, weight: Tensor) -> Tensor:
        if weight.dtype is self._dtype:
            return weight
        copied = weight.to(self._dtype)
        self._copies.append((weight, copied))
        return copied


def find_forward(model: PreTrainedModel, *, autocast: bool) -> LlamaForward | None:
    """None for a model that it does not know: transformers computes that."""
    config: Any = model.config
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    is_known = (
        config.model_type in FAMILIES
        and type(model).__name__ == f"{config.model_type.capitalize()}ForCausalLM"
        and config.hidden_act == "silu"
        and rotary in STATIC_ROTARY
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
        and all(_is_plain(module) for module in _linears(model))
        and type(model.model.embed_tokens) is nn.Embedding  # one with adapters is more than its weight
    )
    return LlamaForward(model, torch.bfloat16 if autocast else model.dtype) if is_known else None


def _linears(model: PreTrainedModel) -> Iterator[Any]:
    trunk: Any = model.model
    yield model.lm_head
    for layer in trunk.layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield from (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
        )


def _outputs(linear: Any) -> int:
    """Number of a linear map's outputs; to ask a quantised one's weight would be to make it."""
    return linear.out_features if isinstance(linear, QuantizedLinear) else len(linear.weight)


def _is_plain(module: Any) -> bool:
    """A linear map, or one with plain low-rank adapters, whose weights can be read as they are."""
    if type(module) in LINEAR:
        return True
    if type(getattr(module, "base_layer", None)) not in LINEAR or not hasattr(module, "lora_A"):
        return False
    is_special = module.merged or module.disable_adapters or any(getattr(module, "use_dora", {}).values())
    return not is_special and not any(getattr(module, "lora_bias", {}).values())


def plan_calls(new: Sequence[int], past: Sequence[int], least: float) -> list[list[int]]:
    """Numbers of the sequences of each call, such that at least the share `least` of its pairs of a token with a token
    that it may read is no padding.

    new, past    tokens of each sequence that are computed, and that stand before them
    """
    calls: list[list[int]] = []
    widest_new = widest_past = pairs = 0
    for number in sorted(
        range(len(new)), key=lambda number: (past[number] > 0, new[number], past[number]), reverse=True
    ):
        own = new[number] * (past[number] + new[number])
        if calls:
            longest = max(widest_past, past[number])
            keys = (len(calls[-1]) + 1) * (longest + widest_new)
            alike = (past[number] > 0) == (widest_past > 0)
            if alike and keys <= MOST_KEYS and pairs + own >= least * widest_new * keys:
                calls[-1].append(number)
                widest_past, pairs = longest, pairs + own
                continue
        calls.append([number])
        widest_new, widest_past, pairs = new[number], past[number], own
    return calls


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Call:
    """Rows of one attention, as places in the flat tokens of the pass."""

    tokens: slice
    rows: int
    queries: Tensor | None
    """(rows, new) places among the call's tokens; None = they stand there as they are asked for."""
    keys: Tensor | None
    """(rows, past + new) places among all past tokens and the call's; None = the queries'."""
    mask: Tensor | None
    """(rows, 1, new, past + new); None = causal."""
    unpadded: Tensor | None
    """Places of the call's tokens among its padded rows; None = there is no padding."""


class _PromptAttention:
    """The attention of one pass, planned once for all layers. `order` says in which order the sequences' tokens stand
    in the pass."""

    def __init__(self, lengths: Sequence[int], before: Sequence[Tensor | None], device: torch.device) -> None:
        """`before[n]` (states, heads, tokens, head_dim): what sequence n goes on from."""
        past = [0 if states is None else states.shape[2] for states in before]
        plan = plan_calls(lengths, past, LEAST.get(device.type, LEAST["cuda"]))
        self.order = [number for numbers in plan for number in numbers]
        self._device = device
        self._past, starts = _distinct(before)
        self._past_tokens = sum(states.shape[2] for states in self._past)
        self._calls: list[_Call] = []
        at = 0
        for numbers in plan:
            tokens = slice(at, at := at + sum(lengths[number] for number in numbers))
            new, old = ([counts[number] for number in numbers] for counts in (lengths, past))
            self._calls.append(self._plan_call(tokens, new, old, [starts[number] for number in numbers]))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """All tokens of the pass, each (tokens, heads, head_dim), on what they may read: (tokens, heads · head_dim)."""
        # a layer's at a time: all layers' together are as large as the remembered prompts
        past = (
            torch.cat([states[2 * layer : 2 * layer + 2] for states in self._past], 2).transpose(1, 2)
            if self._past
            else None
        )
        mixed = [_attend(call, past, queries, keys, values) for call in self._calls]
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _plan_call(self, tokens: slice, new: Sequence[int], past: Sequence[int], starts: Sequence[int]) -> _Call:
        widest, most_past = max(new), max(past)
        lengths, olds = torch.tensor(new), torch.tensor(past)
        columns = torch.arange(widest)
        here = columns < lengths[:, None]
        queries = unpadded = keys = mask = None
        if min(new) < widest:
            queries = torch.where(here, (lengths.cumsum(0) - lengths)[:, None] + columns, 0)
            unpadded = here.flatten().nonzero()[:, 0]
        if most_past:
            before = torch.arange(most_past)
            is_past = before < olds[:, None]
            old_keys = torch.where(is_past, torch.tensor(starts)[:, None] + before, 0)
            new_keys = queries if queries is not None else torch.arange(sum(new)).view(len(new), widest)
            keys = torch.cat((old_keys, new_keys + self._past_tokens), 1)
            causal = columns <= columns[:, None]
            mask = torch.cat((is_past[:, None].expand(-1, widest, -1), causal.expand(len(new), -1, -1)), 2)[:, None]
        moved = [None if one is None else one.to(self._device) for one in (queries, keys, mask, unpadded)]
        return _Call(tokens=tokens, rows=len(new), queries=moved[0], keys=moved[1], mask=moved[2], unpadded=moved[3])


def _attend(call: _Call, past: Tensor | None, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """`past` (2, tokens, heads, head_dim): keys and values that calls with a mask read, too."""
    q, k, v = (states[call.tokens] for states in (queries, keys, values))
    if call.mask is not None:
        assert past is not None
        k, v = (torch.cat((old, new)) for old, new in zip(past, (k, v), strict=True))
    q = _rows(q, call.queries, call.rows)
    k, v = (_rows(states, call.queries if call.keys is None else call.keys, call.rows) for states in (k, v))
    mixed = _attend_causally(q, k, v) if call.mask is None else _attend_masked(q, k, v, call.mask)
    flat = mixed.transpose(1, 2).reshape(call.rows * q.shape[2], -1)
    return flat if call.unpadded is None else flat[call.unpadded]


def _distinct(before: Sequence[Tensor | None]) -> tuple[list[Tensor], list[int]]:
    """States before any sequence, (states, heads, tokens, head_dim), each once, and where each sequence's
    begins when they are joined. Views that begin at the same place are beginnings of one prompt."""
    longest: dict[int, Tensor] = {}
    for states in before:
        if states is not None:
            place = states.data_ptr()
            if place not in longest or longest[place].shape[2] < states.shape[2]:
                longest[place] = states
    starts, at = {}, 0
    for place, states in longest.items():
        starts[place] = at
        at += states.shape[2]
    return list(longest.values()), [0 if states is None else starts[states.data_ptr()] for states in before]


def _rows(states: Tensor, places: Tensor | None, rows: int) -> Tensor:
    """(tokens, heads, size) as (rows, heads, columns, size)."""
    stacked = states.view(rows, -1, *states.shape[1:]) if places is None else states[places]
    return stacked.transpose(1, 2)


def _attend_causally(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    groups = queries.shape[1] // keys.shape[1]
    if groups > 1 and queries.device.type == "cuda":
        # the kernels that keep no matrix of scores take heads that share keys in bfloat16 alone
        keys, values = (states.repeat_interleave(groups, 1) for states in (keys, values))
        groups = 1
    return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=groups > 1)


def _attend_masked(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Heads that share keys are queries of one attention."""
    rows, heads, columns, size = queries.shape
    shared = keys.shape[1]
    groups = heads // shared
    grouped = queries.reshape(rows, shared, groups * columns, size)
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask.repeat(1, 1, groups, 1))
    return mixed.view(rows, heads, columns, size)
