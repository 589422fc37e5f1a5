"""Times of a layer's phases, on the device or on the host."""

import time

import torch


class Span:
    """A context manager that times its block: between two CUDA events on the current stream, or by the clock."""

    def __init__(self, *, by_events: bool) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if by_events else []
        self._secs = 0.0

    def __enter__(self) -> None:
        if self._events:
            self._events[0].record()
        self._secs -= time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._secs += time.perf_counter()
        if self._events:
            self._events[1].record()

    @property
    def us(self) -> float:
        """Microseconds of the block; of events once the device has reached the second."""
        return float(self._events[0].elapsed_time(self._events[1])) * 1e3 if self._events else self._secs * 1e6


class PhaseTimes:
    """A `Phases` that times each phase of each call: by CUDA events without host sync, by a clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._calls: list[dict[str, list[Span]]] = []

    def start_call(self) -> None:
        """Begin a new call: later phases belong to it. Local, no host sync."""
        self._calls.append({})

    def phase(self, name: str) -> Span:
        """Time the block; repeated phases of a call are summed. Local, no host sync."""
        spans = self._calls[-1].setdefault(name, [])
        spans.append(Span(by_events=self._on_cuda))
        return spans[-1]

    def samples_us(self) -> dict[str, list[float]]:
        """Microseconds of each phase, call by call. Local, host sync."""
        if self._on_cuda:
            torch.cuda.synchronize()
        names = dict.fromkeys(name for call in self._calls for name in call)
        return {name: [sum(span.us for span in call.get(name, [])) for call in self._calls] for name in names}
