"""An engine's expert parameters as `ExpertWeights`, without a copy.

The parameters are read as the engine's loader leaves them, before the engine would repack them for a kernel of its own.
They stay the storage of our weights: an engine's expert load balancer moves experts by writing to them.
Letters: L local experts, H hidden, I intermediate.
"""

import dataclasses
from typing import Any

import torch

from ep_moe.config import DTYPES
from ep_moe.engines.common.weights import gate_above_up
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme
from ep_moe.weights import ExpertWeights

_SCALE_SUFFIXES = {torch.bfloat16: "", torch.float16: "_f16", torch.float32: "_f32"}  # of schemes' names


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFormat:
    """How a method of an engine loads weights.

    Args:
        scheme: ours for the same numbers.
        scale_name, bias_name: of the parameters with scales and biases, behind "w13_" and "w2_".
        static: there are scales of activations, w13_input_scale and w2_input_scale.
        interleaved: rows of w13 are loaded as [gate 0, up 0, gate 1, ...].
        values_name: of the parameters with the values, as `scale_name`.
        global_name: of the parameters with a second scale of each matrix, "" if there are none.
        columns_first: values [L, K, N] and scales [L, G, N] are loaded transposed; `RowOrder.transpose` turns them.
    """

    scheme: QuantScheme
    scale_name: str = ""
    bias_name: str = "bias"
    static: bool = False
    interleaved: bool = False
    values_name: str = "weight"
    global_name: str = ""
    columns_first: bool = False


def fp8_blocks(block: list[int]) -> QuantScheme:
    """The scheme of fp8 weights with a scale per block of [rows, columns], and tokens in groups. Local."""
    rows, columns = block
    return get_scheme("fp8_block" if (rows, columns) == (128, 128) else f"fp8_block_{rows}x{columns}")


def int4_scheme(group: int, dtype: torch.dtype) -> QuantScheme:
    """The scheme of symmetric int4 weights beside tokens that are not quantized.

    Args: group: columns that share a scale, 0 per channel. dtype: of the scales.
    Errors: ValueError for another dtype. Local.
    """
    if dtype not in _SCALE_SUFFIXES:
        raise ValueError(f"packed weights with scales in {dtype} are not read here")
    return get_scheme(f"int4_w4a16{f'_g{group}' if group else ''}{_SCALE_SUFFIXES[dtype]}")


def packed_int4(weights: Any, *, symmetric: bool, dtype: torch.dtype) -> QuantScheme:
    """The scheme of compressed-tensors' `pack-quantized` weights.

    Args: weights: has num_bits, strategy, group_size and actorder. dtype: of the scales.
    Errors: ValueError for weights that are not symmetric int4 in the order of their groups. Local.
    """
    strategy, order = (getattr(found, "value", found) for found in (weights.strategy, weights.actorder))
    if weights.num_bits != 4:
        raise ValueError(f"packed weights of {weights.num_bits} bits are not read here")
    if not symmetric:
        raise ValueError("packed weights with zero points are not read here")
    if order not in (None, "weight", "static"):
        raise ValueError(f"packed weights with actorder '{order}' are not read here")
    if strategy not in ("channel", "group"):
        raise ValueError(f"packed weights of strategy '{strategy}' are not read here")
    return int4_scheme(weights.group_size if strategy == "group" else 0, dtype)


def weights_of(layer: Any, loaded: LoadedFormat) -> ExpertWeights:
    """The parameters of a layer, as views; w13 is [gate; up] in both. Local.

    Args: layer: after `share_scale` if its scales are per tensor. Static scales of activations are left out.
    Errors: ValueError for parameters that are not as the engine's loader leaves them.
    """
    scheme = loaded.scheme
    names = [f"{matrix}_{loaded.values_name}" for matrix in ("w13", "w2")]
    w13, w2 = (_rows_first(getattr(layer, name).data, loaded) for name in names)
    if scheme.weight.family == "integer":  # packed in int32, the first in the lowest bits: the same bytes as ours
        w13, w2 = w13.view(torch.uint8), w2.view(torch.uint8)
    for name, tensor in zip(names, (w13, w2), strict=True):
        expected = scheme.weight.dtype or tensor.dtype
        if tensor.dim() != 3 or tensor.dtype != expected or not tensor.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}, expected are 3 "
                f"dimensions of {expected}, contiguous"
            )
    if not scheme.weight.quantized and w13.dtype not in DTYPES.values():
        raise ValueError(f"{names[0]} is {w13.dtype}, not one of {', '.join(DTYPES)}")
    return ExpertWeights(
        w13=StoredMatrix(w13, scale=_scale(layer, "w13", loaded), global_scale=_global_scale(layer, "w13", loaded)),
        w2=StoredMatrix(w2, scale=_scale(layer, "w2", loaded), global_scale=_global_scale(layer, "w2", loaded)),
        scheme=scheme,
        w13_bias=_bias(layer, "w13", loaded),
        w2_bias=_bias(layer, "w2", loaded),
    )


