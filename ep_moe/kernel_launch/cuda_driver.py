"""Launches through the CUDA driver, from an array of arguments that is updated in place.

Triton's front end inspects every argument of every launch, and its launcher unpacks them one by one: that takes the
host several times as long as a small exchange takes the GPU. Structures and constants are those of cuda.h.
"""

import copy
import ctypes
import dataclasses
import functools
import logging
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ep_moe.kernel_launch.launch_graph import LaunchGraph, RecordingError
from ep_moe.kernel_launch.tensor_map import Address, TensorMap, address_of, is_descriptor

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_NO_CONTEXT = 201  # CUresult
_SCRATCH_POINTERS = 2  # Triton appends them to a kernel's own arguments; our kernels need no scratch memory
_RECORDED_AFTER = 8  # launches of a sequence with the same values: making a graph takes the host as long as some calls
_MOST_COUNTED = 128  # values of a sequence that may have a graph, one for each layer of a model
_BYTES = {"i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4}  # of an argument, by Triton's type name; a pointer has 8
_log = logging.getLogger(__name__)


class LaunchMismatchError(RuntimeError):
    """The driver and Triton disagree on a kernel's parameters, or the driver cannot tell them."""


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("value", ctypes.c_uint64 * 8)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@functools.cache
def cuda_driver() -> Any:
    """The CUDA driver's library. Errors: RuntimeError if there is none. Local."""
    if torch.version.hip is not None:
        raise RuntimeError("this torch is built for AMD GPUs")
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"the CUDA driver cannot be loaded: {error}") from None
    library.cuFuncGetParamInfo.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
    return library


