"""Frozen weights of 4 or 8 bits a number under adapters that learn (QLoRA, Dettmers et al., 2023).

    weights ─► blocks of 64 numbers ─► a code for each number, a scale for each block
    product:   codes · scales ─► one matrix, of the policy's dtype, for as long as its product takes ─► x · Wᵀ

    nf4    16 codes at the quantiles of a normal distribution, scales of 8 bits (double quantisation): 4.1 bits
    int8   255 codes at equal distances, scales of 32 bits: 8.5 bits

Engine and learner multiply with the same matrix, so that logprobs are as near as those of any policy.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "QuantizedLinear",
    "count_parameters",
    "quantize_model",
    "quantized_numbers",
    "restore_linears",
    "weight_bytes",
]

BLOCK: Final = 64
"""Numbers that share a scale."""


class QuantizedLinear(nn.Linear):
    """A linear map whose weight is kept in few bits; frozen. `peft` takes it for any other `nn.Linear`."""

    def __init__(self, linear: nn.Linear, kind: str, device: torch.device, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)  # `nn.Linear` would make a weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._kind = kind
        weight = linear.weight.detach().to(device, dtype)
        functional = _functional()
        if kind == "nf4":
            codes, state = functional.quantize_4bit(weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
        else:
            code = functional.create_linear_map(signed=True, total_bits=8).to(device)
            codes, state = functional.quantize_blockwise(weight, code=code, blocksize=BLOCK)
        self.register_buffer("codes", codes)
        self.state = state
        """Scales, and how to read codes, as bitsandbytes has them."""
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(device, dtype), requires_grad=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight (outputs, inputs), made anew each time it is asked for."""
        functional = _functional()
        read = functional.dequantize_4bit if self._kind == "nf4" else functional.dequantize_blockwise
        weight: Tensor = read(self.codes, self.state)
        return weight

    @property
    def memory(self) -> int:
        """Bytes of codes and scales."""
        parts = [self.codes, self.state.absmax]
        if self.state.nested:
            parts.append(self.state.state2.absmax)
        return sum(part.numel() * part.element_size() for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply as `F.linear` does; the gradient flows to `x` alone."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y: Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return y


class _Product(torch.autograd.Function):
    """A product whose backward pass makes the weight anew, rather than keep it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: QuantizedLinear) -> Tensor:
        ctx.linear = linear
        bias = linear.bias
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, linear.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (gradient,) = gradients
        if not ctx.needs_input_grad[0]:
            return None, None
        return gradient @ ctx.linear.weight.to(gradient.dtype), None


def quantize_model(model: PreTrainedModel, kind: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Quantise all linear maps but the output's, one after the other, and move the rest to `device` in `dtype`."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linears = [(name, part) for name, part in model.named_modules() if type(part) is nn.Linear and part is not head]
    for name, linear in linears:
        model.set_submodule(name, QuantizedLinear(linear, kind, device, dtype))
        linear.weight.data = linear.weight.data.new_empty(0)  # freed now, whoever still holds the list
    moved: PreTrainedModel = torch.nn.Module.to(model, device, dtype)
    return moved


def restore_linears(module: nn.Module) -> None:
    """Give a module's quantised maps, those below adapters too, their weights of now as ordinary ones, float32."""
    for name, part in list(module.named_modules()):
        if isinstance(part, QuantizedLinear):
            with torch.device("meta"):
                linear = nn.Linear(part.in_features, part.out_features, bias=False)
            linear.weight = nn.Parameter(part.weight.float(), requires_grad=False)
            linear.bias = part.bias
            module.set_submodule(name, linear)


def count_parameters(model: nn.Module) -> int:
    """Number of a model's parameters, quantised ones with them."""
    return sum(parameter.numel() for parameter in model.parameters()) + quantized_numbers(model)


def quantized_numbers(model: nn.Module) -> int:
    """Number of a model's quantised weights."""
    return sum(part.in_features * part.out_features for part in model.modules() if isinstance(part, QuantizedLinear))


def weight_bytes(model: nn.Module) -> int:
    """Memory of a model's weights."""
    quantized = (part for part in model.modules() if isinstance(part, QuantizedLinear))
    plain = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return plain + sum(part.memory for part in quantized)


@cache
def _functional() -> Any:
    return importlib.import_module("bitsandbytes.functional")  # has no types
