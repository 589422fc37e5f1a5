"""Reading one rank's experts from a checkpoint into the fields of `ExpertWeights`.

Letters: L local physical experts, H hidden, I intermediate; W = 2I if the activation is gated.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from ep_moe.config import DTYPES
from ep_moe.placement import Placement
from ep_moe.quant import QuantScheme, StoredMatrix, quantize_weight
from ep_moe.weights.checkpoint import Checkpoint
from ep_moe.weights.method import shared_scale
from ep_moe.weights.storage import TensorReader


def read_experts(
    checkpoint: Checkpoint,
    placement: Placement,
    rank: int,
    *,
    scheme: QuantScheme | None = None,
    layers: Iterable[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[int, dict[str, Any]]:
    """Read one rank's experts. `ExpertWeights.from_pretrained` has the arguments and the errors.

    Returns: layer -> the fields of `ExpertWeights`, with those of `PerExpert` as "constants". Local; synchronizes with
    `device`.
    """
    directory = checkpoint.directory
    if placement.num_experts != checkpoint.config.num_experts:
        raise ValueError(
            f"the placement has {placement.num_experts} experts, {directory} has {checkpoint.config.num_experts}"
        )
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype ({dtype}) is not one of {', '.join(DTYPES)}")
    chosen = list(checkpoint.layers if layers is None else layers)
    unknown = [layer for layer in chosen if layer not in checkpoint.layers]
    if unknown:
        raise ValueError(f"layer {unknown[0]} of {directory} has no experts; layers {list(checkpoint.layers)} have")
    stored_dtypes = {layer: checkpoint.check_layer(layer) for layer in chosen}
    experts = placement.local_experts(rank)
    found = {}
    with TensorReader() as reader:
        for layer in chosen:
            stored = checkpoint.layer_scheme(layer)
            chosen_dtype = dtype or (checkpoint.dtype if stored.weight.quantized else stored_dtypes[layer])
            found[layer] = _read_layer(checkpoint, reader, layer, experts, chosen_dtype, scheme or stored, device)
    return found


def _read_layer(
    checkpoint: Checkpoint,
    reader: TensorReader,
    layer: int,
    experts: tuple[int, ...],
    dtype: torch.dtype,
    scheme: QuantScheme,
    device: torch.device | str,
) -> dict[str, Any]:
    config, stored = checkpoint.config, checkpoint.layer_scheme(layer)
    width = config.w13_rows
    fields: dict[str, Any] = {"scheme": scheme}
    if scheme == stored and stored.weight.quantized:
        orders = checkpoint.column_orders(reader, layer)
        fields["w13_order"] = None if orders is None else orders[list(experts)].to(device)
        fields |= _input_scales(checkpoint, reader, layer, experts, device)
    for field, shape in {"w13": (width, config.hidden), "w2": (config.hidden, config.intermediate)}.items():
        stack = StoredMatrix.empty((len(experts), *shape), scheme.weight, dtype, device)
        fields[field] = stack
        if not scheme.weight.quantized:
            for position, expert in enumerate(experts):
                checkpoint.read_field(reader, layer, field, expert, stack.values[position])
            continue
        if scheme == stored:
            shared = [
                checkpoint.read_stored(reader, layer, field, expert, stack[position])
                for position, expert in enumerate(experts)
            ]
            if stack.global_scale is not None and shared and len(shared[0]) > 1:
                one, fields["constants"] = shared_scale(torch.stack([torch.stack(s) for s in shared]), scheme.weight)
                stack.global_scale.copy_(one)
            continue
        matrix = torch.empty(shape, dtype=torch.float32 if stored.weight.quantized else dtype, device=device)
        stricter = stored.weight != scheme.weight == dataclasses.replace(stored.weight, power_of_two=True)
        for position, expert in enumerate(experts):
            if stricter:  # the same bits, if the scales on disk are powers of two
                checkpoint.read_stored(reader, layer, field, expert, stack[position])
                scale = stack[position].scale
                if scale is not None and bool((torch.frexp(scale).mantissa == 0.5).all()):
                    continue
            checkpoint.read_field(reader, layer, field, expert, matrix)
            stack[position].copy_(quantize_weight(matrix, scheme))
    for field, size in {"w13_bias": width, "w2_bias": config.hidden}.items():
        if any(tensor.field == field for tensor in checkpoint.layers[layer]):
            fields[field] = torch.empty(len(experts), size, dtype=dtype, device=device)
            for position, expert in enumerate(experts):
                checkpoint.read_field(reader, layer, field, expert, fields[field][position])
    return fields


def _input_scales(
    checkpoint: Checkpoint, reader: TensorReader, layer: int, experts: tuple[int, ...], device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Static activation scales of a layer, if the checkpoint has them. All tokens have one scale, the largest of all
    experts, as in vLLM."""
    first, second = (checkpoint.input_scales(reader, layer, field) for field in ("w13", "w2"))
    if first is None or second is None:
        return {}
    return {"w13_input_scale": first.amax().reshape(1).to(device), "w2_input_scale": second[list(experts)].to(device)}
