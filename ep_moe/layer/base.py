"""What a layer is made of, and one round of it: route, dispatch, experts, combine. It does not depend on the transport,
experts, format or layout chosen.

Letters: T tokens on this rank, H hidden, K top-k, E logical experts.
"""

import contextlib
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ep_moe.config import Layout, MoEConfig
from ep_moe.experts import Experts
from ep_moe.group import PeerLostError
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme, quantize
from ep_moe.routing import PositionTable, Routing, apply_weights_to_input, make_routing, route, to_physical
from ep_moe.tensors import check_tensor
from ep_moe.transport import Transport
from ep_moe.transport.checks import check_device, check_num_tokens
from ep_moe.transport.layer_tag import LayerTag
from ep_moe.weights import ExpertWeights


class Phases(Protocol):
    """An observer of a layer's phases (route, dispatch, experts, combine), such as a profiler."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context manager that is entered when the phase begins and left when it ends."""
        ...


class _Unobserved:
    """The observer of layers without one."""

    _nothing = contextlib.nullcontext()

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        del name
        return self._nothing


UNOBSERVED = _Unobserved()


class _PhaseByPhase:
    """Shows an observer the phases of a call, each of which ends when the next one begins."""

    def __init__(self, phases: Phases) -> None:
        self._phases, self._stack = phases, contextlib.ExitStack()

    def __call__(self, name: str) -> None:
        self._stack.close()
        self._stack.enter_context(self._phases.phase(name))

    def end(self, error: BaseException | None = None) -> None:
        """End the last phase."""
        self._stack.__exit__(type(error) if error else None, error, None)


class Layer(torch.nn.Module):
    """The parts of an `ExpertParallelMoE`, which makes and checks them, and its rounds."""

    config: MoEConfig
    weights: ExpertWeights
    transport: Transport
    positions: Placement | PositionTable
    scheme: QuantScheme
    experts: Experts
    routing_bias: torch.Tensor | None
    shared_experts: Callable[[torch.Tensor], torch.Tensor] | None
    phases: Phases
    tag: LayerTag
    # found once, since every call reads them
    _layout: Layout
    _weight_tensors: tuple[torch.Tensor, ...]

    @property
    def placement(self) -> Placement:
        """Which rank has which expert now."""
        return self.positions.placement if isinstance(self.positions, PositionTable) else self.positions

    def _kept_tensors(self) -> tuple[Any, ...]:
        """Everything that the result depends on besides a call's arguments: weights, bias, shared experts."""
        shared = self.shared_experts.parameters() if isinstance(self.shared_experts, torch.nn.Module) else ()
        return (*self._weight_tensors, self.routing_bias, *shared)

    def run(
        self,
        hidden_states: torch.Tensor,
        router: tuple[torch.Tensor, ...],
        num_tokens: torch.Tensor | None,
        max_num_tokens: int | None,
    ) -> torch.Tensor:
        """`forward` without autograd, for the operator. `router`: logits, or ids and weights. Collective."""
        transport, shared_experts = self.transport, self.shared_experts
        begin = None if self.phases is UNOBSERVED else _PhaseByPhase(self.phases)
        begun, shared, out = transport.num_rounds, None, None
        try:
            if begin:
                begin("route")
            try:
                x, routing = self.prepare(hidden_states, router, num_tokens)
            except ValueError as error:
                transport.refuse(error)
            if begin:
                begin("dispatch")
            send = transport.dispatch if shared_experts is None else transport.dispatch_send
            dispatched = send(
                x,
                routing,
                layout=self._layout,
                scheme=self.scheme,
                num_tokens=num_tokens,
                max_num_tokens=max_num_tokens,
                layer=self.tag,
            )
            if shared_experts is not None:
                if begin:
                    begin("shared")
                shared = shared_experts(hidden_states)
                if begin:
                    begin("dispatch")
                dispatched = transport.dispatch_recv()
            assert dispatched is not None
            if begin:
                begin("experts")
            y = self.experts(dispatched.batch, self.weights)
            if begin:
                begin("combine")
            if num_tokens is not None:
                out = hidden_states.new_zeros(hidden_states.shape)  # rows of padding are not written
            result = transport.combine(y, dispatched, shared=shared, out=out)
            if begin:
                begin.end()
            return result
        except Exception as error:
            if begin:
                begin.end(error)
            if not isinstance(error, PeerLostError):
                release_memory(error)
                if transport.num_rounds == begun:
                    self.send_nothing(router, max_num_tokens)
                transport.abandon()
            raise

    def send_nothing(self, router: tuple[torch.Tensor, ...], max_num_tokens: int | None, slot: int = 0) -> None:
        """Begin the round without tokens after a failure on this rank, since other ranks wait for it. Collective."""
        if len(router) == 2:
            ids = router[0]
            num_topk = ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else 1
        else:
            num_topk = 1 if self.config.routing is None else self.config.routing.num_topk
        self.transport.send_nothing(
            num_topk=num_topk, scheme=self.scheme, slot=slot, max_num_tokens=max_num_tokens, layer=self.tag
        )

    def prepare(
        self, hidden_states: torch.Tensor, router: tuple[torch.Tensor, ...], num_tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | Quantized, Routing]:
        """Check the input; return the tokens for the transport, scaled by router weights or quantized as configured,
        and the routing with physical ids, which a `PositionTable` counts up to `num_tokens`. Local."""
        rank, device, config = self.transport.rank, self.transport.device, self.config
        names = ("topk_ids", "topk_weights") if len(router) == 2 else ("router_logits",)
        for name, value in zip(("hidden_states", *names), (hidden_states, *router), strict=True):
            if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device != device:
                check_tensor(value, name)
                check_device(value, name, rank, device)  # first: a conversion on a meta device imports for seconds
        num_tokens = num_tokens if isinstance(self.positions, PositionTable) else None
        if num_tokens is not None:
            check_num_tokens(num_tokens, rank, device)
        shape = hidden_states.shape
        if len(shape) != 2:
            raise ValueError(f"hidden_states is {tuple(shape)} on rank {rank}, expected [num_tokens, hidden]")
        if len(router) == 2:
            routing = self._place(*router, num_tokens)
        elif config.routing is None:
            raise ValueError("the layer has no routing config: call forward_routed, with topk_ids and topk_weights")
        elif router[0].shape != (shape[0], config.num_experts):
            found, expected = tuple(router[0].shape), (shape[0], config.num_experts)
            raise ValueError(f"router_logits is {found}, expected [num_tokens, num_experts] {expected}")
        else:
            routing = route(
                router[0],
                config.routing,
                routing_bias=self.routing_bias,
                placement=self.positions,
                num_tokens=num_tokens,
            )
        x: torch.Tensor | Quantized = hidden_states
        if config.apply_router_weight_on_input:
            x, routing = apply_weights_to_input(hidden_states, routing)
        if self.weights.w13_input_scale is not None and not isinstance(x, Quantized):
            x = quantize(x, self.scheme, static_scale=self.weights.w13_input_scale)
        return x, routing

    def _place(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_tokens: torch.Tensor | None) -> Routing:
        """The routing of the caller, with physical ids."""
        routing, positions = Routing(topk_ids=topk_ids, topk_weights=topk_weights), self.positions
        if isinstance(positions, Placement) and positions.is_identity and topk_ids.dtype == torch.int32:
            return routing
        return make_routing(to_physical(topk_ids, positions, num_tokens=num_tokens), topk_weights)


def release_memory(error: BaseException | None) -> None:
    """Free the tensors of the calls that ran out of memory, which the error's traceback would keep. Local."""
    while isinstance(error, torch.OutOfMemoryError):
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
