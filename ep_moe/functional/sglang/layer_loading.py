"""The ranks that share a `FusedMoE`, and tensors of a checkpoint copied into its parameters.

Weights that a checkpoint packs in int32 (GPTQ, AWQ, compressed-tensors) are unpacked as they are loaded: parameters
have values, scales and zero points in the runtime's own format, so that there is one copy.

Letters: E experts, L local experts, N and K rows and columns of a weight, G scale groups.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ep_moe.config import DTYPES
from ep_moe.functional.sglang.layer_formats import Part, groups_in_order
from ep_moe.quant import as_bytes
from ep_moe.weights.quantized import as_stored, unpacked_values, unpacked_zeros

SHARDS = ("w1", "w2", "w3")
_HALVES = {"w1": 0, "w3": 1}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoeParallel:
    """The ranks that share a layer: rank r has the experts of r // tp_size and the columns of r % tp_size.

    Args:
        group: of torch.distributed, of ep_size * tp_size ranks; None is the default group, or none for one rank.
        ep_size: ranks that share the experts. tp_size: ranks that share the intermediate size of each expert.
    Errors: ValueError for a group of another size.
    """

    group: Any = None
    ep_size: int = 1
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.ep_size < 1 or self.tp_size < 1:
            raise ValueError(f"ep_size ({self.ep_size}) and tp_size ({self.tp_size}) must be at least 1")
        if self.size > 1 and torch.distributed.get_world_size(self.group) != self.size:
            ranks = torch.distributed.get_world_size(self.group)
            raise ValueError(f"the group has {ranks} ranks, ep_size ({self.ep_size}) * tp_size ({self.tp_size}) needed")

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.ep_size * self.tp_size

    @property
    def rank(self) -> int:
        """This rank."""
        return torch.distributed.get_rank(self.group) if self.size > 1 else 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What a rank holds of a layer.

    Args:
        first, count: its experts, [first, first + count). tp_rank, tp_size: its share of the intermediate size.
        presharded: tensors that are loaded have only this share.
        up_first: rows of w13 are [up; gate]. alternating: stacked rows of gate and up alternate.
    """

    first: int
    count: int
    tp_rank: int = 0
    tp_size: int = 1
    presharded: bool = False
    up_first: bool = False
    alternating: bool = False


def _like(loaded: torch.Tensor, target: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor with the dimensions and the kind of bytes of the place for it."""
    if loaded.dim() == target.dim() + 1:  # groups of bytes that are apart
        loaded = loaded.flatten(-2)
    elif loaded.dim() == target.dim() - 1 and target.shape[-1] == 1:
        loaded = loaded.unsqueeze(-1)
    if loaded.dim() != target.dim():
        raise ValueError(f"{name} is {tuple(loaded.shape)}; {target.dim()} dimensions needed")
    if target.element_size() == 1 or loaded.element_size() == 1:
        same = target.dtype == loaded.dtype or {target.dtype, loaded.dtype} <= {torch.uint8, torch.float8_e8m0fnu}
        if not same:
            raise ValueError(f"{name} is {loaded.dtype}; {target.dtype} needed")
        return as_bytes(loaded)
    return loaded


def _own(loaded: torch.Tensor, shape: Sequence[int], axis: int | None, share: Share, name: str) -> torch.Tensor:
    """This rank's share of a tensor along an axis, None if it is whole. Errors: ValueError for another shape."""
    needed, axis = list(shape), None if share.presharded else axis
    if axis is not None:
        needed[axis] *= share.tp_size
    if list(loaded.shape) != needed:
        raise ValueError(f"{name} is {tuple(loaded.shape)}; {tuple(needed)} needed")
    return loaded if axis is None else loaded.narrow(axis, share.tp_rank * shape[axis], shape[axis])


def _half(target: torch.Tensor, axis: int, half: int, share: Share) -> torch.Tensor:
    """The rows of the gate (0) or the up half (1) of w13."""
    rows = target.shape[axis] // 2
    return target.narrow(axis, rows * (1 - half if share.up_first else half), rows)


def load_expert(
    part: Part, data: torch.Tensor, loaded: torch.Tensor, name: str, shard_id: str, expert: int, share: Share
) -> None:
    """Copy a tensor of one expert into a parameter; one of another rank's experts is left out.

    Args:
        data: the parameter's. loaded: rows of the gate (w1) or the up half (w3), or all of w2. expert: in [0, E).
    Errors: ValueError for another shard, shape or dtype.
    """
    if shard_id not in SHARDS or (shard_id == "w2") != (part.field == "w2"):
        fits = "w2" if part.field == "w2" else "w1 or w3"
        raise ValueError(f"shard_id ({shard_id!r}) of {name} is not {fits}, the parameter is {part.name}")
    place = expert if part.all_experts else expert - share.first
    if not 0 <= place < data.shape[0]:
        return
    target, half = data[place], _HALVES.get(shard_id, 0)
    if part.method is not None:
        _load_packed(part, target, loaded, name, half, share)
        return
    if part.is_number:
        if loaded.numel() != 1:
            raise ValueError(f"{name} is {tuple(loaded.shape)}; one number needed")
        number = loaded.reshape(()).to(target)
        if part.what == "input_scale":  # one for gate and up: the larger
            torch.maximum(target, number, out=target)
        else:
            (target[half] if target.dim() else target).copy_(number)
        return
    if part.halves:
        target = _half(target, 0, half, share)
    _copy(part, target, _like(loaded, target, name), part.shard, share, name)


def fit_scale(parameter: torch.nn.Parameter, part: Part, loaded: torch.Tensor, name: str) -> None:
    """Give a parameter of scales the dtype of the first ones that are loaded. Errors: ValueError for others later."""
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


def _load_packed(part: Part, target: torch.Tensor, loaded: torch.Tensor, name: str, half: int, share: Share) -> None:
    """Copy a tensor of one expert of a weight in int32; half: of w13."""
    assert part.method is not None
    first, stored = part.field == "w13", part.method.stored
    if part.what == "unread":
        return
    if part.what == "order":
        if not first and share.tp_size > 1 and not share.presharded:
            loaded = _own(loaded, target.shape, 0, share, name)
        _copy_order(part, target[half] if first else target, loaded, not first and share.tp_size > 1, name)
        return
    ranks = share.tp_size if first and not share.presharded else 1
    rows = part.shape[1] // 2 if first else part.shape[1] if len(part.shape) > 1 else 0
    found = _unpacked(part, loaded, rows * ranks, name)
    if part.what == "middle":  # which was checked
        return
    if part.what == "values":
        shape = rows, stored.row_width(part.shape[2])
    else:
        shape = rows, part.shape[2] if len(part.shape) > 2 else 1
    each_row = not first and part.what != "values" and target.dim() < 2  # a scale, which ranks do not share
    own = _own(found, shape, None if each_row else 0 if first else 1, share, name)
    if first:
        target = _half(target, 0, half, share)
    target.copy_((as_stored(own, stored) if part.what == "values" else own).reshape(target.shape))


def _unpacked(part: Part, loaded: torch.Tensor, rows: int, name: str) -> torch.Tensor:
    """A tensor of the checkpoint by rows of the weight: elements [N, K] uint8, scales or zero points [N, G].

    Args: rows: N of the whole weight. Errors: ValueError for shapes, dtypes and values that the config denies.
    """
    method = part.method
    assert method is not None
    dims = 2 if part.what != "scale" or method.stored.granularity == "group" else loaded.dim()
    integers = part.what in ("values", "zero", "middle")
    if loaded.dim() != dims or dims not in (1, 2) or (integers and loaded.dtype != torch.int32):
        raise ValueError(f"{name} is {tuple(loaded.shape)} {loaded.dtype}; a matrix{' of int32' * integers} needed")
    if part.what == "values":
        return unpacked_values(method, loaded)
    if integers:
        return unpacked_zeros(method, loaded, rows, name)
    if bool((loaded < 0).any()):
        raise ValueError(f"{name} has negative scales")
    if loaded.dim() == 1:
        return loaded[:, None]
    return loaded if method.packing == "int32" else loaded.t()


def _copy_order(part: Part, target: torch.Tensor, groups: torch.Tensor, shared: bool, name: str) -> None:
    """Copy the group of each column [K]; columns of w2 that ranks share must be in the order of their groups."""
    assert part.method is not None
    stored = part.method.stored
    if stored.granularity != "group":
        return
    if tuple(groups.shape) != tuple(target.shape) or groups.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} is {tuple(groups.shape)} {groups.dtype}; {tuple(target.shape)} of integers needed")
    if shared:
        groups = groups - groups.min()
        if not torch.equal(groups.int(), groups_in_order(stored, target.shape[0]).to(groups.device)):
            raise ValueError(
                f"{name} has columns in another order than their groups; shares of ranks are read in order alone"
            )
    target.copy_(groups)


