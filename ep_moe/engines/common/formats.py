"""An engine's expert parameters as `ExpertWeights`, without a copy.

The parameters are read as the engine's loader leaves them, before the engine would repack them for a kernel of its own.
They stay the storage of our weights: an engine's expert load balancer moves experts by writing to them.
Letters: L local experts, H hidden, I intermediate.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ep_moe.config import DTYPES
from ep_moe.engines.common.packed import Order, check_order, middle, rows_first, turn, values_of, zero_points
from ep_moe.engines.common.weights import gate_above_up
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme
from ep_moe.weights import ExpertWeights, PerExpert
from ep_moe.weights.method import SCALE_NAMES, shared_scale

ACT_ORDER = "each expert has its own order of w13's columns, and tokens have one for all"


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
        order: of packed integers as they are loaded: "rows" is ours; in "columns" and "awq" values are transposed, as
            `packed.turn` has them, and scales are [L, G, N]; `RowOrder.turn` turns them.
        zero_name: of the parameters with zero points, as `scale_name`; without it all are the middle of the range.
        zero_order: of the packed zero points, as `packed.zero_points` has it.
        group_name: of parameters [L, K] with the group of each column, as `scale_name`, which must be in order; "" if
            they need no look.
        up_first: w13 is loaded as [up; gate].
    """

    scheme: QuantScheme
    scale_name: str = ""
    bias_name: str = "bias"
    static: bool = False
    interleaved: bool = False
    values_name: str = "weight"
    global_name: str = ""
    order: Order = "rows"
    zero_name: str = ""
    zero_order: Order = "rows"
    group_name: str = ""
    up_first: bool = False


def fp8_blocks(block: list[int]) -> QuantScheme:
    """The scheme of fp8 weights with a scale per block of [rows, columns], and tokens in groups. Local."""
    rows, columns = block
    return get_scheme("fp8_block" if (rows, columns) == (128, 128) else f"fp8_block_{rows}x{columns}")


def integer_scheme(bits: int, group: int, dtype: torch.dtype, *, zero_point: bool) -> QuantScheme:
    """The scheme of packed integers beside tokens that are not quantized.

    Args: group: columns that share a scale, 0 per channel. dtype: of the scales. zero_point: they are stored. Those of
        symmetric integers of 8 bits are made here, so that values and scales stay as the engine has loaded them.
    Errors: ValueError for other bits or another dtype. Local.
    """
    if dtype not in SCALE_NAMES:
        raise ValueError(f"packed weights with scales in {dtype} are not read here")
    if bits not in (4, 8):
        raise ValueError(f"packed weights of {bits} bits are not read here")
    name = "int4_w4a16" if bits == 4 else "int8_w8a16"
    in_groups, zeros = f"_g{group}" if group else "", "_zp" if zero_point or bits == 8 else ""
    return get_scheme(f"{name}{in_groups}{zeros}{SCALE_NAMES[dtype]}")


def packed_integers(weights: Any, *, symmetric: bool, dtype: torch.dtype) -> QuantScheme:
    """The scheme of compressed-tensors' `pack-quantized` weights.

    Args: weights: has num_bits, strategy, group_size and actorder. dtype: of the scales.
    Errors: ValueError for weights that are not integers of 4 or 8 bits in the order of their groups. Local.
    """
    strategy, order = (getattr(found, "value", found) for found in (weights.strategy, weights.actorder))
    if order not in (None, "weight", "static"):
        raise ValueError(f"packed weights with actorder '{order}' are not read here: {ACT_ORDER}")
    if strategy not in ("channel", "group"):
        raise ValueError(f"packed weights of strategy '{strategy}' are not read here")
    group = weights.group_size if strategy == "group" else 0
    return integer_scheme(weights.num_bits, group, dtype, zero_point=not symmetric)


def gptq_group(desc_act: bool, group: int, settings: Mapping[str, Any]) -> str:
    """The `group_name` of GPTQ's weights in groups of a size, -1 per channel.

    Args: settings: quantization_config of the checkpoint.
    Errors: ValueError for act-order, but that of static groups, whose columns stay in the order of their groups. Local.
    """
    if not desc_act or group == -1:
        return ""
    if not settings.get("static_groups", False):
        raise ValueError(f"GPTQ weights with desc_act, without static_groups, are not read here: {ACT_ORDER}")
    return "g_idx"


