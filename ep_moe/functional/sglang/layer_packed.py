"""Weights of `FusedMoE` that a checkpoint packs in int32 (GPTQ, AWQ, compressed-tensors): parameters and loading.

Tensors are unpacked as they are loaded: parameters have SGLang's names, and the values, scales and zero points of the
runtime's own format, so that nothing is held twice.

Letters: E experts, L local experts, N and K rows and columns of a weight, V stored values of a row, G scale groups.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ep_moe.config import DTYPES
from ep_moe.functional.sglang.layer_formats import LayerFormat, Part, bias_part
from ep_moe.quant import QuantScheme, StoredMatrix, TensorFormat
from ep_moe.weights import ExpertWeights
from ep_moe.weights.method import Method
from ep_moe.weights.quantized import as_stored, unpacked_values, unpacked_zeros

_FIELDS = ("w13", "w2")
_SHAPE = ".weight_shape"


def packed_parts(
    form: LayerFormat, *, num_local_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, with_bias: bool
) -> Iterator[Part]:
    """The parameters of a layer. Errors: ValueError for sizes that the format does not hold."""
    method = form.method
    assert method is not None
    stored = method.stored
    kind = dtype if stored.family == "integer" else stored.scale_dtype  # integers have the checkpoint's dtype
    for field in _FIELDS:
        first = field == "w13"
        rows, columns = (2 * intermediate, hidden) if first else (hidden, intermediate)
        if stored.granularity == "group" and columns % stored.block[1]:
            raise ValueError(f"{field} has {columns} columns, groups of {stored.block[1]} do not divide them")
        scales = stored.scale_shape((num_local_experts, rows, columns))
        named: dict[str, tuple[str, tuple[int, ...], torch.dtype]] = {
            "values": (method.values, (num_local_experts, rows, stored.row_values(columns)), stored.dtype or dtype),
            "scale": (method.parts["scale"], scales, kind),
        }
        if method.middle_zero:
            named["middle"] = method.parts["zero"], (num_local_experts, 0), torch.uint8
        elif "zero" in method.parts:
            named["zero"] = method.parts["zero"], scales, torch.uint8
        if method.order is not None:
            named["order"] = method.order, (num_local_experts, *((2,) if first else ()), columns), torch.int32
        unread = [suffix for suffix in (_SHAPE, ".qzeros") if suffix in method.dropped]
        named |= {f"unread{suffix}": (suffix, (num_local_experts, 0), torch.uint8) for suffix in unread}
        for what, (suffix, shape, dtype_of_part) in named.items():
            part = functools.partial(Part, name=f"{field}_{suffix[1:]}", field=field, what=what.partition(".")[0])
            yield part(shape=shape, dtype=dtype_of_part, halves=first, method=method)
        if with_bias:
            yield bias_part(field, num_local_experts, rows, dtype)


def initial(part: Part) -> torch.Tensor:
    """A parameter before anything is loaded: zeros, columns in the order of their groups."""
    if part.what == "order":
        assert part.method is not None
        return _in_order(part.method.stored, part.shape[-1]).expand(part.shape).clone()
    data = torch.zeros(part.shape, dtype=torch.uint8 if part.dtype.itemsize == 1 else part.dtype)
    return data.view(part.dtype)


def _in_order(stored: TensorFormat, columns: int) -> torch.Tensor:
    """The group of each column [K] int32 if columns lie in the order of their groups."""
    return torch.arange(columns, dtype=torch.int32) // (stored.block[1] if stored.granularity == "group" else columns)


def fit_scale(parameter: torch.nn.Parameter, part: Part, loaded: torch.Tensor, name: str) -> None:
    """Give a parameter of scales the dtype of the first ones that are loaded: the format's are those of the checkpoint.

    Errors: ValueError for scales of another dtype than those before, or of none that is read.
    """
    if part.what != "scale" or part.method is None:
        return
    if loaded.dtype not in DTYPES.values():
        raise ValueError(f"{name} is {loaded.dtype}; one of {', '.join(DTYPES)} needed")
    if part.method.stored.family != "integer":
        return
    before = getattr(parameter, "scale_dtype", loaded.dtype)
    if before != loaded.dtype:
        raise ValueError(f"{name} is {loaded.dtype}, scales of {part.name} that were loaded before are {before}")
    parameter.scale_dtype = loaded.dtype  # type: ignore[attr-defined]
    if parameter.dtype != loaded.dtype:
        parameter.data = parameter.data.to(loaded.dtype)


def unpacked(part: Part, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
    """A tensor of the checkpoint by rows of the weight: elements [N, K] uint8, scales or zero points [N, G].

    Args: rows: N of the whole weight, of which the last int32 of zero points may have more.
    Errors: ValueError for other dimensions and dtypes, scales below zero, and zero points that the config denies.
    """
    method = part.method
    assert method is not None
    dims = 2 if part.what != "scale" or method.stored.granularity == "group" else loaded.dim()
    integers = part.what in ("values", "zero", "middle")
    if loaded.dim() != dims or dims not in (1, 2) or (integers and loaded.dtype != torch.int32):
        raise ValueError(f"{name} is {tuple(loaded.shape)} {loaded.dtype}; a matrix{' of int32' * integers} needed")
    if part.what == "values":
        return unpacked_values(method, loaded)
    if part.what in ("zero", "middle"):
        return unpacked_zeros(method, loaded, rows, name)
    if bool((loaded < 0).any()):
        raise ValueError(f"{name} has negative scales")
    if loaded.dim() == 1:
        return loaded[:, None]
    return loaded if method.packing == "int32" else loaded.t()


def needed_shape(part: Part) -> tuple[int, int]:
    """[N, K] or [N, G] of `unpacked` for a parameter's experts, both halves of w13."""
    assert part.method is not None
    stored = part.method.stored
    if part.what == "values":
        return part.shape[1], stored.row_width(part.shape[2])
    return part.shape[1], part.shape[2] if len(part.shape) > 2 else 1


