"""An engine's expert parameters as `ExpertWeights`, without a copy.

The parameters are read as the engine's loader leaves them, before the engine would repack them for a kernel of its own.
They stay the storage of our weights: an engine's expert load balancer moves experts by writing to them.
Letters: L local experts, H hidden, I intermediate.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ep_moe.config import DTYPES
from ep_moe.engines.common.model import gate_above_up
from ep_moe.engines.common.packed import Order, check_order, rows_first, turn, values_of, zero_points
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme
from ep_moe.weights import ExpertWeights, PerExpert
from ep_moe.weights.method import SCALE_NAMES, Method, shared_scale
from ep_moe.weights.methods import method_of

ACT_ORDER = "each expert has its own order of w13's columns, and tokens have one for all"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFormat:
    """How a method of an engine loads weights.

    Args:
        method: what they mean, and the names of their parameters.
        bias_name: of the parameters with biases, behind "w13_" and "w2_".
        interleaved: rows of w13 are loaded as [gate 0, up 0, gate 1, ...].
        order: of packed integers as they are loaded: "rows" is ours; "columns" and "awq" are those of `packed`, with
            scales [L, G, N].
        in_order: parameters [L, K] hold the group of each column, which must be in order.
        up_first: w13 is loaded as [up; gate].
    """

    method: Method
    bias_name: str = "bias"
    interleaved: bool = False
    order: Order = "rows"
    in_order: bool = False
    up_first: bool = False

    @property
    def scheme(self) -> QuantScheme:
        """Ours for the same numbers."""
        return self.method.scheme

    def parameter(self, layer: Any, matrix: str, part: str) -> torch.Tensor | None:
        """The data of the parameter with a part of "w13" or "w2"; None if the format has no such part. Local."""
        name = self.method.names.get(part)
        return None if name is None else getattr(layer, f"{matrix}_{name}").data


def configured(**config: Any) -> LoadedFormat:
    """The format of a checkpoint with this `quantization_config`. Errors: as of `method_of`. Local."""
    found = method_of({"quantization_config": config}, "its method")
    assert found is not None
    return LoadedFormat(method=found)


def stored_as(scheme: str, *, values: str = ".weight", static: bool = False, **parts: str) -> LoadedFormat:
    """A format that is not packed, by its scheme and the suffixes of its tensors. Local.

    Args: static: with static scales of activations. parts: besides "scale": ".weight_scale".
    """
    found = get_scheme(scheme)
    suffixes = {"scale": ".weight_scale"} | parts if found.weight.quantized else {}
    scale = ".input_scale" if static else None
    return LoadedFormat(method=Method(name=scheme, scheme=found, values=values, parts=suffixes, input_scale=scale))


def serialized_fp8(method: Any) -> LoadedFormat:
    """The format of a method of an engine that reads quant_method "fp8". Local."""
    blocks = method.weight_block_size if method.block_quant else None
    activations = method.quant_config.activation_scheme
    return configured(quant_method="fp8", weight_block_size=blocks, activation_scheme=activations)


def compressed_fp8(method: Any) -> LoadedFormat:
    """The format of an engine's method for fp8 of compressed-tensors: in blocks, or per tensor or channel. Local."""
    if method.block_quant:
        rows, columns = method.weight_block_size
        return stored_as(f"fp8_block_{rows}x{columns}")
    scheme = "fp8_tensor" if method.weight_quant.strategy == "tensor" else "fp8_token"
    return stored_as(scheme, static=method.static_input_scales)


def nvfp4(*, tokens: bool, compressed: bool = False) -> LoadedFormat:
    """NVFP4 of modelopt, or of compressed-tensors, whose second scale divides. Local.

    Args: tokens: these are in NVFP4 too.
    """
    name = "nvfp4" if tokens else "nvfp4_w4a16"
    if compressed:
        return stored_as(f"{name}_divisor", values=".weight_packed", global_scale=".weight_global_scale")
    return stored_as(name, global_scale=".weight_scale_2")


