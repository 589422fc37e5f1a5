"""Writing a checkpoint whose experts are quantized, in the layouts that `ep_moe.weights.methods` reads.

fp8 in blocks has DeepSeek's layout, gpt-oss in MXFP4 its own, NVFP4 with a multiplier modelopt's; all other schemes
have that of compressed-tensors.
Letters: I intermediate, H hidden, N and K rows and columns of a weight.
"""

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ep_moe.quant import QuantScheme, StoredMatrix, TensorFormat, quantize_weight
from ep_moe.weights.checkpoint import Checkpoint
from ep_moe.weights.families import ExpertTensor
from ep_moe.weights.methods import method_of
from ep_moe.weights.packing import pack_columns, pack_rows
from ep_moe.weights.quantized import AnyTensor
from ep_moe.weights.storage import INDEX_FILE, StoredTensor, TensorReader

SHARD_BYTES = 1 << 30  # of a file of tensors that are not experts, which may be one larger tensor
NOT_COPIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf")
Config = dict[str, Any]


def quantization_config(scheme: QuantScheme, *, gpt_oss: bool, ignored: list[str]) -> Config:
    """The `quantization_config` of a checkpoint with experts in `scheme`.

    Args:
        gpt_oss: True for that model family. ignored: modules that are not quantized.
    Errors: ValueError for a scheme without a layout on disk, and for gpt-oss in another scheme than MXFP4. Local.
    """
    weight = scheme.weight
    if gpt_oss:
        if scheme.name != "mxfp4_w4a16":
            raise ValueError(f"gpt-oss is written in mxfp4_w4a16, not in {scheme.name!r}")
        return {"quant_method": "mxfp4", "modules_to_not_convert": ignored}
    algorithm = {"nvfp4": "NVFP4", "nvfp4_w4a16": "W4A16_NVFP4"}.get(scheme.name)
    if algorithm is not None:
        return {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": weight.block[1], "ignore": ignored}
    if scheme.name.startswith("fp8_block") and not weight.power_of_two:
        blocks = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(weight.block)}
        return {"quant_method": "fp8", **blocks, "modules_to_not_convert": ignored}
    form = _compressed_form(weight)
    if form is None or weight.power_of_two != (weight.family == "micro" and weight.global_scale == "none"):
        raise ValueError(f"scheme {scheme.name!r} has no layout on disk; its scales are {weight.scale_dtype}")
    dynamic = "local" if scheme.payload.packed == 2 else True
    tokens = _arguments(scheme.payload) | {"dynamic": dynamic, "symmetric": True} if scheme.payload.quantized else None
    group = {
        "targets": ["Linear"],
        "weights": _arguments(weight) | {"dynamic": False, "symmetric": not weight.zero_point},
        "input_activations": tokens,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _compressed_form(weight: TensorFormat) -> str | None:
    """compressed-tensors' name of the layout; None for NVFP4 with a multiplier, which is modelopt's."""
    if weight.family == "integer" or (weight.dtype == torch.int8 and weight.granularity == "group"):
        return "pack-quantized"
    if weight.family == "scaled":
        return "int-quantized" if weight.dtype == torch.int8 else "float-quantized"
    if weight.power_of_two:
        return "mxfp4-pack-quantized" if weight.packed == 2 else "mxfp8-quantized"
    return "nvfp4-pack-quantized" if weight.global_scale == "divisor" else None


def _arguments(stored: TensorFormat) -> Config:
    """compressed-tensors' QuantizationArgs."""
    integers = stored.family == "integer" or stored.dtype == torch.int8
    nvfp4 = stored.packed == 2 and stored.family == "micro" and not stored.power_of_two
    found: Config = {
        "num_bits": 8 // stored.packed,
        "type": "int" if integers else "float",
        "strategy": "tensor_group" if nvfp4 else stored.granularity,
    }
    if stored.granularity == "group":
        found["group_size"] = stored.block[1]
    if stored.granularity == "block":
        found["block_structure"] = list(stored.block)
    if stored.family == "micro" and stored.power_of_two:
        found["scale_dtype"] = "torch.uint8"  # distinguishes mxfp8 from fp8 in groups
    return found


def stored_parts(matrix: StoredMatrix, stored: TensorFormat, config: Config) -> dict[str, torch.Tensor]:
    """The tensors of a weight [N, K] on disk by their suffix, as `quantization_config` describes them. Local."""
    method = method_of({"quantization_config": config}, "config")
    assert method is not None
    assert matrix.scale is not None
    values, scale = matrix.values, matrix.scale
    if method.packing == "int32":
        bits = 8 // stored.packed
        plain = values.view(torch.uint8) ^ 128 if values.dtype == torch.int8 else values
        values = (plain if bits == 4 else pack_columns(plain, bits)).contiguous().view(torch.int32)
    if config["quant_method"] == "mxfp4":
        values = values.unflatten(-1, (-1, 16))
    if stored.scale_dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    if stored.granularity in ("channel", "tensor") and config["quant_method"] == "compressed-tensors":
        scale = scale.unsqueeze(-1)
    parts = {method.values: values, method.parts["scale"]: scale}
    if matrix.zero is not None:
        zeros = matrix.zero.unsqueeze(-1) if matrix.zero.dim() == 1 else matrix.zero
        parts[method.parts["zero"]] = pack_rows(zeros, 8 // stored.packed)
    if matrix.global_scale is not None:
        divides = config["quant_method"] == "compressed-tensors"
        parts[method.parts["global_scale"]] = matrix.global_scale.reshape((1,) if divides else ()).clone()
    if method.packing == "int32":
        columns = matrix.values.shape[-1] * stored.packed
        parts[".weight_shape"] = torch.tensor([matrix.values.shape[-2], columns], device="cpu")
    return {suffix: tensor.contiguous() for suffix, tensor in parts.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What `write_quantized` wrote: layers with experts, bytes of the experts before and after."""

    layers: int
    bytes_before: int
    bytes_after: int


def write_quantized(checkpoint: Checkpoint, scheme: QuantScheme, directory: Path) -> Written:
    """Write a checkpoint with its experts in `scheme`, and all other tensors and files as they are.

    The experts of one layer, or `SHARD_BYTES` of other tensors, are in memory at a time; config.json is written last.
    Multi-token prediction layers are left out, as `Checkpoint` leaves them out.

    Args:
        checkpoint: unquantized. scheme: any that quantizes weights and has a layout on disk.
        directory: absent or empty.
    Errors: ValueError for another checkpoint, scheme or directory, and as of `quantize_weight`. Local.
    """
    if checkpoint.method is not None:
        raise ValueError(f"{checkpoint.directory} is quantized already ({checkpoint.method.name})")
    if not scheme.weight.quantized:
        raise ValueError(f"scheme {scheme.name!r} does not quantize weights")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty")
    raw, moe, weight = checkpoint.raw, checkpoint.config, scheme.weight
    dense = {name: stored for name, stored in checkpoint.tensors.items() if not checkpoint.is_expert(name)}
    ignored = sorted(
        name.removesuffix(".weight")
        for name, stored in dense.items()
        if name.endswith(".weight") and len(stored.shape) == 2 and "embed" not in name
    )
    config = quantization_config(
        scheme, gpt_oss=raw["model_type"] == "gpt_oss", ignored=list(dict.fromkeys((*ignored, "lm_head")))
    )
    for columns in (moe.hidden, moe.intermediate):
        weight.scale_shape((moe.w13_rows, columns))  # raises for groups that do not divide a row
        if config["quant_method"] == "mxfp4" and columns % weight.block[1]:
            raise ValueError(f"gpt-oss' blocks of {weight.block[1]} do not divide a row of {columns}")
    for layer in checkpoint.all_layers():
        checkpoint.check_layer(layer)
    directory.mkdir(parents=True, exist_ok=True)
    shards = _shards(dense)
    num_files, after = len(shards) + len(checkpoint.layers), 0
    weight_map: dict[str, str] = {}

    def write(found: dict[str, torch.Tensor], number: int) -> int:
        file = f"model-{number:05}-of-{num_files:05}.safetensors"
        try:
            save_file(found, directory / file, metadata={"format": "pt"})
        except SafetensorError as error:  # of the disk
            raise OSError(f"{directory / file}: {error}") from error
        (directory / file).chmod(directory.stat().st_mode & 0o666)  # it is the owner's alone
        weight_map.update(dict.fromkeys(found, file))
        return sum(tensor.numel() * tensor.element_size() for tensor in found.values())

    with TensorReader() as reader:
        for number, shard in enumerate(shards, 1):
            write(_read_all(reader, shard), number)
        for number, layer in enumerate(checkpoint.layers, len(shards) + 1):
            after += write(dict(_experts(checkpoint, reader, layer, scheme, config)), number)
    before = sum(_num_bytes(stored) for name, stored in checkpoint.tensors.items() if checkpoint.is_expert(name))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2))
    for path in checkpoint.directory.iterdir():
        if path.is_file() and path.name != "config.json" and not path.name.endswith(NOT_COPIED):
            shutil.copy(path, directory / path.name)
    (directory / "config.json").write_text(json.dumps({**raw, "quantization_config": config}, indent=2))
    return Written(layers=len(checkpoint.layers), bytes_before=before, bytes_after=after)


def _num_bytes(stored: AnyTensor) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize


def _shards(tensors: Mapping[str, AnyTensor]) -> list[dict[str, AnyTensor]]:
    """The tensors in parts of `SHARD_BYTES` at most, or of one tensor."""
    shards, total = list[dict[str, AnyTensor]](), 0
    for name, stored in tensors.items():
        total += _num_bytes(stored)
        if not shards or total > SHARD_BYTES:
            shards.append({})
            total = _num_bytes(stored)
        shards[-1][name] = stored
    return shards


def _read_all(reader: TensorReader, tensors: Mapping[str, AnyTensor]) -> dict[str, torch.Tensor]:
    """The tensors of an unquantized checkpoint, in their dtype on disk."""
    found = {}
    for name, stored in tensors.items():
        assert isinstance(stored, StoredTensor)
        found[name] = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        reader.read_into(stored, found[name])
    return found


def _experts(
    checkpoint: Checkpoint, reader: TensorReader, layer: int, scheme: QuantScheme, config: Config
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a layer's experts by name. Gate and up share a global scale, as engines expect."""
    moe, form = checkpoint.config, checkpoint.family.forms[0]
    stacked: dict[str, list[torch.Tensor]] = {}
    for expert in range(moe.num_experts):
        for field, shape in {"w13": (moe.w13_rows, moe.hidden), "w2": (moe.hidden, moe.intermediate)}.items():
            matrix = torch.empty(shape, dtype=torch.float32, device="cpu")
            checkpoint.read_field(reader, layer, field, expert, matrix)
            separate = scheme.weight.granularity in ("block", "tensor")
            whole = None if separate else quantize_weight(matrix, scheme)
            for tensor in form:
                if tensor.field != field:
                    continue
                part = quantize_weight(tensor.place(matrix), scheme) if whole is None else _rows(whole, tensor)
                name = tensor.name.format(layer=layer, expert=expert)
                for suffix, value in stored_parts(part, scheme.weight, config).items():
                    if tensor.stacked:
                        stacked.setdefault(f"{name.removesuffix('_blocks')}{suffix}", []).append(value)
                    else:
                        yield (name.removesuffix(".weight") if suffix[:1] == "." else name) + suffix, value
    for name, values in stacked.items():
        yield name, torch.stack(values)
    for tensor in form:
        if "bias" in tensor.field:
            name = tensor.name.format(layer=layer)
            yield from _read_all(reader, {name: checkpoint.tensors[name]}).items()


def _rows(matrix: StoredMatrix, tensor: ExpertTensor) -> StoredMatrix:
    """The rows of [gate; up] that a tensor of the checkpoint holds, in its order."""

    def cut(part: torch.Tensor) -> torch.Tensor:
        return tensor.place(part).reshape(-1, *part.shape[1:]) if tensor.interleaved else tensor.place(part)

    return matrix.map(lambda part: cut(part).contiguous() if part.dim() else part)