def load_stacked(
    part: Part, data: torch.Tensor, loaded: torch.Tensor, name: str, shard_id: str, share: Share, num_experts: int
) -> None:
    """Copy the tensor of all E experts into a parameter.

    Args: shard_id: "w13", both halves of w13, one after the other or in alternating rows; "w2"; "w1" or "w3", a half.
    Errors: ValueError for another shard, shape or dtype.
    """
    if shard_id not in ("w13", *SHARDS) or (shard_id == "w2") != (part.field == "w2"):
        fits = "w2" if part.field == "w2" else "w13, w1 or w3"
        raise ValueError(f"shard_id ({shard_id!r}) of {name} is not {fits}, the parameter is {part.name}")
    if loaded.dim() < 1 or loaded.shape[0] != num_experts:
        raise ValueError(f"{name} is {tuple(loaded.shape)}; ({num_experts}, ...) needed, all experts")
    if part.method is not None and shard_id == "w13":
        raise ValueError(f"shard_id ({shard_id!r}) of {name} has weights in int32, of which w1 and w3 are loaded apart")
    if shard_id != "w13" or part.is_number:
        ids = [shard_id] if shard_id != "w13" else ["w1", "w3"]
        for expert in range(num_experts):
            for index, shard in enumerate(ids):
                own = loaded[expert, index] if len(ids) > 1 and loaded.dim() > 1 else loaded[expert]
                load_expert(part, data, own, name, shard, expert, share)
        return
    local = _like(loaded[share.first : share.first + share.count], data, name)
    if share.alternating:
        own = _own(local, data.shape, 1, share, name)
        order = (own[:, 1::2], own[:, 0::2]) if share.up_first else (own[:, 0::2], own[:, 1::2])
        as_bytes(data).copy_(torch.cat(order, dim=1))
        return
    if local.shape[1] % 2:
        raise ValueError(f"{name} is {tuple(loaded.shape)}; an even number of rows needed")
    for half in (0, 1):
        _copy(part, _half(data, 1, half, share), local.chunk(2, 1)[half], 1, share, name)


def _copy(part: Part, target: torch.Tensor, loaded: torch.Tensor, axis: int | None, share: Share, name: str) -> None:
    own = _own(loaded, target.shape, axis, share, name)
    if part.what == "bias" and part.field == "w2" and share.tp_rank:  # the ranks' results are summed
        target.zero_()
    else:
        as_bytes(target).copy_(own)