def compressed_integers(weights: Any, *, symmetric: bool, dtype: torch.dtype, order: Order) -> LoadedFormat:
    """compressed-tensors' `pack-quantized` weights.

    Args: weights: has num_bits, strategy, group_size and actorder. dtype: of the scales.
    Errors: ValueError for weights that are not integers of 4 or 8 bits in the order of their groups. Local.
    """
    strategy, actorder = (getattr(found, "value", found) for found in (weights.strategy, weights.actorder))
    if actorder not in (None, "weight", "static"):
        raise ValueError(f"packed weights with actorder '{actorder}' are not read here: {ACT_ORDER}")
    arguments = {"num_bits": weights.num_bits, "type": "int", "strategy": strategy, "group_size": weights.group_size}
    group = {"weights": arguments | {"symmetric": symmetric}, "format": "pack-quantized"}
    return _integers(configured(quant_method="compressed-tensors", config_groups={"experts": group}), dtype, order)


def gptq(config: Any, dtype: torch.dtype) -> LoadedFormat:
    """Symmetric GPTQ.

    Args: config: of the engine: has weight_bits, group_size, desc_act, and the checkpoint's as full_config.
    Errors: ValueError for act-order, except in static groups, whose columns stay in the order of their groups. Local.
    """
    size, ordered = config.group_size, config.desc_act and config.group_size != -1
    if ordered and not config.full_config.get("static_groups", False):
        raise ValueError(f"GPTQ weights with desc_act, without static_groups, are not read here: {ACT_ORDER}")
    found = configured(quant_method="gptq", bits=config.weight_bits, group_size=size, sym=True)
    return _integers(found, dtype, "columns", in_order=ordered)


def awq(config: Any, dtype: torch.dtype) -> LoadedFormat:
    """AWQ with zero points, of an engine's config with weight_bits, group_size and zero_point. Local."""
    if not config.zero_point:
        raise ValueError("AWQ weights without zero points are not read here")
    found = configured(quant_method="awq", bits=config.weight_bits, group_size=config.group_size)
    return _integers(found, dtype, "awq")


def wna16(config: Any, group: int, dtype: torch.dtype) -> LoadedFormat:
    """GPTQ and AWQ of --quantization moe_wna16, which engines turn to rows while they load them. Local."""
    found = configured(quant_method="gptq", bits=config.weight_bits, group_size=group, sym=not config.has_zp)
    return _integers(found, dtype, "rows")


def _integers(loaded: LoadedFormat, dtype: torch.dtype, order: Order, *, in_order: bool = False) -> LoadedFormat:
    """Packed integers with scales of this dtype.

    Those of 8 bits get zero points, made here if they are symmetric, so that values stay as the engine has loaded them.
    """
    if dtype not in SCALE_NAMES:
        raise ValueError(f"packed weights with scales in {dtype} are not read here")
    method = loaded.method
    if method.stored.family != "integer":
        method = dataclasses.replace(method, scheme=get_scheme(f"{method.scheme.name}_zp"))
    return dataclasses.replace(loaded, method=method.for_scale(dtype), order=order, in_order=in_order)


Reader = Callable[..., LoadedFormat]


def format_by(readers: Mapping[str, LoadedFormat | Reader], holder: Any, *arguments: Any) -> LoadedFormat:
    """The format of a class by its name: a constant, or what a function of the arguments returns.

    Errors: ValueError for a class that is not listed, and as of the function. Local.
    """
    name = type(holder).__name__
    if name not in readers:
        raise ValueError(f"weights of {name} are not read here")
    found = readers[name]
    return found if isinstance(found, LoadedFormat) else found(*arguments)


