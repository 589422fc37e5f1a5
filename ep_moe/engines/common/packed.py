"""Integer weights that an engine loads packed, turned in place to rows of bytes, and their zero points.

Letters: L local experts, N and K rows and columns of a weight, G scale groups of a row, P integers of a stored element.
"""

from typing import Any, Literal

import torch

from ep_moe.quant import TensorFormat, pack_nibbles, unpack_nibbles
from ep_moe.weights.packing import unpack_awq

Order = Literal["rows", "columns", "awq"]
ZERO_POINTS = "unpacked_zero_points"  # of our parameters, behind "w13_" and "w2_"


def turn(values: torch.Tensor, scale: torch.Tensor, order: Order) -> None:
    """Turn one expert's values and scales [G, N] to values [N, K / P] and scales [N, G], in place. Local.

    Args:
        values: "columns": [K / P, N], P neighbors of a column in each element; "awq": int32 [K, N / 8], in AWQ's order.
    """
    turned = pack_nibbles(unpack_awq(values).t()).contiguous() if order == "awq" else values.t().contiguous()
    values.view(-1).copy_(turned.view(values.dtype).view(-1))
    scale.view(-1).copy_(scale.t().reshape(-1))


def rows_first(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter [L, A, B] that `turn` has turned, in the shape [L, B, A] that its elements have now: a view."""
    return tensor.view(tensor.shape[0], tensor.shape[2], tensor.shape[1])


def values_of(values: torch.Tensor, order: Order) -> torch.Tensor:
    """Packed values of all experts as bytes [L, N, K / P], after `turn` if the order is not "rows": a view."""
    if order == "awq":  # [L, K, N / 8]
        per = torch.int32.itemsize * 2
        return values.view(torch.uint8).view(values.shape[0], values.shape[2] * per, values.shape[1] // 2)
    return (values if order == "rows" else rows_first(values)).view(torch.uint8)


def zero_points(layer: Any, matrix: str, name: str, stored: TensorFormat, order: Order) -> torch.Tensor:
    """The zero points of a weight, one in each byte, [L, N, G]; per channel [L, N].

    They are a parameter of the layer beside the packed ones: an engine's load balancer moves both.

    Args:
        matrix, name: of the parameter with the packed ones: "rows": [L, N / P, G], P neighbors of a column in each
            element; "columns": [L, G, N / P]; "awq": int32 [L, G, N / 8], in AWQ's order.
        stored: the format of the weight.
    Local.
    """
    packed: torch.Tensor = getattr(layer, f"{matrix}_{name}").data
    if order == "awq":
        codes = unpack_awq(packed)
    else:  # the first integer of an element is in its lowest bits
        codes = (packed.transpose(1, 2).contiguous() if order == "rows" else packed).view(torch.uint8)
        codes = unpack_nibbles(codes) if stored.packed == 2 else codes
    found = codes.transpose(1, 2).contiguous()
    ours = f"{matrix}_{ZERO_POINTS}"
    if hasattr(layer, ours):  # weights are loaded again
        getattr(layer, ours).data.copy_(found)
    else:
        layer.register_parameter(ours, torch.nn.Parameter(found, requires_grad=False))
    zero: torch.Tensor = getattr(layer, ours).data
    return zero.squeeze(-1) if stored.granularity == "channel" else zero


def check_order(layer: Any, name: str, num_groups: int) -> None:
    """Raise ValueError if the columns [L, K] of a weight are in another order than their groups. Local, host sync."""
    groups: torch.Tensor = getattr(layer, name).data
    width = groups.shape[1] // num_groups
    expected = torch.arange(groups.shape[1], device=groups.device) // width
    different = int((groups != expected).any(1).sum())
    if different:
        raise ValueError(
            f"{name} of {different} experts has columns in another order than their groups of {width}: act-order"
        )
