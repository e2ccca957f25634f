"""Llama-shaped models (Llama, Qwen2, Qwen3, with LoRA or without) computed in few wide operations, on transformers' own
weights.

transformers' forward passes are the reference: `tests/test_torch_llama.py` holds logits to within 1e-5 of theirs. For a
policy of a million parameters they spend most of a token's time between operations; and they cannot begin a prompt
where a remembered one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from lightningrl_torch._projections import (
    Adapter,
    Projection,
    join_rows,
    pack,
    takes_one_dnn,
)
from lightningrl_torch._prompt_attention import PromptAttention
from lightningrl_torch._quantized import QuantizedLinear
from lightningrl_torch._slots import KeyValues, SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Attend", "LlamaForward", "Write", "find_forward"]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer over one token of each row: from its queries, keys and values, each (rows, heads, head_dim), to
what they read, (rows, heads, head_dim) in any shape of as many numbers a row."""
Write = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Keeps a layer's keys and values of one token, each (rows, heads, 1, head_dim); returns all that there are."""
FAMILIES: Final = frozenset({"llama", "qwen2", "qwen3"})
MOST_PACKED: Final = 2**31
"""Bytes of matrices beyond which a second copy of them, in the order in which oneDNN reads them, is no bargain."""
LINEAR: Final = frozenset({nn.Linear, QuantizedLinear})
STATIC_ROTARY: Final = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose frequencies stay what they are, however long a text."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Layer:
    before_attention: Tensor
    queries_keys_values: Projection
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Projection
    before_mlp: Tensor
    gate_up: Projection
    down: Projection


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
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._dtype = dtype
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._eps = float(config.rms_norm_eps)
        self._embeddings: Tensor = trunk.embed_tokens.weight.data
        self._norm: Tensor = trunk.norm.weight.data
        self._projections: list[Projection] = []
        self._head: Projection = self._project([model.lm_head])
        self._layers = [self._read_layer(layer) for layer in trunk.layers]
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
        if len(token_ids) > 1:
            self._pack()
        cosines, sines = self.rotation(positions)
        return self.step(token_ids, cosines, sines, self.attention_of(cache, allowed))

    def step(self, token_ids: Tensor, cosines: Tensor, sines: Tensor, attend: Attend) -> Tensor:
        """Logits (rows, vocabulary) after one token of each row."""
        rows = len(token_ids)
        x = self._embeddings[token_ids]
        for number, layer in enumerate(self._layers):
            mixed = attend(number, *self._attended(layer, x, cosines, sines))
            x = x + layer.output(mixed.reshape(rows, -1))
            x = x + self._mlp(layer, x)
        return self._head(F.rms_norm(x, x.shape[-1:], self._norm, self._eps))

    def attention_of(self, cache: SlotCache, allowed: Tensor | None) -> Attend:
        """Attention over a cache, in which it keeps the token's keys and values. `allowed`: see `Forward.decode`."""
        return self.attention(
            lambda layer, keys, values: cache.layers[layer].update(keys, values),
            None if allowed is None else allowed[:, None, None],
        )

    def attention(self, write: Write, mask: Tensor | None) -> Attend:
        """Attention over what `write` returns. `mask` (rows, 1, 1, columns): what each row may read; None = all."""

        def attend(number: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            keys, values = write(number, keys[:, :, None], values[:, :, None])
            # a key's queries are few and in line with it: heads that share keys are queries of one attention
            grouped = queries.view(len(queries), self._kv_heads, -1, self._head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)

        return attend

    def prefill(self, sequences: Sequence[Sequence[int]], before: Sequence[KeyValues]) -> list[KeyValues]:
        """One pass over all tokens of all sequences, which only attention pads."""
        device = self._embeddings.device
        starts = [past[0].shape[2] if past else 0 for past in before]
        attention = PromptAttention(
            [len(sequence) for sequence in sequences], [past[0] if past else None for past in before], device
        )
        order = attention.order
        flat = torch.tensor([token for number in order for token in sequences[number]], device=device)
        places = [range(starts[number], starts[number] + len(sequences[number])) for number in order]
        positions = torch.tensor([position for place in places for position in place], device=device)
        cosines, sines = self.rotation(positions)
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

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of tokens, each (tokens, 1, head_dim)."""
        cosines, sines = self.rotations(int(positions.max()) + 1)
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

    def _project(self, modules: Sequence[Any]) -> Projection:
        linears = [getattr(module, "base_layer", module) for module in modules]
        biases = [linear.bias for linear in linears]
        adapters, start = [], 0
        for module, linear in zip(modules, linears, strict=True):
            columns = slice(start, start := start + _outputs(linear))
            for name in getattr(module, "active_adapters", ()):
                down, up = (self._converted(one[name].weight.data) for one in (module.lora_A, module.lora_B))
                adapters.append(Adapter(columns=columns, down=down, up=up, scale=float(module.scaling[name])))
        if isinstance(linears[0], QuantizedLinear):
            projection = Projection(weight=None, bias=None, adapters=tuple(adapters), quantized=tuple(linears))
        else:
            projection = Projection(
                weight=self._converted(join_rows([linear.weight for linear in linears])),
                bias=None if biases[0] is None else self._converted(join_rows(biases)),
                adapters=tuple(adapters),
            )
        self._projections.append(projection)
        return projection

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
