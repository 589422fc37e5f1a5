"""Tensor maps: descriptions of tensors in global memory for TMA, the copy engine of Hopper's SMs.

Structures and constants are those of cuda.h.
"""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_BYTES = 128  # of a CUtensorMap
_ALIGNMENT = 64
_L2_PROMOTION_128_BYTES = 2
_HOST_TYPES = {8: 10, 9: 8, 10: 9}  # CUtensorMapDataType by Triton's number of it, where they differ


class Describes(Protocol):
    """Triton's TensorDescriptor: `base` is the tensor, or has its address and dtype."""

    base: Any
    shape: Sequence[int]
    strides: Sequence[int]


class Address:
    """An address that stands for a tensor in a descriptor; the tensor's memory is not kept alive."""

    def __init__(self, address: int, dtype: Any) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        """The address."""
        return self._address


def is_descriptor(argument: Any) -> bool:
    """True for a TensorDescriptor, of Triton or of Gluon. Local."""
    return hasattr(argument, "block_shape")


def address_of(argument: Any) -> int:
    """The address of a tensor, or of the one that a descriptor describes. Local."""
    return int((argument.base if is_descriptor(argument) else argument).data_ptr())


class TensorMap:
    """A CUtensorMap in host memory, an argument of a kernel, whose tensor may move.

    Args:
        driver: the CUDA driver's library.
        descriptor: the tensor's shape and strides, in elements, and its address.
        metadata: the compiler's choices, an entry of its `tensordesc_meta`.

    Attributes:
        address: of the CUtensorMap.
    Errors: RuntimeError if the driver refuses it. Local.
    """

    def __init__(self, driver: Any, descriptor: Describes, metadata: Mapping[str, Any]) -> None:
        self._memory = ctypes.create_string_buffer(_BYTES + _ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % _ALIGNMENT
        self._replace = driver.cuTensorMapReplaceAddress
        self._replace.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        rank, item_bytes = len(descriptor.shape), metadata["elem_size"]
        sizes = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
        strides = (ctypes.c_uint64 * rank)(*(each * item_bytes for each in reversed(descriptor.strides[:-1])))
        box = (ctypes.c_uint32 * rank)(*reversed(metadata["block_size"]))
        steps = (ctypes.c_uint32 * rank)(*[1] * rank)
        self._tensor = address_of(descriptor)
        data_type = _HOST_TYPES.get(metadata["elem_type"], metadata["elem_type"])
        encode = driver.cuTensorMapEncodeTiled
        encode.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *[ctypes.c_void_p] * 5, *[ctypes.c_int] * 4]
        status = encode(
            self.address,
            data_type,
            rank,
            self._tensor,
            *[ctypes.addressof(array) for array in (sizes, strides, box, steps)],
            0,  # not interleaved
            metadata["swizzle"],
            _L2_PROMOTION_128_BYTES,
            0,  # zeros out of bounds
        )
        if status:
            raise RuntimeError(f"the CUDA driver made no tensor map of {descriptor} (CUresult {status})")

    def move(self, tensor: int) -> None:
        """From now on, describe the tensor at this address, which is aligned to 16 bytes. Local."""
        if tensor != self._tensor:
            status = self._replace(self.address, tensor)
            if status:
                raise RuntimeError(f"the CUDA driver did not move a tensor map to {tensor:#x} (CUresult {status})")
            self._tensor = tensor
