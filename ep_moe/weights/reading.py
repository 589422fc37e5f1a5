"""Reading one rank's experts from a checkpoint into the fields of `ExpertWeights`.

Letters: L local physical experts, H hidden, I intermediate; W = 2I if the activation is gated.
"""

import dataclasses
from typing import Any

import torch

from ep_moe.quant import QuantScheme, StoredMatrix, quantize_weight
from ep_moe.weights.checkpoint import Checkpoint
from ep_moe.weights.method import shared_scale
from ep_moe.weights.storage import TensorReader


def read_layer(
    checkpoint: Checkpoint,
    reader: TensorReader,
    layer: int,
    experts: tuple[int, ...],
    dtype: torch.dtype,
    scheme: QuantScheme,
    device: torch.device | str,
) -> dict[str, Any]:
    """The fields of `ExpertWeights` for some experts of a layer, those of `PerExpert` as "constants".

    `ExpertWeights.from_pretrained` has the arguments and the errors. Local; synchronizes with `device`.
    """
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
