"""The parameters of `FusedMoE` as the runtime's weights: views, but for scales and columns that lie otherwise there.

Letters: E experts, L local experts, N and K rows and columns of a weight, V stored values of a row, G scale groups.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ep_moe.functional.sglang.layer_formats import FIELDS, LayerFormat, groups_in_order
from ep_moe.quant import QuantScheme, StoredMatrix, TensorFormat
from ep_moe.weights import ExpertWeights, PerExpert
from ep_moe.weights.method import Method, scales_of_halves, scheme_of_halves, shared_scale
from ep_moe.weights.quantized import as_stored


def weights_of(
    form: LayerFormat, tensors: Mapping[str, torch.Tensor], local: slice, *, up_first: bool
) -> ExpertWeights:
    """The parameters as the runtime's weights.

    Scales for a tensor become those of its channels. Blocks become shorter if the last one of the gate's rows is short.
    Weights in int32 whose columns lie in another order than their groups are sorted: in w2, and with them the rows of
    w13; in w13, whose tokens then have their columns in an order for each expert.

    Args: tensors: by field and part, as "w13_values". local: this rank's experts among all.
    Errors: ValueError for scales of w13 and w2 in different dtypes, a gate and an up half in different orders, groups
    of another size than the config's, and static input scales that are not positive, as those that were not loaded.
    Local; a host sync for global and static input scales, and for orders.
    """
    if form.packed:
        fields = _packed(form, tensors)
    else:
        fields = _plain(form, tensors)
        first, second = (tensors.get(f"{field}_input_scale") for field in FIELDS)
        for field, scales in (("w13", first), ("w2", second)):
            wrong = [] if scales is None else (~(scales > 0)).nonzero().flatten().tolist()
            if wrong:
                raise ValueError(f"{field}_input_scale of expert {wrong[0]} is not loaded, or not positive")
        fields["w13_input_scale"] = None if first is None else first.amax().reshape(1)
        fields["w2_input_scale"] = None if second is None else second[local].contiguous()
    return ExpertWeights(
        **{"w13_bias": tensors.get("w13_bias"), "w2_bias": tensors.get("w2_bias"), **fields}, up_first=up_first
    )


def _plain(form: LayerFormat, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The scheme and the matrices, and constants of experts whose gate and up halves have different global scales."""
    stored, constants = form.stored, dict[str, torch.Tensor]()
    scheme = form.scheme if form.on_load else scheme_of_halves(form.scheme, tensors["w13_values"].shape[1] // 2)
    matrices = {}
    for field in FIELDS:
        values, scale = tensors[f"{field}_values"], tensors.get(f"{field}_scale")
        if scale is not None and scheme.weight.scale_dtype == torch.float8_e8m0fnu:
            scale = scale.view(torch.float8_e8m0fnu)
        elif scale is not None and stored.granularity == "channel":
            scale = scale[..., 0]
        elif scale is not None and not form.on_load:
            scale = scales_of_halves(scale, stored, scheme.weight, values.shape[1], 2 if field == "w13" else 1)
        shared = tensors.get(f"{field}_global_scale")
        if shared is not None and shared.dim() == 2:
            shared, constants = shared_scale(shared, scheme.weight)
            shared = shared.contiguous()
        matrices[field] = StoredMatrix(values, scale=scale, global_scale=shared)
    return {"scheme": scheme, **matrices, "per_expert": PerExpert(**constants)}


def _packed(form: LayerFormat, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The scheme, the matrices and the bias of w13 of weights in int32, and the order of the columns of w13."""
    method = form.method
    assert method is not None
    kinds = [tensors[f"{field}_scale"].dtype for field in FIELDS]
    if kinds[0] != kinds[1]:
        raise ValueError(f"scales of w13 are {kinds[0]}, those of w2 {kinds[1]}: one dtype needed")
    scheme: QuantScheme = method.for_scale(kinds[0]).scheme
    parts: dict[str, dict[str, torch.Tensor]] = {
        field: {
            what: tensors[f"{field}_{what}"] for what in ("values", "scale", "zero") if f"{field}_{what}" in tensors
        }
        for field in FIELDS
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
    matrices = {field: StoredMatrix(**found) for field, found in parts.items()}
    return {"scheme": scheme, **matrices, "w13_bias": bias, "w13_order": w13_order}


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
    in_order = groups_in_order(method.stored, groups.shape[1]).to(groups.device)
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
