"""Launches recorded as a CUDA graph, which the driver starts as one. Functions and constants are those of cuda.h."""

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

_RELAXED = 2  # CUstreamCaptureMode: what other threads call does not end a recording, nor it what they record
_NON_BLOCKING = 1  # CUstream_flags: no order with the legacy stream, which cannot wait for a recording
_MOST = 512  # graphs of a process: one of five launches takes 126 KB of GPU memory (H100, driver 580)


class RecordingError(RuntimeError):
    """The driver did not record launches as a graph, or is too old to.

    Attributes: status: the driver's CUresult; 0 if it lacks a function.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class LaunchGraph:
    """The launches of a function, with their current arguments, as one CUDA graph.

    Args:
        driver: the CUDA driver's library.
        launch_on: launches on the stream with this handle, which is torch's current one; returns a CUresult.
        device: the GPU, which is the current one.
    Errors: RecordingError; nothing has been launched then. Local, no host sync. Not while torch captures a graph on the
    current stream.
    """

    _alive = 0

    def __init__(self, driver: Any, launch_on: Callable[[int], int], device: torch.device) -> None:
        try:
            with _relaxed(driver), _stream(driver, device) as stream:
                graph = _recorded(driver, launch_on, stream)
                executable = ctypes.c_void_p()
                try:
                    _check(driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0)))
                finally:
                    driver.cuGraphDestroy(graph)
        except AttributeError as error:  # a function that an older driver lacks
            raise RecordingError(str(error)) from None
        self._launch, self._executable = driver.cuGraphLaunch, executable
        # one that still runs is freed by the driver when it ends; at exit, the driver frees all
        weakref.finalize(self, _destroy, driver, executable).atexit = False
        LaunchGraph._alive += 1

    @classmethod
    def may_be_made(cls) -> bool:
        """Whether this process has fewer graphs than it may have. Local."""
        return cls._alive < _MOST

    def __call__(self, stream: int) -> int:
        """Launch all on the stream with this handle; returns a CUresult. Local, no host sync."""
        return int(self._launch(self._executable, ctypes.c_void_p(stream)))


def _destroy(driver: Any, executable: ctypes.c_void_p) -> None:
    """Give a graph back, perhaps while another thread records."""
    LaunchGraph._alive -= 1
    with contextlib.suppress(RecordingError), _relaxed(driver):
        driver.cuGraphExecDestroy(executable)


def _check(status: int) -> None:
    """Raise RecordingError for a CUresult that is no success."""
    if status:
        raise RecordingError(f"CUresult {status}", status)


@contextlib.contextmanager
def _relaxed(driver: Any) -> Iterator[None]:
    """Calls of this thread are allowed while another thread records, and do not end its recording."""
    mode = ctypes.c_int(_RELAXED)
    _check(driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@contextlib.contextmanager
def _stream(driver: Any, device: torch.device) -> Iterator[ctypes.c_void_p]:
    """A new stream, which is torch's current one until the end."""
    stream = ctypes.c_void_p()
    _check(driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING))
    try:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.value, device=device)):
            yield stream
    finally:
        driver.cuStreamDestroy_v2(stream)


def _recorded(driver: Any, launch_on: Callable[[int], int], stream: ctypes.c_void_p) -> ctypes.c_void_p:
    """The graph of what the function launches on the stream."""
    graph = ctypes.c_void_p()
    _check(driver.cuStreamBeginCapture_v2(stream, _RELAXED))
    try:
        status = launch_on(stream.value or 0)
    finally:
        ended = driver.cuStreamEndCapture(stream, ctypes.byref(graph))
    if status or ended:
        if graph:
            driver.cuGraphDestroy(graph)
        _check(status or ended)
    return graph
