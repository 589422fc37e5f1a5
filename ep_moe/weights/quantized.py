"""Weights that several tensors of a checkpoint store together: values, scales and zero points.

Letters: E stacked experts, N and K rows and columns of a weight, G scale groups of a row, P elements of one int32.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from ep_moe.config import DTYPES
from ep_moe.quant import QuantScheme, StoredMatrix, TensorFormat, dequantize_weight, pack_nibbles
from ep_moe.weights import storage
from ep_moe.weights.method import Method
from ep_moe.weights.packing import unpack_awq, unpack_columns, unpack_rows
from ep_moe.weights.storage import StoredTensor, TensorReader

FLOATS = tuple(DTYPES.values())
SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)  # all convert to float32 without rounding


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedTensor:
    """A weight [..., N, K] that several tensors store. `dtype` and `file` are those of its values."""

    name: str
    shape: tuple[int, ...]
    method: Method
    parts: Mapping[str, StoredTensor]  # those of `StoredMatrix`, "order" and "input_scale"

    @property
    def dtype(self) -> torch.dtype:
        """Of the values on disk."""
        return self.parts["values"].dtype

    @property
    def file(self) -> Path:
        """Of the values."""
        return self.parts["values"].file

    def entry(self, index: int) -> "QuantizedTensor":
        """Entry `index` of the first dimension of stacked weights. Local."""
        parts = {name: part.entry(index) for name, part in self.parts.items()}
        return dataclasses.replace(self, shape=self.shape[1:], parts=parts)


AnyTensor = StoredTensor | QuantizedTensor


def collect(tensors: Mapping[str, StoredTensor], method: Method | None) -> dict[str, AnyTensor]:
    """Group the tensors of each quantized weight, by the weight's name; all other tensors stay.

    Errors: ValueError names a part that is missing or has a wrong shape or an unsupported dtype. Local.
    """
    if method is None:
        return dict(tensors)
    found: dict[str, AnyTensor] = {}
    used: set[str] = {name for name in tensors if name.endswith((".k_scale", ".v_scale"))}  # of a quantized cache
    for name, values in tensors.items():
        if name.endswith(method.values) and values.dtype == method.values_dtype and len(values.shape) > 1:
            base = name.removesuffix(method.values)
            own = method.of(base)
            if own is None:
                raise ValueError(f"{name} in {values.file} is quantized, and a rule of the config says that it is not")
            weight = _put_together(base, values, tensors, own)
            found[weight.name] = weight
            used |= {name, *(part.name for part in weight.parts.values())}
            used |= {f"{base}{suffix}" for suffix in (*method.dropped, method.order, method.input_scale) if suffix}
        elif name.endswith(method.values) and values.dtype == method.values_dtype:
            raise ValueError(f"{name} in {values.file} is {list(values.shape)} {values.dtype}, which is no matrix")
    return found | {name: stored for name, stored in tensors.items() if name not in used}


def _put_together(
    base: str, values: StoredTensor, tensors: Mapping[str, StoredTensor], method: Method
) -> QuantizedTensor:
    parts = {"values": values}
    for part, suffix in method.parts.items():
        stored = tensors.get(f"{base}{suffix}")
        if stored is None:
            raise ValueError(f"{values.name} in {values.file} is {values.dtype}, but {base}{suffix} is missing")
        parts[part] = stored
    for part, optional in (("order", method.order), ("input_scale", method.input_scale)):
        if optional is not None and f"{base}{optional}" in tensors:
            parts[part] = tensors[f"{base}{optional}"]
    if method.ordered and "order" not in parts:
        raise ValueError(f"{base}{method.order} is missing, {values.file} has {values.name}: the config has act-order")
    method = method.for_scale(parts["scale"].dtype)
    dtypes = {
        "scale": _scale_dtypes(method.stored),
        "zero": (torch.int32,),
        "global_scale": (torch.float32,),
        "order": (torch.int32, torch.int64),
        "input_scale": FLOATS,
    }
    try:
        shape = method.weight_shape(values.shape)
        shapes = method.part_shapes(shape)
    except ValueError as error:
        raise ValueError(f"{values.name} in {values.file} is {list(values.shape)}: {error}") from None
    for part, stored in parts.items():
        if part != "values" and (stored.shape not in shapes[part] or stored.dtype not in dtypes[part]):
            needed = " or ".join(str(list(size)) for size in shapes[part])
            raise ValueError(
                f"{stored.name} in {stored.file} is {list(stored.shape)} {stored.dtype}; {method.name} values "
                f"{list(values.shape)} of a weight {list(shape)} need {needed} of "
                f"{', '.join(str(dtype) for dtype in dtypes[part])}"
            )
    return QuantizedTensor(name=f"{base}{method.weight}", shape=shape, method=method, parts=parts)


def _scale_dtypes(stored: TensorFormat) -> tuple[torch.dtype, ...]:
    if stored.scale_dtype == torch.float8_e8m0fnu:
        return torch.uint8, torch.float8_e8m0fnu
    if stored.family == "scaled":
        return SCALE_DTYPES
    return FLOATS if stored.family == "integer" else (stored.scale_dtype,)


def _rows_of(part: StoredTensor, start: int, stop: int, tile_rows: int, num_rows: int) -> StoredTensor:
    """The rows of a part that rows [start, stop) of a weight of `num_rows` need; a part without rows is whole."""
    if not part.shape or part.shape[0] != math.ceil(num_rows / tile_rows):
        return part
    return part.rows(start // tile_rows, math.ceil(stop / tile_rows))


def _read(reader: TensorReader, part: StoredTensor, device: torch.device) -> torch.Tensor:
    out = torch.empty(part.shape, dtype=part.dtype, device=device)
    reader.read_into(part, out)
    return out


def read_order(reader: TensorReader, weight: QuantizedTensor, device: torch.device) -> torch.Tensor | None:
    """The columns [K] of a weight [N, K] in the order of their groups; None if that is their order.

    Errors: ValueError for groups of another size than the config's, and for columns of MXFP4 and NVFP4 in another
    order. Local; synchronizes with `device`.
    """
    part, stored = weight.parts.get("order"), weight.method.stored
    if part is None or stored.granularity != "group":
        return None
    groups = _read(reader, part, device).long()
    expected = torch.arange(weight.shape[-1], device=device) // stored.block[1]
    if torch.equal(groups, expected):
        return None
    if weight.method.packing == "plain" and stored.packed > 1:
        raise ValueError(
            f"{part.name} in {part.file} has columns in another order than their groups, which is not read in "
            f"{weight.method.scheme.name}"
        )
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], expected):
        raise ValueError(f"{part.name} in {part.file} does not have {stored.block[1]} columns in each group")
    return order


def read_matrix(
    reader: TensorReader,
    weight: QuantizedTensor,
    device: torch.device,
    *,
    rows: tuple[int, int] | None = None,
    order: torch.Tensor | None = None,
) -> StoredMatrix:
    """Read a weight [N, K] as `weight.method.stored` describes it.

    Args:
        rows: only these, [start, stop), both multiples of the rows that share a scale; in packing "plain" alone.
        order: that of `read_order`: columns are returned in it.
    Errors: ValueError for a negative scale, or zero points that contradict the config. Local; synchronizes with
        `device`.
    """
    method, (num_rows, _) = weight.method, weight.shape
    stored, scale_part, values_part = method.stored, weight.parts["scale"], weight.parts["values"]
    values_part = values_part.reshaped((values_part.shape[0], math.prod(values_part.shape[1:])))
    start, stop = (0, num_rows) if rows is None else rows
    tile_rows = stored.tile(*weight.shape)[0]
    values = _read(reader, _rows_of(values_part, start, stop, 1, num_rows) if rows else values_part, device)
    scale = _read(reader, _rows_of(scale_part, start, stop, tile_rows, num_rows) if rows else scale_part, device)
    zero, packed = None, method.packing != "plain"
    if packed:
        values, scale, zero = _unpacked(reader, weight, values, scale, device)
    if order is not None:
        values = values[:, order]
    if packed:
        values = as_stored(values, stored)
    shape = stored.scale_shape((stop - start, weight.shape[-1]))
    scale = scale.view(stored.scale_dtype) if stored.scale_dtype.itemsize == 1 else scale.to(stored.scale_dtype)
    scale = scale.reshape(shape)
    if stored.scale_dtype != torch.float8_e8m0fnu and bool((scale.float() < 0).any()):
        raise ValueError(f"{scale_part.name} in {scale_part.file} has negative scales")
    global_part = weight.parts.get("global_scale")
    global_scale = None
    if global_part is not None:
        global_scale = _read(reader, global_part, device).reshape(())
        if not bool(global_scale > 0):
            raise ValueError(f"{global_part.name} in {global_part.file} is {global_scale.item()}, not positive")
    zero = None if zero is None else zero.reshape(shape)
    return StoredMatrix(values, scale=scale, zero=zero, global_scale=global_scale)


def _unpacked(
    reader: TensorReader, weight: QuantizedTensor, values: torch.Tensor, scale: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Values [N, K], scales [N, G] and zero points [N, G] of integers in int32, one in each byte."""
    method, part = weight.method, weight.parts.get("zero")
    zero = None
    if part is not None:
        zero = unpacked_zeros(method, _read(reader, part, device), weight.shape[0], f"{part.name} in {part.file}")
    by_row = scale if method.packing == "int32" else scale.t()
    return unpacked_values(method, values), by_row, None if method.middle_zero else zero