def _flatten(types: Sequence[Any], values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a compiled kernel, with their types: tuples flattened, constants left out."""
    for type_, value in zip(types, values, strict=False):  # constants follow the arguments
        if isinstance(type_, tuple):
            yield from _flatten(type_, value)
        elif type_ != "constexpr":
            yield type_, value


def _takes(function: int, sizes: Sequence[int]) -> bool:
    """Whether these are the sizes, in bytes, of all parameters of a kernel."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()

    def size_of(index: int) -> int:
        status = cuda_driver().cuFuncGetParamInfo(function, index, ctypes.byref(offset), ctypes.byref(size))
        return int(status) or -size.value

    return all(size_of(index) == -wanted for index, wanted in enumerate(sizes)) and size_of(len(sizes)) > 0


def _bits(type_: str, value: Any) -> int:
    """The argument's bits as a 64-bit integer; 4-byte arguments use the low half."""
    if type_ == "fp32":
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    return address_of(value) if hasattr(value, "data_ptr") or is_descriptor(value) else int(value)


def _sizes(type_: str, value: Any) -> list[int]:
    """The bytes of the parameters that an argument becomes; a descriptor is followed by its shape and strides."""
    if is_descriptor(value):
        return [128, *[4] * len(value.shape), *[8] * len(value.strides)]
    return [8 if type_.startswith("*") else _BYTES.get(type_, 0)]


class DriverKernel:
    """A compiled kernel on a grid, with the arguments that all of its launches share, for `Launches`.

    Args:
        compiled: Triton's CompiledKernel, loaded.
        grid: programs along each axis.
        arguments: one set of arguments, nested as the kernel takes them. Only the addresses of tensors are kept: the
            caller keeps the tensors themselves alive.
        changing: which of `arguments` change from launch to launch: pointers and integers, and of descriptors the
            address of the tensor.
        device: the GPU that the kernel was loaded on.
        current_stream: gives a GPU's current stream by its index.
    Errors: LaunchMismatchError if the driver and Triton disagree on the arguments, or the driver is too old to tell
    (before CUDA 12.4): the caller then uses Triton's own launcher.
    """

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        *,
        changing: slice,
        device: torch.device,
        current_stream: Any,
    ) -> None:
        types = tuple(compiled.src.signature.values())[: len(arguments)]
        first, last = (len(list(_flatten(types[:end], arguments[:end]))) for end in (changing.start, changing.stop))
        flat = list(_flatten(types, arguments))
        sizes = [size for each in flat for size in _sizes(*each)] + [8] * _SCRATCH_POINTERS
        try:
            self.launch, fits = cuda_driver().cuLaunchKernelEx, _takes(compiled.function, sizes)
        except (AttributeError, RuntimeError) as error:
            raise LaunchMismatchError(f"the CUDA driver does not report a kernel's parameters: {error}") from None
        metadata, named = compiled.metadata, {type_ for type_, _ in flat[first:last]}
        if not fits or metadata.global_scratch_size or metadata.profile_scratch_size or "fp32" in named:
            raise LaunchMismatchError(f"the kernel takes other arguments than {flat}")
        self.compiled, self.device, self.current_stream = compiled, device, current_stream
        self._grid, self._values = grid, [_bits(*each) for each in flat]
        of_metadata = iter(getattr(metadata, "tensordesc_meta", None) or [])
        self._described = {  # without their tensors
            index: (dataclasses.replace(value, base=Address(address_of(value), value.base.dtype)), next(of_metadata))
            for index, (_, value) in enumerate(flat)
            if is_descriptor(value)
        }
        # by changing argument, which value of a launch it is
        self.changing = dict(zip(range(first, last), range(last - first), strict=True))

    def reordered(self, order: Sequence[int]) -> "DriverKernel":
        """The same kernel, whose changing argument i is value order[i] of a launch. Local."""
        other = copy.copy(self)
        other.changing = {index: order[place] for index, place in self.changing.items()}
        return other

    def config(self) -> _Config:
        """The launch's configuration, without its stream. Local."""
        metadata = self.compiled.metadata
        attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (ctypes.c_uint64 * 8)(1))
        block = 32 * metadata.num_warps, 1, 1
        return _Config(self._grid, block, metadata.shared, None, ctypes.pointer(attribute), int(metadata.launch_pdl))

    def parameters(self, positions: Sequence[int], cells: list[int]) -> list["int | tuple[TensorMap, int]"]:
        """The kernel's parameters: the cell of each, or a tensor map with the cell of its address.

        Args: positions: the cells of the values of a launch. cells: of 8 bytes; those of other arguments are appended.
        """

        def append(values: Sequence[int]) -> range:
            cells.extend(values)
            return range(len(cells) - len(values), len(cells))

        found: list[int | tuple[TensorMap, int]] = []
        for index, bits in enumerate(self._values):
            cell = positions[self.changing[index]] if index in self.changing else append([bits])[0]
            if index in self._described:
                value, metadata = self._described[index]
                found += [(TensorMap(cuda_driver(), value, metadata), cell), *append([*value.shape, *value.strides])]
            else:
                found.append(cell)
        return [*found, *append([0] * _SCRATCH_POINTERS)]


class _Counted:
    """Values of a sequence: how often they came, in which call last, and their graph."""

    __slots__ = ("graph", "last", "times")

    def __init__(self) -> None:
        self.times = self.last = 0
        self.graph: LaunchGraph | None = None