def _rows_first(tensor: torch.Tensor, loaded: LoadedFormat) -> torch.Tensor:
    """A parameter that `RowOrder.transpose` has turned, in the shape that its elements have now: a view."""
    if not loaded.columns_first:
        return tensor
    return tensor.view(tensor.shape[0], tensor.shape[2], tensor.shape[1])


def _bias(layer: Any, name: str, loaded: LoadedFormat) -> torch.Tensor | None:
    bias = getattr(layer, f"{name}_{loaded.bias_name}", None)
    return None if bias is None else bias.data


def _scale(layer: Any, name: str, loaded: LoadedFormat) -> torch.Tensor | None:
    """The scales of a matrix as `StoredMatrix` has them: [L] per tensor, [L, N] per channel, or in groups or blocks; a
    view."""
    if not loaded.scale_name:
        return None
    scale: torch.Tensor = _rows_first(getattr(layer, f"{name}_{loaded.scale_name}").data, loaded)
    stored = loaded.scheme.weight
    if stored.scale_dtype.itemsize == 1:
        scale = scale.view(stored.scale_dtype)
    if stored.granularity == "tensor":
        return scale[:, 0] if scale.dim() == 2 else scale
    return scale.squeeze(-1) if stored.granularity == "channel" else scale


def _global_scale(layer: Any, name: str, loaded: LoadedFormat) -> torch.Tensor | None:
    """The second scale of each matrix [L], a view; engines have one for each half of w13, [L, 2]. Host sync.

    Errors: ValueError for halves with different ones.
    """
    if not loaded.global_name:
        return None
    scale: torch.Tensor = getattr(layer, f"{name}_{loaded.global_name}").data
    if scale.dim() < 2:
        return scale
    different = int((scale != scale[:, :1]).any(1).sum())
    if different:
        raise ValueError(f"gate and up of {different} experts have different {name}_{loaded.global_name}")
    return scale[:, 0]


def share_scale(layer: Any) -> None:
    """Give both halves of w13 the larger of their scales [L, 2], as engines do; in place, nothing if they are equal.

    Local, host sync.
    """
    scale, w13 = layer.w13_weight_scale.data, layer.w13_weight.data
    if scale.dim() < 2 or scale.shape[1] < 2:
        return
    largest = scale.amax(dim=1)
    for half, rows in enumerate(w13.chunk(2, dim=1)):
        for expert in (scale[:, half] != largest).nonzero().flatten().tolist():
            factor = scale[expert, half] / largest[expert]
            rows[expert].copy_((rows[expert].float() * factor).to(rows.dtype))
    scale.copy_(largest.unsqueeze(1).expand_as(scale))


@dataclasses.dataclass(slots=True)
class RowOrder:
    """The order of the rows of w13, in parameters that an engine loads as [gate 0, up 0, gate 1, ...].

    Args:
        separated: the first column of w13 as `separate` has left it, [L, 2I]; None before the first call.
        transposed: the first 2I elements of w13 as `transpose` has left it, [L, 2I]; None before the first call.
    """

    separated: torch.Tensor | None = None
    transposed: torch.Tensor | None = None

    def transpose(self, layer: Any, loaded: LoadedFormat) -> None:
        """Turn values and scales [L, K, N] to [L, N, K] in place, unless they are as this has left them.

        Parameters keep their storage and their shape, in which an engine's load balancer moves whole experts. Reloads
        and sleeps: as in `separate`. Local, host sync.
        """
        parts = (loaded.values_name, loaded.scale_name)
        found = [getattr(layer, f"{matrix}_{part}").data for matrix in ("w13", "w2") for part in parts]
        if self.transposed is not None and torch.equal(self.transposed, found[0][:, 0]):
            return
        for tensor in found:
            for expert in tensor:  # one at a time: a copy of all would double the memory
                expert.view(-1).copy_(expert.t().reshape(-1))
        self.transposed = found[0][:, 0].clone()

    def separate(self, layer: Any, loaded: LoadedFormat) -> None:
        """Reorder w13, its scales and its bias to [gate; up] in place, unless they are as this has left them.

        Engines process weights again after a reload, which writes the checkpoint's order, and after a sleep, which may
        write nothing. Local, host sync.
        """
        w13 = layer.w13_weight.data
        if self.separated is not None and torch.equal(self.separated, w13[:, :, 0]):
            return
        scale = getattr(layer, f"w13_{loaded.scale_name}").data if loaded.scale_name else None
        found: list[torch.Tensor | None] = [w13, scale, _bias(layer, "w13", loaded)]
        for tensor in found:
            experts = () if tensor is None else tensor.split(1)  # one at a time: a copy of all would double the memory
            for expert in experts:
                expert.copy_(gate_above_up(expert))
        self.separated = w13[:, :, 0].clone()