def unpacked_values(method: Method, packed: torch.Tensor) -> torch.Tensor:
    """A weight in int32, packed as `method.packing`, as uint8 [N, K], one element in each. Local."""
    if method.packing == "int32":
        return unpack_columns(packed, method.bits)
    return (unpack_awq(packed) if method.packing == "awq" else unpack_rows(packed, method.bits)).t()


def unpacked_zeros(method: Method, packed: torch.Tensor, num_rows: int, name: str) -> torch.Tensor:
    """Zero points in int32, packed as `method.packing`, as uint8 [N, G].

    Args: num_rows: N. name: in errors.
    Errors: ValueError for zero points that contradict the config. Local; may synchronize with the device.
    """
    if method.packing == "int32":
        return unpack_rows(packed, method.bits)[:num_rows]
    if method.packing == "awq":
        return unpack_awq(packed).t()
    zero = unpack_columns(packed, method.bits).t()
    if method.packing == "gptq":
        zero = (zero + 1) & (2**method.bits - 1)  # a zero point is a code: 0 minus 1 is stored as the largest code
    middle = 2 ** (method.bits - 1)
    if method.middle_zero and not bool((zero == middle).all()):
        raise ValueError(f"{name} has zero points other than {middle}, but the config says that weights are symmetric")
    return zero


