"""Repeated launches through the CUDA driver, from an array of arguments that is updated in place.

Triton's front end inspects every argument of every launch, and its launcher unpacks them one by one: that takes the
host several times as long as a small exchange takes the GPU. Structures and constants are those of cuda.h.
"""

import ctypes
import functools
import logging
import operator
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ep_moe.kernel_launch.launch_graph import LaunchGraph, RecordingError
from ep_moe.kernel_launch.tensor_map import TensorMap, address_of, is_descriptor

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
_NO_CONTEXT = 201  # CUresult
_SCRATCH_POINTERS = 2  # Triton appends them to a kernel's own arguments; our kernels need no scratch memory
_RECORDED_AFTER = 8  # launches of a sequence with the same values: making a graph takes the host as long as some calls
_MOST_COUNTED = 128  # values of a sequence that may have a graph, one for each layer of a model
_REFUSED = "the CUDA driver did not launch a kernel (CUresult {})"
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
        return (
            cuda_driver().cuFuncGetParamInfo(function, index, ctypes.byref(offset), ctypes.byref(size)) or -size.value
        )

    return all(size_of(index) == -wanted for index, wanted in enumerate(sizes)) and size_of(len(sizes)) > 0


def _bits(type_: str, value: Any) -> int:
    """What an argument's 8 bytes hold, as an integer; 4-byte arguments use the low half."""
    if type_ == "fp32":
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    return address_of(value) if hasattr(value, "data_ptr") or is_descriptor(value) else int(value)


def _sizes(type_: str, value: Any) -> list[int]:
    """The bytes of the parameters that an argument becomes; a descriptor is followed by its shape and strides."""
    if is_descriptor(value):
        return [128, *[4] * len(value.shape), *[8] * len(value.strides)]
    return [8 if type_.startswith("*") else _BYTES.get(type_, 0)]


