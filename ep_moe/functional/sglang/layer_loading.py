"""The ranks that share a `FusedMoE`, and tensors of a checkpoint copied into its parameters.

Letters: E experts, L local experts.
"""

import dataclasses
from typing import Any

import torch

from ep_moe.functional.sglang.layer_formats import Part
from ep_moe.functional.sglang.layer_packed import needed_shape, store, store_order, unpacked
from ep_moe.quant import as_bytes

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


def _own(loaded: torch.Tensor, target: torch.Tensor, axis: int | None, share: Share, name: str) -> torch.Tensor:
    """This rank's share of a tensor along an axis. Errors: ValueError for another shape."""
    needed = list(target.shape)
    whole = axis is None or share.presharded
    if not whole:
        assert axis is not None
        needed[axis] *= share.tp_size
    if list(loaded.shape) != needed:
        raise ValueError(f"{name} is {tuple(loaded.shape)}; {tuple(needed)} needed")
    if whole or share.tp_size == 1:
        return loaded
    assert axis is not None
    return loaded.narrow(axis, share.tp_rank * target.shape[axis], target.shape[axis])


def load_expert(
    part: Part, data: torch.Tensor, loaded: torch.Tensor, name: str, shard_id: str, expert: int, share: Share
) -> None:
    """Copy a tensor of one expert into a parameter; one of another rank's experts is left out.

    Args:
        data: the parameter's. loaded: rows of the gate (w1) or the up half (w3), or all of w2. expert: among all E.
    Errors: ValueError for another shard, expert, shape or dtype.
    """
    if shard_id not in SHARDS or (shard_id == "w2") != (part.field == "w2"):
        fits = "w2" if part.field == "w2" else "w1 or w3"
        raise ValueError(f"shard_id ({shard_id!r}) of {name} is not {fits}, the parameter is {part.name}")
    place = expert if part.all_experts else expert - share.first
    if part.all_experts and not 0 <= expert < data.shape[0]:
        raise ValueError(f"expert_id ({expert}) of {name} is not in [0, {data.shape[0]})")
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
        rows = target.shape[0] // 2
        target = target.narrow(0, rows * (1 - half if share.up_first else half), rows)
    _copy(part, target, _like(loaded, target, name), part.shard, share, name)


def _load_packed(part: Part, target: torch.Tensor, loaded: torch.Tensor, name: str, half: int, share: Share) -> None:
    """Copy a tensor of one expert of a weight in int32; half: of w13."""
    if part.what == "unread":
        return
    ranks = 1 if share.presharded else share.tp_size
    if part.what == "order":
        shared = part.field == "w2" and share.tp_size > 1
        if shared and ranks > 1:
            like = torch.empty(target.shape, dtype=torch.float32, device="meta")
            loaded = _own(loaded, like, 0, share, name)
        store_order(part, target[half] if part.field == "w13" else target, loaded, shared, name)
        return
    if part.what == "middle":
        unpacked(part, loaded, 0, name)  # which checks them
        return
    rows, columns = needed_shape(part)
    first = part.field == "w13"
    rows = rows // 2 if first else rows
    found = unpacked(part, loaded, rows * (ranks if first else 1), name)
    whole = not first and part.what != "values" and target.dim() < 2  # a scale for each row
    own = _own(
        found,
        torch.empty(rows, columns, dtype=torch.float32, device="meta"),
        None if whole else 0 if first else 1,
        share,
        name,
    )
    if first:
        target = target.narrow(0, rows * (1 - half if share.up_first else half), rows)
    store(part, target, own)


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
    local = loaded[share.first : share.first + share.count]
    local = _like(local, data, name)
    if share.alternating:
        own = _own(local, data, 1, share, name)
        order = (own[:, 1::2], own[:, 0::2]) if share.up_first else (own[:, 0::2], own[:, 1::2])
        as_bytes(data).copy_(torch.cat(order, dim=1))
        return
    rows = data.shape[1] // 2
    for half in (0, 1):
        target = data.narrow(1, rows * (1 - half if share.up_first else half), rows)
        if local.shape[1] % 2:
            raise ValueError(f"{name} is {tuple(loaded.shape)}; an even number of rows needed")
        _copy(part, target, local.chunk(2, 1)[half], 1, share, name)


def _copy(part: Part, target: torch.Tensor, loaded: torch.Tensor, axis: int | None, share: Share, name: str) -> None:
    own = _own(loaded, target, axis, share, name)
    if part.what == "bias" and part.field == "w2" and share.tp_rank:  # the ranks' results are summed
        target.zero_()
    else:
        as_bytes(target).copy_(own)
