"""Tensors of a checkpoint directory, read in portions: a rank reads only the tensors that it needs.

safetensors checks the headers; tensors are read from the file directly into their destination. safetensors itself maps
the file, so that every page read counts as this process' memory until the file is closed.
"""

import dataclasses
import io
import math
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ep_moe.fields import shown, typed
from ep_moe.weights.json_files import parse_object, read_object

PORTION_BYTES = 16 << 20

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

SAFETENSORS_DTYPES = {
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
    """A tensor in a file: its location, dtype and shape."""

    name: str
    file: Path
    offset: int  # of its first byte in the file
    dtype: torch.dtype
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> "StoredTensor":
        """Entries [start, stop) of the first dimension. Local."""
        offset = self.offset + start * math.prod(self.shape[1:]) * self.dtype.itemsize
        return dataclasses.replace(self, offset=offset, shape=(stop - start, *self.shape[1:]))

    def entry(self, index: int) -> "StoredTensor":
        """Entry `index` of the first dimension. Local."""
        return dataclasses.replace(self.rows(index, index + 1), shape=self.shape[1:])

    def reshaped(self, shape: tuple[int, ...]) -> "StoredTensor":
        """The same tensor with another shape. Errors: ValueError if the number of elements differs. Local."""
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"{self.name} in {self.file} is {list(self.shape)}, the place for it {list(shape)}")
        return dataclasses.replace(self, shape=shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of a safetensors file: 8 bytes of header length, a JSON header, then the data
    (https://github.com/huggingface/safetensors, "Format").

    Errors: ValueError names the file if it violates the format, for example because it is truncated, and the tensor
    if its dtype is not supported. Local.
    """
    tensors = {}
    try:
        with safe_open(path, framework="pt"):  # checks the whole header, and the length of the file against it
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is cut short: {error}") from None
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = parse_object(file.read(header_bytes), str(path))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in SAFETENSORS_DTYPES:
            raise ValueError(f"{name} in {path} is {entry['dtype']}, not one of {', '.join(SAFETENSORS_DTYPES)}")
        tensors[name] = StoredTensor(
            name=name,
            file=path,
            offset=8 + header_bytes + entry["data_offsets"][0],
            dtype=SAFETENSORS_DTYPES[entry["dtype"]],
            shape=tuple(entry["shape"]),
        )
    return tensors


def list_tensors(directory: str | Path) -> dict[str, StoredTensor]:
    """List the tensors of a checkpoint: of model.safetensors, or of the files that its index names.

    An index may only name files in the checkpoint's own folder: ".." and absolute paths are refused. Files may be
    symbolic links that lead out of it, as in Hugging Face's cache.

    Errors: ValueError for a directory without either, an index that violates the above or names an absent file, a
    tensor that is not in the file that the index names for it, and a tensor in two files. Local.
    """
    directory = Path(directory)
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file():
        return read_header(directory / SINGLE_FILE)
    if not index.is_file():
        raise ValueError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = _read_weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        path = directory / file_name
        if not os.path.isfile(path):  # also False for a name that no file can have
            raise ValueError(f"{index} names {shown(file_name)}, which is not there")
        for name, stored in read_header(path).items():
            if name in tensors:
                raise ValueError(f"{name} is in two files, {tensors[name].file} and {path}")
            tensors[name] = stored
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file != directory / file_name:
            raise ValueError(f"{name} is not in {directory / file_name}, where {index} puts it")
    return tensors


def _read_weight_map(index: Path) -> dict[str, str]:
    """The index's map from tensor to file, checked to stay within its folder."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: weight_map ({shown(weight_map)}) is not a JSON object")
    if not weight_map:
        raise ValueError(f"{index}: weight_map is empty")
    for name, file_name in weight_map.items():
        place = Path(typed(file_name, str, f"{index}: weight_map: {name}"))
        if place.anchor or ".." in place.parts:
            raise ValueError(f"{index}: weight_map: {name} ({shown(file_name)}) is not in the checkpoint's folder")
    return weight_map


class TensorReader:
    """Reads tensors one after the other, and keeps the last file open.

    A context manager, which closes the file and frees the buffer at its end. Not thread-safe.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: io.FileIO | None = None
        self._portion = torch.empty(0, dtype=torch.uint8, device="cpu")  # staging buffer for another dtype or device

    def __enter__(self) -> "TensorReader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file and free the staging buffer; a later read gets new ones. Local, calling it twice is fine."""
        if self._file is not None:
            self._file.close()
        self._path, self._file, self._portion = None, None, self._portion.new_empty(0)

    def read_into(self, stored: StoredTensor, out: torch.Tensor) -> None:
        """Read a tensor's values, converting to the dtype and device of `out`.

        Args:
            stored: any shape. out: that shape, any strides.
        The staging buffer holds at most `PORTION_BYTES`, or one row of `out`.
        Errors: ValueError for another shape, or if the file has been truncated since. Local; synchronizes with the
        device of `out`.
        """
        shape = stored.shape
        if tuple(out.shape) != shape:
            raise ValueError(f"{stored.name} in {stored.file} is {list(shape)}, the place for it {list(out.shape)}")
        file = self._open(stored.file)
        file.seek(stored.offset)
        out = out.detach().reshape(1) if not shape else out.detach()
        row_bytes = math.prod(out.shape[1:]) * stored.dtype.itemsize
        rows = max(PORTION_BYTES // max(row_bytes, 1), 1)
        for start in range(0, out.shape[0], rows):
            place = out[start : start + rows]
            if place.device.type == "cpu" and place.dtype == stored.dtype and place.is_contiguous():
                _fill(file, place, stored)
                continue
            num_bytes = place.shape[0] * row_bytes
            if self._portion.numel() < num_bytes:
                self._portion = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            portion = self._portion[:num_bytes].view(stored.dtype).view(place.shape)
            _fill(file, portion, stored)
            place.copy_(portion)

    def _open(self, path: Path) -> io.FileIO:
        if self._file is None or self._path != path:
            self.close()
            self._path, self._file = path, open(path, "rb", buffering=0)  # noqa: SIM115
        return self._file


def _fill(file: io.FileIO, tensor: torch.Tensor, stored: StoredTensor) -> None:
    """Read a contiguous CPU tensor from the file's current position."""
    rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
    while rest:
        num_bytes = file.readinto(rest)
        if not num_bytes:
            raise ValueError(f"{stored.file} ends within {stored.name}: it was cut short while it was read")
        rest = rest[num_bytes:]