class DriverLaunch:
    """A compiled kernel on a grid, launched repeatedly with new values of some of its arguments.

    Eager host time beside Triton's launcher: dispatch 24 us, not 76, combine 12 us, not
    37 (2 H200s, 1 and 128 tokens, median of 400, Triton 3.6.0; docs/benchmarks/notes/2026-11-22-host-time.md).

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
            self._launch, fits = cuda_driver().cuLaunchKernelEx, _takes(compiled.function, sizes)
        except (AttributeError, RuntimeError) as error:
            raise LaunchMismatchError(f"the CUDA driver does not report a kernel's parameters: {error}") from None
        metadata, named = compiled.metadata, {type_ for type_, _ in flat[first:last]}
        if not fits or metadata.global_scratch_size or metadata.profile_scratch_size or "fp32" in named:
            raise LaunchMismatchError(f"the kernel takes other arguments than {flat}")
        self._compiled, self._device = compiled, device  # the kernel is valid as long as `compiled` lives
        self._index, self._current_stream = device.index or 0, current_stream
        self._current_device = getattr(torch._C, "_cuda_getDevice", int)
        self._lock = threading.Lock()  # the driver reads the arguments while other threads run
        described = [value for _, value in flat if is_descriptor(value)]
        whole = [size for each in described for size in (*each.shape, *each.strides)]
        cells = [*(_bits(*each) for each in flat), *whole, *[0] * _SCRATCH_POINTERS]
        self._cells = (ctypes.c_int64 * len(cells))(*cells)
        self._pack, self._first = struct.Struct(f"{last - first}q").pack_into, 8 * first
        self._memory = memoryview(self._cells).cast("B")
        start = ctypes.addressof(self._cells)
        of_metadata = iter(getattr(metadata, "tensordesc_meta", None) or [])
        self._maps: list[tuple[int, TensorMap]] = []  # each with the cell that has the address of its tensor
        parameters, behind = list[int](), start + 8 * len(flat)
        for index, (_, value) in enumerate(flat):
            if is_descriptor(value):
                self._maps.append((index, TensorMap(cuda_driver(), value, next(of_metadata))))
                count = 2 * len(value.shape)
                parameters += [self._maps[-1][1].address, *range(behind, behind + 8 * count, 8)]
                behind += 8 * count
            else:
                parameters.append(start + 8 * index)
        parameters += range(behind, behind + 8 * _SCRATCH_POINTERS, 8)
        self._changing = range(first, last)
        self._parameters = (ctypes.c_void_p * len(parameters))(*parameters)
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (ctypes.c_uint64 * 8)(1))
        self._config = _Config(
            grid,
            (32 * metadata.num_warps, 1, 1),
            metadata.shared,
            None,
            ctypes.pointer(self._attribute),
            int(metadata.launch_pdl),
        )
        self._addresses = self._arguments_of(self._config, self._parameters)

    def _arguments_of(self, config: _Config, parameters: Any) -> tuple[ctypes.c_void_p, ...]:
        """What the driver takes; a prototype without argument types takes c_void_p as they are, in less time."""
        given = ctypes.addressof(config), self._compiled.function, ctypes.addressof(parameters), None
        return tuple(map(ctypes.c_void_p, given))

    def reading(self, places: Sequence[int]) -> "BoundLaunch | None":
        """The same launch, whose changing arguments lie at these addresses; None if some are descriptors. Local."""
        if self._maps:
            return None
        assert len(places) == len(self._changing), f"{len(places)} places for {len(self._changing)} arguments"
        parameters, config = type(self._parameters)(*self._parameters), _Config.from_buffer_copy(self._config)
        for index, place in zip(self._changing, places, strict=True):
            parameters[index] = place
        return BoundLaunch(self, config, parameters, self._arguments_of(config, parameters))

    def __call__(self, values: Sequence[int], *, again: bool = True) -> None:
        """Launch on the GPU's current stream, with these values of the changing arguments. Local, no host sync.

        again: once more if this thread had no CUDA context.
        """
        if self._current_device() != self._index:
            with torch.cuda.device(self._device):
                self(values)
            return
        with self._lock:
            self._pack(self._memory, self._first, *values)
            for cell, tensor_map in self._maps:
                tensor_map.move(self._cells[cell])
            self._config.stream = self._current_stream(self._index)
            status = self._launch(*self._addresses)
        if status == _NO_CONTEXT and again:
            torch.zeros(1, dtype=torch.float32, device=self._device)  # a torch kernel makes the context current
            self(values, again=False)
        elif status:
            raise RuntimeError(_REFUSED.format(status))


class BoundLaunch(NamedTuple):
    """A launch whose changing arguments are read where the caller says."""

    launch: DriverLaunch  # whose other arguments are read where they are
    config: _Config
    parameters: Any
    arguments: tuple[ctypes.c_void_p, ...]


class _Counted:
    """Values of a sequence: how often they came, in which call last, and their graph."""

    __slots__ = ("graph", "last", "times")

    def __init__(self) -> None:
        self.times = self.last = 0
        self.graph: LaunchGraph | None = None


class DriverSequence:
    """Launches one after the other, whose changing arguments lie in one array: written once, read by all of them.

    Beside single launches that saves what each does again: the device, the stream, the
    lock, the choice and the conversion of its arguments. Launches whose values have come `_RECORDED_AFTER` times are
    recorded as a CUDA graph, which the driver starts as one: a program whose calls repeat allocates the same addresses
    again, as torch's allocator keeps them. docs/benchmarks/notes/2026-11-25-calls-as-graphs.md has times. Values in
    excess of `_MOST_COUNTED` replace only others that did not come in the last `_RECORDED_AFTER` times as many calls:
    if more take turns, the first ones keep their graphs, and no more graphs are made.

    Args:
        launches: each a `DriverLaunch`, or another function of its arguments, with the positions of these among the
            values of a call. The first one that is a `DriverLaunch` says which GPU; all are of the same.
        num_values: of a call.
    Errors: ValueError if none is a `DriverLaunch`. Local.
    """

    def __init__(
        self, launches: Sequence[tuple[Callable[[Sequence[int]], None], Sequence[int]]], num_values: int
    ) -> None:
        self._cells = (ctypes.c_int64 * num_values)()
        start = ctypes.addressof(self._cells)
        self._memory, self._pack = memoryview(self._cells).cast("B"), struct.Struct(f"{num_values}q").pack_into
        self._bound: list[BoundLaunch] = []
        self._steps: list[tuple[tuple[ctypes.c_void_p, ...] | None, Any, Any]] = []
        for launch, positions in launches:
            bound = (
                launch.reading([start + 8 * place for place in positions]) if isinstance(launch, DriverLaunch) else None
            )
            if bound is not None:
                self._bound.append(bound)
            one = slice(positions[0], positions[0] + 1)  # of one position, itemgetter gives no sequence
            pick = operator.itemgetter(*(positions if len(positions) > 1 else (one,)))
            self._steps.append((None if bound is None else bound.arguments, launch, pick))
        if not self._bound:
            raise ValueError("no launch is the driver's")
        first = self._bound[0].launch
        self._launch, self._device, self._index = first._launch, first._device, first._index  # noqa: SLF001
        self._current_device, self._current_stream = first._current_device, first._current_stream  # noqa: SLF001
        self._capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", bool)
        self._stream: int | None = None
        self._counted, self._calls = dict[tuple[int, ...], _Counted](), 0
        self._recordable = len(self._steps) > 1
        self._lock = threading.Lock()

    def __call__(self, values: Sequence[int], *, again: bool = True) -> None:
        """Launch all on the GPU's current stream. Local, no host sync. again: as of `DriverLaunch`."""
        if self._current_device() != self._index:
            with torch.cuda.device(self._device):
                self(values)
            return
        with self._lock:
            stream = self._current_stream(self._index)
            graph = self._graph_of(tuple(values)) if self._recordable else None
            status = self._launch_on(values, stream) if graph is None else graph(stream)
        if status == _NO_CONTEXT and again:
            torch.zeros(1, dtype=torch.float32, device=self._device)  # a torch kernel makes the context current
            self(values, again=False)
        elif status:
            raise RuntimeError(_REFUSED.format(status))

    def _launch_on(self, values: Sequence[int], stream: int) -> int:
        """Launch all on this stream, which is the current one; returns the CUresult of the last launch tried."""
        self._pack(self._memory, 0, *values)
        if stream != self._stream:
            for bound in self._bound:
                bound.config.stream = stream
            self._stream = stream
        launch, status = self._launch, 0
        for arguments, call, pick in self._steps:
            if arguments is None:
                call(pick(values))
                continue
            status = launch(*arguments)
            if status:
                break
        return status

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
                    launch_on = functools.partial(self._launch_on, values)
                    counted.graph = LaunchGraph(cuda_driver(), launch_on, self._device)
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