def store(part: Part, target: torch.Tensor, own: torch.Tensor) -> None:
    """Copy this rank's share of what `unpacked` returned into its place."""
    assert part.method is not None
    found = as_stored(own, part.method.stored) if part.what == "values" else own
    target.copy_(found.reshape(target.shape))


def store_order(part: Part, target: torch.Tensor, groups: torch.Tensor, shared: bool, name: str) -> None:
    """Copy the group of each column [K] of this rank's share.

    Args: target: of w2, or of a half of w13. shared: ranks share the columns of w2.
    Errors: ValueError for columns of a share in another order than their groups.
    """
    assert part.method is not None
    stored = part.method.stored
    if stored.granularity != "group":
        return
    if tuple(groups.shape) != tuple(target.shape) or groups.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {tuple(groups.shape)} {groups.dtype}; {tuple(target.shape)} of integers needed")
    if shared:
        groups = groups - groups.min()
        if not torch.equal(groups.int(), _in_order(stored, target.shape[0]).to(groups.device)):
            raise ValueError(
                f"{name} has columns in another order than their groups; shares of ranks are read in order alone"
            )
    target.copy_(groups)


def as_packed_weights(form: LayerFormat, tensors: Mapping[str, torch.Tensor], *, up_first: bool) -> ExpertWeights:
    """The parameters as the runtime's weights: views, but for columns in another order than their groups.

    These are sorted: in w2, and with them the rows of w13; in w13, whose tokens then have their columns in an order for
    each expert.

    Errors: ValueError for scales of w13 and w2 in different dtypes, a gate and an up half in different orders, and
    groups of another size than the config's. Local; a host sync.
    """
    method = form.method
    assert method is not None
    kinds = [tensors[f"{field}_scale"].dtype for field in _FIELDS]
    if kinds[0] != kinds[1]:
        raise ValueError(f"scales of w13 are {kinds[0]}, those of w2 {kinds[1]}: one dtype needed")
    scheme: QuantScheme = method.for_scale(kinds[0]).scheme
    parts: dict[str, dict[str, torch.Tensor]] = {
        field: {
            what: tensors[f"{field}_{what}"] for what in ("values", "scale", "zero") if f"{field}_{what}" in tensors
        }
        for field in _FIELDS
    }
    bias = tensors.get("w13_bias")
    first = _orders(method, "w13", _of_both(method, tensors["w13_order"])) if "w13_order" in tensors else {}
    second = _orders(method, "w2", tensors["w2_order"]) if "w2_order" in tensors else {}
    if first or second:
        parts = {field: {what: part.clone() for what, part in found.items()} for field, found in parts.items()}
        bias = None if bias is None else bias.clone()
    w13_order: torch.Tensor | None = None
    if first:
        hidden = tensors["w13_order"].shape[2]
        w13_order = torch.arange(hidden, device=tensors["w13_order"].device).repeat(tensors["w13_order"].shape[0], 1)
    for expert, order in first.items():
        assert w13_order is not None
        w13_order[expert] = order
        values = parts["w13"]["values"]
        values[expert] = _sorted_columns(values[expert], order, scheme.weight)
    for expert, order in second.items():
        values = parts["w2"]["values"]
        values[expert] = _sorted_columns(values[expert], order, scheme.weight)
        both = torch.cat([order, order + order.numel()])
        for part in parts["w13"].values():
            part[expert] = part[expert][both]
        if bias is not None:
            bias[expert] = bias[expert][both]
    matrices: dict[str, Any] = {field: StoredMatrix(**found) for field, found in parts.items()}
    return ExpertWeights(
        **matrices,
        scheme=scheme,
        w13_bias=bias,
        w2_bias=tensors.get("w2_bias"),
        w13_order=w13_order,
        up_first=up_first,
    )


def _of_both(method: Method, groups: torch.Tensor) -> torch.Tensor:
    """The group of each column [L, K] of w13, from those of its gates and up halves [L, 2, K]."""
    differ = (groups[:, 0] != groups[:, 1]).any(1).nonzero().flatten().tolist()
    if differ:
        raise ValueError(
            f"w13{method.order} of local expert {differ[0]} differs between the gate and the up half, which multiply "
            "the same tokens"
        )
    return groups[:, 0]


def _orders(method: Method, field: str, groups: torch.Tensor) -> dict[int, torch.Tensor]:
    """The order of the columns by group, of the experts [L, K] that have them in another one."""
    if method.stored.granularity != "group":
        return {}
    in_order = _in_order(method.stored, groups.shape[1]).to(groups.device)
    found = {}
    for expert in (groups != in_order).any(1).nonzero().flatten().tolist():
        order = groups[expert].argsort(stable=True)
        if not torch.equal(groups[expert][order], in_order):
            size = method.stored.block[1]
            raise ValueError(
                f"{field}{method.order} of local expert {expert} does not have {size} columns in each group"
            )
        found[expert] = order
    return found


def _sorted_columns(values: torch.Tensor, order: torch.Tensor, stored: TensorFormat) -> torch.Tensor:
    """Values [N, V] with their columns in this order."""
    if stored.packed == 1:
        return values[:, order]
    codes = torch.stack([values & 15, values >> 4], dim=-1).flatten(1)
    return as_stored(codes[:, order], stored)