class Launches:
    """Launches of one kernel or several, one after the other, with new values of their changing arguments.

    The values of a call lie in one array, which all launches read. That saves what each would do again: the device, the
    stream, the lock, the choice and the conversion of its arguments. Launches of several kernels whose values have come
    `_RECORDED_AFTER` times are recorded as a CUDA graph, which the driver starts as one: a program whose calls repeat
    allocates the same addresses again, as torch's allocator keeps them. Values in excess of `_MOST_COUNTED` replace
    only others that did not come in the last `_RECORDED_AFTER` times as many calls: if more take turns, the first ones
    keep their graphs, and no more graphs are made. docs/benchmarks/archive/2026-11-22-host-time.md has times of single
    launches, 2026-11-25-calls-as-graphs.md those of graphs.

    Args:
        kernels: at least one, each with the positions of its changing arguments among the values of a call. All are of
            one GPU.
        num_values: of a call.
    Local; nothing is launched.
    """

    def __init__(self, kernels: Sequence[tuple[DriverKernel, Sequence[int]]], num_values: int) -> None:
        self._kernels = [kernel for kernel, _ in kernels]  # valid as long as Triton's CompiledKernels live
        values = [0] * num_values
        parameters_of = [kernel.parameters(positions, values) for kernel, positions in kernels]
        self._cells = (ctypes.c_int64 * len(values))(*values)
        self._memory, self._pack = memoryview(self._cells).cast("B"), struct.Struct(f"{num_values}q").pack_into
        start = ctypes.addressof(self._cells)
        self._maps = [each for parameters in parameters_of for each in parameters if isinstance(each, tuple)]
        self._configs = [kernel.config() for kernel in self._kernels]
        self._parameters = [
            (ctypes.c_void_p * len(parameters))(
                *(start + 8 * each if isinstance(each, int) else each[0].address for each in parameters)
            )
            for parameters in parameters_of
        ]
        self._steps: list[tuple[ctypes.c_void_p, ...]] = []
        for kernel, config, parameters in zip(self._kernels, self._configs, self._parameters, strict=True):
            given = ctypes.addressof(config), kernel.compiled.function, ctypes.addressof(parameters), None
            # a prototype without argument types takes c_void_p as they are, in less time
            self._steps.append(tuple(map(ctypes.c_void_p, given)))
        first = self._kernels[0]
        self._launch, self._device, self._index = first.launch, first.device, first.device.index or 0
        self._current_device = getattr(torch._C, "_cuda_getDevice", int)
        self._current_stream = first.current_stream
        self._capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)
        self._stream: int | None = None
        self._counted, self._calls = dict[tuple[int, ...], _Counted](), 0
        self._recordable = len(self._steps) > 1
        self._lock = threading.RLock()  # the driver reads the arguments while other threads run

    def __call__(self, values: Sequence[int], recorded_on: int | None = None, *, again: bool = True) -> int:
        """Launch on the GPU's current stream, with these values of the changing arguments. Local, no host sync.

        Args:
            recorded_on: the current stream, if these launches are recorded there for a graph of these values.
            again: once more if this thread had no CUDA context.
        Returns: the CUresult, 0 for launches that are not recorded. Errors: RuntimeError for another one of these.
        """
        if self._current_device() != self._index:
            with torch.cuda.device(self._device):
                return self(values)
        with self._lock:
            graph, stream = None, recorded_on
            if stream is None:
                stream = self._current_stream(self._index)
                graph = self._graph_of(tuple(values)) if self._recordable else None
            if graph is not None:
                status = graph(stream)
            else:
                self._pack(self._memory, 0, *values)
                for tensor_map, cell in self._maps:
                    tensor_map.move(self._cells[cell])
                if stream != self._stream:
                    for config in self._configs:
                        config.stream = stream
                    self._stream = stream
                for arguments in self._steps:
                    status = self._launch(*arguments)
                    if status:
                        break
        if not status or recorded_on is not None:
            return status
        if status != _NO_CONTEXT or not again:
            raise RuntimeError(f"the CUDA driver did not launch a kernel (CUresult {status})")
        torch.zeros(1, dtype=torch.float32, device=self._device)  # a torch kernel makes the context current
        return self(values, again=False)

    def _graph_of(self, values: tuple[int, ...]) -> LaunchGraph | None:
        """The launches with these values as a graph; None if they came too seldom, or torch captures a graph now."""
        if self._capturing():
            return None
        self._calls += 1
        counted = self._counted.get(values) or self._count(values)
        if counted is None:
            return None
        counted.last = self._calls
        if counted.graph is None:
            counted.times += 1
            if counted.times > _RECORDED_AFTER and LaunchGraph.may_be_made():
                try:
                    counted.graph = LaunchGraph(cuda_driver(), functools.partial(self, values), self._device)
                except RecordingError as error:
                    self._recordable = error.status == _NO_CONTEXT  # which the launches, that come now, will mend
                    _log.info("calls launch their kernels one by one, which is slower: %s", error)
        return counted.graph

    def _count(self, values: tuple[int, ...]) -> _Counted | None:
        """Begin to count new values; None if there are as many others, and the one looked at now is still in use."""
        if len(self._counted) >= _MOST_COUNTED:
            other = next(iter(self._counted))
            first = self._counted.pop(other)
            if self._calls - first.last <= _RECORDED_AFTER * _MOST_COUNTED:
                self._counted[other] = first  # at the end: the next call with new values looks at another
                return None
        found = self._counted[values] = _Counted()
        return found