def weights_of(layer: Any, loaded: LoadedFormat) -> ExpertWeights:
    """The parameters of a layer, as views, but for unpacked zero points; static scales of activations are left out.

    Args: layer: after `share_scale` if its scales are per tensor, and after `RowOrder.arrange`.
    Errors: ValueError for parameters that are not as the engine's loader leaves them. Local.
    """
    scheme = loaded.scheme
    matrices, constants = dict[str, StoredMatrix](), dict[str, torch.Tensor]()
    for field in ("w13", "w2"):
        name, values = f"{field}_{loaded.method.names['values']}", loaded.parameter(layer, field, "values")
        assert values is not None
        if scheme.weight.family == "integer":  # the first in the lowest bits: the same bytes as ours
            values = values_of(values, loaded.order)
        expected = scheme.weight.dtype or values.dtype
        if values.dim() != 3 or values.dtype != expected or not values.is_contiguous():
            raise ValueError(
                f"{name} is {tuple(values.shape)} {values.dtype} with strides {values.stride()}, expected are 3 "
                f"dimensions of {expected}, contiguous"
            )
        if not scheme.weight.quantized and values.dtype not in DTYPES.values():
            raise ValueError(f"{name} is {values.dtype}, not one of {', '.join(DTYPES)}")
        shared = loaded.parameter(layer, field, "global_scale")
        if shared is not None and shared.dim() > 1 and shared.shape[1] > 1:  # of the gate and the up half
            shared, constants = shared_scale(shared, scheme.weight)
        scale = _scale(layer, field, loaded)
        zero = None if scale is None else _zero_points(layer, field, loaded, scale)
        matrices[field] = StoredMatrix(values, scale=scale, zero=zero, global_scale=shared)
    return ExpertWeights(
        w13=matrices["w13"],
        w2=matrices["w2"],
        scheme=scheme,
        w13_bias=_bias(layer, "w13", loaded),
        w2_bias=_bias(layer, "w2", loaded),
        per_expert=PerExpert(**constants),
        up_first=loaded.up_first,
    )


def _zero_points(layer: Any, field: str, loaded: LoadedFormat, scale: torch.Tensor) -> torch.Tensor | None:
    """The zero points of a matrix. Errors: as of `check_order`."""
    method = loaded.method
    if loaded.in_order:
        assert method.order is not None
        check_order(layer, f"{field}_{method.order[1:]}", scale.shape[-1])
    if not method.stored.zero_point:
        return None
    if "zero" not in method.parts or method.middle_zero:  # symmetric: all the same
        return torch.full_like(scale, 2 ** (8 // method.stored.packed - 1), dtype=torch.uint8)
    return zero_points(layer, field, method.names["zero"], method.stored, loaded.order)


def _bias(layer: Any, field: str, loaded: LoadedFormat) -> torch.Tensor | None:
    bias = getattr(layer, f"{field}_{loaded.bias_name}", None)
    return None if bias is None else bias.data


def _scale(layer: Any, field: str, loaded: LoadedFormat) -> torch.Tensor | None:
    """The scales of a matrix as `StoredMatrix` has them, a view."""
    scale, kind = loaded.parameter(layer, field, "scale"), loaded.scheme.weight
    if scale is None:
        return None
    if loaded.order != "rows":
        scale = rows_first(scale)
    if kind.scale_dtype.itemsize == 1:
        scale = scale.view(kind.scale_dtype)
    if kind.granularity == "tensor":
        return scale[:, 0] if scale.dim() == 2 else scale
    return scale.squeeze(-1) if kind.granularity == "channel" else scale


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


class RowOrder:
    """Turns parameters to rows in the order [gate; up], in place and only once after each load of weights.

    Engines process weights again after a reload, which writes them, and after a sleep, which may not: the first
    elements of w13 are compared with those that `arrange` has left.
    """

    def __init__(self) -> None:
        self._left: torch.Tensor | None = None

    def arrange(self, layer: Any, loaded: LoadedFormat) -> None:
        """Turn packed values and scales, or interleaved rows of w13 and its scales and biases, to our order.

        Parameters keep their storage and shape. One expert at a time is copied, to save memory. Local, host sync.
        """
        turned = loaded.order != "rows"
        if not turned and not loaded.interleaved:
            return
        w13 = loaded.parameter(layer, "w13", "values")
        assert w13 is not None
        first = w13[:, 0] if turned else w13[:, :, 0]
        if self._left is not None and torch.equal(self._left, first):
            return
        if turned:
            for field in ("w13", "w2"):
                values, scales = (loaded.parameter(layer, field, part) for part in ("values", "scale"))
                assert values is not None
                assert scales is not None
                for expert, scale in zip(values, scales, strict=True):
                    turn(expert, scale, loaded.order)
        else:
            for tensor in (w13, loaded.parameter(layer, "w13", "scale"), _bias(layer, "w13", loaded)):
                for expert in () if tensor is None else tensor.split(1):
                    expert.copy_(gate_above_up(expert))
        self._left = first.clone()