def as_stored(codes: torch.Tensor, stored: TensorFormat) -> torch.Tensor:
    """Elements [N, K] as uint8 in the form of `StoredMatrix.values`: two in a byte, or around zero in int8. Local."""
    values = pack_nibbles(codes) if stored.packed == 2 else codes
    return (values ^ 128).view(torch.int8) if stored.dtype == torch.int8 else values


def read_dequantized(reader: TensorReader, weight: AnyTensor, out: torch.Tensor) -> None:
    """Read a tensor into `out`, dequantized if it is quantized, converted to the dtype of `out`.

    Args:
        weight: [N, K] if it is quantized, else any shape. out: that shape, or one with as many elements.
    Extra memory: a portion, or one row of blocks, of stored values and of dequantized values; the whole weight if it is
        integers in int32, or if `out` has another shape.
    Errors: as of `TensorReader.read_into` and `read_matrix`. Local; synchronizes with the device of `out`.
    """
    if isinstance(weight, StoredTensor):
        reader.read_into(weight.reshaped(tuple(out.shape)), out)
        return
    if tuple(out.shape) != weight.shape:
        whole = torch.empty(weight.shape, dtype=out.dtype, device=out.device)
        read_dequantized(reader, weight, whole)
        out.copy_(whole.reshape(out.shape))
        return
    method, disk = weight.method, QuantScheme(name=weight.method.name, weight=weight.method.stored)
    num_rows, columns = weight.shape
    order = read_order(reader, weight, out.device)
    tile_rows = method.stored.tile(*weight.shape)[0]
    step = max(storage.PORTION_BYTES // (columns * tile_rows * torch.float32.itemsize), 1) * tile_rows
    portions = [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
    for rows in portions if method.packing == "plain" else [None]:
        real = dequantize_weight(read_matrix(reader, weight, out.device, rows=rows, order=order), disk)
        place = out if rows is None else out[slice(*rows)]
        place.copy_(real if order is None else torch.empty_like(real).index_copy_(1, order, real))
