"""A call of a layer in micro-batches: the exchange of one runs under the experts of another, in two slots.

On a GPU the exchange runs on a stream of its own. Every rank takes the same steps in the same order, also after a
failure, when it sends no tokens and returns NaN, so that no rank waits for another one's step.
Letters: T tokens on this rank, H hidden, K top-k.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ep_moe.group import PeerLostError
from ep_moe.layer.base import Layer, release_memory
from ep_moe.quant import Quantized
from ep_moe.routing import Routing
from ep_moe.tensors import check_tensor
from ep_moe.transport import Dispatched

SLOTS = 2  # rounds that are open at once


def steps(count: int) -> Iterator[tuple[str, int]]:
    """The steps of a call, each with the number of its micro-batch, from 0. Local.

    Of two: send 0, receive 0, send 1, compute 0, receive 1, send_back 0, compute 1, receive_back 0, send_back 1,
    receive_back 1.
    """
    yield from (("send", 0), ("receive", 0))
    for index in range(count):
        last = index + 1 == count
        if not last and index:
            yield "receive_back", index - 1  # its slot is the next one's
        if not last:
            yield "send", index + 1
        yield "compute", index
        if not last:
            yield "receive", index + 1
        elif index:
            yield "receive_back", index - 1
        yield "send_back", index
    yield "receive_back", count - 1


@dataclasses.dataclass(kw_only=True, slots=True)
class _MicroBatch:
    """Some tokens of a call; tensors are kept until the stream that reads them has been waited for."""

    x: torch.Tensor | Quantized
    hidden_states: torch.Tensor
    routing: Routing
    out: torch.Tensor
    dispatched: Dispatched | None = None
    y: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    moment: torch.cuda.Event | None = None  # of its last step, if another stream waits for that


class OverlappedCall:
    """One call; `ExpertParallelMoE.forward_micro_batches` has the arguments.

    Args:
        stream: of the exchange, on a GPU.
    """

    def __init__(self, layer: Layer, stream: torch.cuda.Stream | None) -> None:
        self._layer, self._transport, self._stream = layer, layer.transport, stream
        self._main = None if stream is None else torch.cuda.current_stream(stream.device)
        self._begun, self._parts = layer.transport.num_rounds, list[_MicroBatch]()
        self._failure: Exception | None = None
        self._max_num_tokens: int | None = None

    def run(
        self,
        hidden_states: torch.Tensor,
        router: tuple[torch.Tensor, ...],
        count: int,
        max_num_tokens: int | None,
    ) -> torch.Tensor:
        """The result, [T, H]. Errors: those of `ExpertParallelMoE.forward`. Collective."""
        bounded = isinstance(max_num_tokens, int)  # else the transport refuses it, unless it is None
        self._max_num_tokens = -(-max_num_tokens // count) if bounded else max_num_tokens  # type: ignore[operator]
        result: torch.Tensor | None = None
        try:
            with self._layer.phases.phase("route"):
                result = self._split(hidden_states, router, count)
        except Exception as error:  # noqa: BLE001 - raised below, after the steps that other ranks wait for
            release_memory(error)
            self._failure = error
        if self._stream is not None and self._main is not None:
            self._stream.wait_stream(self._main)
        try:
            for step, index in steps(count):
                self._take(step, index, router)
        finally:  # memory of the call may be used again once the exchange has read it
            if self._stream is not None and self._main is not None:
                self._main.wait_stream(self._stream)
        if self._failure is not None:
            raise self._failure
        assert result is not None
        return result

    def _take(self, step: str, index: int, router: tuple[torch.Tensor, ...]) -> None:
        """One step of `steps`, or what stands in for it after a failure. Errors: PeerLostError."""
        try:
            if isinstance(self._failure, ValueError) and (step, index) == ("send", 0):
                self._transport.refuse(self._failure)
            if self._failure is None:
                getattr(self, f"_{step}")(index)
                return
        except PeerLostError:
            raise
        except Exception as error:  # noqa: BLE001 - raised after the last step
            release_memory(error)
            self._failure = error
        with contextlib.suppress(ValueError):  # this round, too, is refused on all ranks
            self._stand_in(step, index, router)

    def _split(self, hidden_states: torch.Tensor, router: tuple[torch.Tensor, ...], count: int) -> torch.Tensor:
        """Route the tokens of each micro-batch; returns the memory of the result."""
        check_tensor(hidden_states, "hidden_states")
        num_tokens = len(hidden_states)
        for part in router:
            check_tensor(part, "router")
            if part.shape[:1] != hidden_states.shape[:1]:
                raise ValueError(
                    f"router has shape {tuple(part.shape)} for {num_tokens} tokens on rank {self._transport.rank}"
                )
        result = torch.empty_like(hidden_states)
        for rows in row_slices(num_tokens, count):
            x, routing = self._layer.prepare(hidden_states[rows], tuple(part[rows] for part in router))
            batch = _MicroBatch(x=x, hidden_states=hidden_states[rows], routing=routing, out=result[rows])
            self._parts.append(batch)
        return result

    def _exchanging(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _send(self, index: int) -> None:
        part, layer = self._parts[index], self._layer
        with self._exchanging(), layer.phases.phase("dispatch"):
            self._transport.dispatch_send(
                part.x,
                part.routing,
                layout=layer.config.layout,
                scheme=layer.scheme,
                slot=index % SLOTS,
                max_num_tokens=self._max_num_tokens,
                layer=layer.tag,
            )

    def _receive(self, index: int) -> None:
        part = self._parts[index]
        with self._exchanging(), self._layer.phases.phase("dispatch"):
            part.dispatched = self._transport.dispatch_recv(slot=index % SLOTS)
            part.moment = None if self._stream is None else self._stream.record_event()

    def _compute(self, index: int) -> None:
        part, layer = self._parts[index], self._layer
        if layer.shared_experts is not None:
            with layer.phases.phase("shared"):
                part.shared = layer.shared_experts(part.hidden_states)
        if self._main is not None and part.moment is not None:
            self._main.wait_event(part.moment)
        if index >= SLOTS:  # whose results the exchange has read: this one was dispatched after them
            self._parts[index - SLOTS].y = None
        with layer.phases.phase("experts"):
            assert part.dispatched is not None
            part.y = layer.experts(part.dispatched.batch, layer.weights)
        part.moment = None if self._main is None else self._main.record_event()

    def _send_back(self, index: int) -> None:
        part = self._parts[index]
        if self._stream is not None and part.moment is not None:
            self._stream.wait_event(part.moment)
        with self._exchanging(), self._layer.phases.phase("combine"):
            assert part.y is not None
            assert part.dispatched is not None
            self._transport.combine_send(part.y, part.dispatched)

    def _receive_back(self, index: int) -> None:
        part = self._parts[index]
        with self._exchanging(), self._layer.phases.phase("combine"):
            assert part.dispatched is not None
            self._transport.combine_recv(part.dispatched, shared=part.shared, out=part.out)
            part.dispatched = None

    def _stand_in(self, step: str, index: int, router: tuple[torch.Tensor, ...]) -> None:
        """Do for the other ranks what a step that has failed, or is not done after a failure, would have done."""
        slot = index % SLOTS
        with self._exchanging():
            if step == "send" and self._transport.num_rounds <= self._begun + index:
                self._layer.send_nothing(router, self._max_num_tokens, slot)
            elif step in ("send_back", "receive_back"):
                self._transport.abandon(slot=slot)


def row_slices(num_tokens: int, count: int) -> list[slice]:
    """The tokens of each micro-batch: neighbors, as many as in another one, or one more in the first ones.

    Example: 7 tokens in 3 micro-batches are 0 to 2, 3 to 4, and 5 to 6. Local.
    """
    least, more = divmod(num_tokens, count)
    ends = [index * least + min(index, more) for index in range(count + 1)]
    return [slice(first, last) for first, last in zip(ends[:-1], ends[1:], strict=True)]
