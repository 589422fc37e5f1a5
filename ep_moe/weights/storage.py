"""Tensors of a checkpoint directory, read a portion at a time: what a rank does not need it never touches.

safetensors maps files into memory, and every page that was read counts as this process' own until the file is closed;
so files are opened for one portion and closed again.

Letters: D the first dimension of a tensor.
"""

import dataclasses
import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

PORTION_BYTES = 16 << 20

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what it is."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of a safetensors file.

    Errors: ValueError names the file for one that is not as the format says, a file cut short above all, and the
    tensor for a dtype that is not read. Local.
    """
    tensors = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                entry = file.get_slice(name)
                if entry.get_dtype() not in DTYPES:
                    raise ValueError(f"{name} in {path} is {entry.get_dtype()}, not one of {', '.join(DTYPES)}")
                tensors[name] = StoredTensor(
                    name=name, file=path, dtype=DTYPES[entry.get_dtype()], shape=tuple(entry.get_shape())
                )
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is cut short: {error}") from None
    return tensors


def list_tensors(directory: str | Path) -> dict[str, StoredTensor]:
    """List the tensors of a checkpoint: of model.safetensors, or of the files that its index names.

    Errors: ValueError for a directory without either, an index that names an absent file, a tensor that is not in the
    file where the index puts it, and a tensor that two files hold. Local.
    """
    directory = Path(directory)
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file():
        return read_header(directory / SINGLE_FILE)
    if not index.is_file():
        raise ValueError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{index} is not an index with a weight_map: {error!r}") from None
    tensors: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        path = directory / file_name
        if not path.is_file():
            raise ValueError(f"{index} names {file_name}, which is not there")
        for name, stored in read_header(path).items():
            if name in tensors:
                raise ValueError(f"{name} is in two files, {tensors[name].file} and {path}")
            tensors[name] = stored
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != Path(file_name).name:
            raise ValueError(f"{name} is not in {directory / file_name}, where {index} puts it")
    return tensors


def read_into(stored: StoredTensor, out: torch.Tensor, *, index: int | None = None) -> None:
    """Read a tensor, or entry `index` of its first dimension, converting to the dtype and device of `out`.

    Args:
        stored: any shape, [D, ...] with an index. out: that shape, without D where there is an index.
    Reads at most `PORTION_BYTES`, or one row of `out`, beyond it at a time.
    Errors: ValueError for another shape. Local; synchronises with the device of `out`.
    """
    shape = stored.shape if index is None else stored.shape[1:]
    if tuple(out.shape) != shape:
        raise ValueError(f"{stored.name} in {stored.file} is {list(shape)}, the place for it {list(out.shape)}")
    row_bytes = math.prod(shape[1:]) * stored.dtype.itemsize
    rows = max(PORTION_BYTES // max(row_bytes, 1), 1)
    for start in range(0, shape[0] if shape else 1, rows):
        with safe_open(stored.file, framework="pt") as file:
            if not shape:
                out.copy_(file.get_tensor(stored.name) if index is None else file.get_slice(stored.name)[index])
            elif index is None:
                out[start : start + rows].copy_(file.get_slice(stored.name)[start : start + rows])
            else:
                out[start : start + rows].copy_(file.get_slice(stored.name)[index, start : start + rows])