def weights_of(layer: Any, loaded: LoadedFormat) -> ExpertWeights:
    """The parameters of a layer, as views; but zero points are unpacked. Local.

    Args: layer: after `share_scale` if its scales are per tensor, and after `RowOrder.turn`. Static scales of
        activations are left out.
    Errors: ValueError for parameters that are not as the engine's loader leaves them.
    """
    scheme = loaded.scheme
    names = [f"{matrix}_{loaded.values_name}" for matrix in ("w13", "w2")]
    w13, w2 = (getattr(layer, name).data for name in names)
    if scheme.weight.family == "integer":  # the first in the lowest bits: the same bytes as ours
        w13, w2 = values_of(w13, loaded.order), values_of(w2, loaded.order)
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
        w13=_matrix(layer, "w13", w13, loaded),
        w2=_matrix(layer, "w2", w2, loaded),
        scheme=scheme,
        w13_bias=_bias(layer, "w13", loaded),
        w2_bias=_bias(layer, "w2", loaded),
        per_expert=PerExpert(**_global_scale(layer, "w13", loaded)[1]),
        up_first=loaded.up_first,
    )


def _matrix(layer: Any, name: str, values: torch.Tensor, loaded: LoadedFormat) -> StoredMatrix:
    """The values of a matrix with their other parts. Errors: as of `check_order`."""
    stored, scale, zero = loaded.scheme.weight, _scale(layer, name, loaded), None
    if loaded.group_name:
        assert scale is not None
        check_order(layer, name, loaded.group_name, scale.shape[-1])
    if stored.zero_point and loaded.zero_name:
        zero = zero_points(layer, name, loaded.zero_name, stored, loaded.zero_order)
    elif stored.zero_point:
        assert scale is not None
        zero = middle(scale, stored)
    return StoredMatrix(values, scale=scale, zero=zero, global_scale=_global_scale(layer, name, loaded)[0])


def _bias(layer: Any, name: str, loaded: LoadedFormat) -> torch.Tensor | None:
    bias = getattr(layer, f"{name}_{loaded.bias_name}", None)
    return None if bias is None else bias.data


def _scale(layer: Any, name: str, loaded: LoadedFormat) -> torch.Tensor | None:
    """The scales of a matrix as `StoredMatrix` has them: [L] per tensor, [L, N] per channel, or in groups or blocks; a
    view."""
    if not loaded.scale_name:
        return None
    scale: torch.Tensor = getattr(layer, f"{name}_{loaded.scale_name}").data
    stored = loaded.scheme.weight
    if loaded.order != "rows":
        scale = rows_first(scale)
    if stored.scale_dtype.itemsize == 1:
        scale = scale.view(stored.scale_dtype)
    if stored.granularity == "tensor":
        return scale[:, 0] if scale.dim() == 2 else scale
    return scale.squeeze(-1) if stored.granularity == "channel" else scale


def _global_scale(layer: Any, name: str, loaded: LoadedFormat) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
    """The second scale of each matrix [L], a view; engines have one for each half of w13, [L, 2]. Host sync.

    Returns: as of `shared_scale`: constants if the halves have different ones, which are copies.
    """
    if not loaded.global_name:
        return None, {}
    scale: torch.Tensor = getattr(layer, f"{name}_{loaded.global_name}").data
    return shared_scale(scale, loaded.scheme.weight) if scale.dim() > 1 and scale.shape[1] > 1 else (scale, {})


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
        turned: the first elements of each expert's w13 as `turn` has left it; None before the first call.
    """

    separated: torch.Tensor | None = None
    turned: torch.Tensor | None = None

    def turn(self, layer: Any, loaded: LoadedFormat) -> None:
        """Turn values and scales to rows in place, by `packed.turn`, unless they are as this has left them.

        Parameters keep their storage and their shape, in which an engine's load balancer moves whole experts. Reloads
        and sleeps: as in `separate`. Local, host sync.
        """
        first = getattr(layer, f"w13_{loaded.values_name}").data
        if self.turned is not None and torch.equal(self.turned, first[:, 0]):
            return
        for matrix in ("w13", "w2"):
            values, scales = (
                getattr(layer, f"{matrix}_{part}").data for part in (loaded.values_name, loaded.scale_name)
            )
            for expert, scale in zip(values, scales, strict=True):  # one at a time: all would double the memory
                turn(expert, scale, loaded.order)
        self.turned = first[:, 0].clone()

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
