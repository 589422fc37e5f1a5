"""The layer: route, dispatch, experts, combine. It does not depend on the transport, experts, format or layout chosen.

Letters: T tokens on this rank, H hidden, K top-k, E logical experts.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, overload

import torch

from ep_moe.config import MoEConfig
from ep_moe.experts import Experts, create_experts
from ep_moe.fields import check_tensor
from ep_moe.group import PeerLostError
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, get_scheme, quantize
from ep_moe.routing import Routing, apply_weights_to_input, route, to_physical
from ep_moe.transport import Transport
from ep_moe.transport.layer_tag import LayerTag
from ep_moe.weights import ExpertWeights


class Phases(Protocol):
    """An observer of a layer's phases (route, dispatch, experts, combine), such as a profiler."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context manager that is entered when the phase begins and left when it ends."""
        ...


class _Unwatched:
    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        del name
        yield


class _NoBackward(torch.autograd.Function):
    """Runs a forward without a graph and refuses the backward pass: a loss must not train on missing gradients."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        del ctx, inputs
        return run()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del ctx, gradients
        raise RuntimeError("expert-parallel layers of ep_moe have no backward pass: they are for inference")


def refuse_backward(run: Callable[[], torch.Tensor], inputs: Iterable[Any]) -> torch.Tensor:
    """Call `run`; if autograd records one of its inputs, a backward pass through the result is a RuntimeError.

    Args:
        inputs: tensors and parameters that `run` reads; they are not iterated outside of grad mode, so a generator
            can be lazy. Values that are not tensors are ignored.
    Local.
    """
    if not torch.is_grad_enabled():
        return run()
    recorded = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    if recorded:
        return _NoBackward.apply(run, *recorded)
    result = run()
    # `run` may have read tensors that are not in `inputs`: shared experts given as a function, for example
    return _NoBackward.apply(result.detach, result) if result.requires_grad else result


class ExpertParallelMoE(torch.nn.Module):
    """One MoE layer whose experts are spread over the ranks of a transport.

    Its weights are plain tensors, not parameters: a model's `to` and `state_dict` ignore them.

    Args:
        config: of the layer; the same on every rank.
        weights: this rank's experts, in the order of `placement.local_experts(rank)` and in `config.scheme`.
        transport: moves the tokens; one serves all layers of a model.
        placement: logical to physical experts; by default the transport's.
        experts: name of the implementation; "auto" chooses by device.
        routing_bias: [E], for the routing methods that take one.
        shared_experts: called with hidden_states [T, H] between dispatch_send and dispatch_recv; its output is added
            in float32.
        layer_index: the layer's number in its model, the same on every rank; by default layers of a transport are
            numbered in the order of their construction. If ranks call different layers, or built a layer with another
            intermediate size, activation or placement, the first such round raises a ValueError that names them.
        phases: observer of the phases.

    Errors: ValueError if config, weights and transport do not fit each other, or for a bad `layer_index`.
    """

    def __init__(
        self,
        config: MoEConfig,
        weights: ExpertWeights,
        transport: Transport,
        *,
        placement: Placement | None = None,
        experts: str = "auto",
        routing_bias: torch.Tensor | None = None,
        shared_experts: Callable[[torch.Tensor], torch.Tensor] | None = None,
        layer_index: int | None = None,
        phases: Phases | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.weights = weights
        self.transport = transport
        self.placement = transport.placement if placement is None else placement
        self.scheme = get_scheme(config.scheme)
        self.experts: Experts = create_experts(
            experts, config.activation, weights.w13.values.device, scheme=self.scheme
        )
        self.routing_bias = routing_bias
        self.shared_experts = shared_experts
        self.phases: Phases = _Unwatched() if phases is None else phases
        self._check()
        number = transport.number_layer() if layer_index is None else layer_index
        if type(number) is not int or number < 0:
            raise ValueError(f"layer_index ({number!r}) must be an int of at least 0")
        self.tag = LayerTag.of(number, config, self.placement)

    def _check(self) -> None:
        config, weights, transport = self.config, self.weights, self.transport
        rank, kind = transport.rank, config.activation.kind
        expected = {
            "hidden": (transport.config.hidden, config.hidden),
            "num_experts": (self.placement.num_experts, config.num_experts),
            "num_local_experts": (weights.num_local_experts, self.placement.num_local_experts(rank)),
            "first physical experts": (self.placement.starts, transport.placement.starts),
            "scheme": (weights.scheme.name, self.scheme.name),
            "rows of w13": (weights.w13.values.shape[1], config.intermediate * (2 if kind.gated else 1)),
            "columns of w13": (weights.w13.values.shape[2], self.scheme.weight.row_values(config.hidden)),
            "rows of w2": (weights.w2.values.shape[1], config.hidden),
            "columns of w2": (weights.w2.values.shape[2], self.scheme.weight.row_values(config.intermediate)),
            "dtype of w13": (weights.w13.values.dtype, self.scheme.weight.dtype or transport.config.dtype),
        }
        if self.routing_bias is not None:
            expected["shape of routing_bias"] = (tuple(self.routing_bias.shape), (config.num_experts,))
        if weights.w13_input_scale is not None:
            expected["activation scales of w13_input_scale"] = ("tensor", self.scheme.payload.granularity)
            expected["numbers in w13_input_scale"] = (weights.w13_input_scale.numel(), 1)
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise ValueError(f"{name} ({found}) does not fit the layer on rank {rank}, which needs {wanted}")

    @overload
    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor: ...

    @overload
    def forward(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor: ...

    def forward(self, hidden_states: torch.Tensor, *router: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Send each token through its experts.

        Args:
            hidden_states: [T, H] in the transport's dtype, T <= max_tokens_per_rank and different on each rank at will.
            router_logits: [T, E]; or, by position or by name,
            topk_ids, topk_weights: [T, K] int32 or int64, logical, -1 none, and [T, K] float32.
        Returns: [T, H] in the transport's dtype.
        Errors: bad input on one rank raises ValueError on every rank, and the next call works; with a transport that
        does not wait for its peers (`nvlink`), ranks that do not raise get NaN, and their `check` raises the error.
        `PeerLostError` if a rank does not answer. Any other failure of this rank, such as out of memory, is raised
        here; the other ranks get NaN for the tokens that they sent to it, and the next call works. RuntimeError once
        the transport or its group is destroyed, and from the backward pass, which is not supported.
        Collective: every rank calls it the same number of times, also with zero tokens.
        """

        def run() -> torch.Tensor:
            return self._run(hidden_states, router, named)

        return refuse_backward(run, self._inputs(hidden_states, *router, *named.values()))

    def _inputs(self, *given: torch.Tensor) -> Iterator[Any]:
        """Everything that the result depends on: the call's arguments, weights, bias, shared experts' parameters."""
        yield from given
        yield from self.weights.tensors()
        yield self.routing_bias
        if isinstance(self.shared_experts, torch.nn.Module):
            yield from self.shared_experts.parameters()

    def _run(
        self, hidden_states: torch.Tensor, router: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        transport, begun = self.transport, self.transport.num_rounds
        try:
            with self.phases.phase("route"):
                x, routing = self._prepare_or_refuse(hidden_states, router, named)
            return self._exchange(hidden_states, x, routing)
        except PeerLostError:
            raise
        except Exception:
            if transport.num_rounds != begun:
                transport.abandon()
            else:
                self._sit_out(router, named)
            raise

    def _exchange(self, hidden_states: torch.Tensor, x: torch.Tensor | Quantized, routing: Routing) -> torch.Tensor:
        """Dispatch, experts, combine."""
        transport, shared = self.transport, None
        how: dict[str, Any] = {"layout": self.config.layout, "scheme": self.scheme, "layer": self.tag}
        if self.shared_experts is None:
            with self.phases.phase("dispatch"):
                dispatched = transport.dispatch(x, routing, **how)
        else:
            with self.phases.phase("dispatch"):
                transport.dispatch_send(x, routing, **how)
            with self.phases.phase("shared"):
                shared = self.shared_experts(hidden_states)
            with self.phases.phase("dispatch"):
                dispatched = transport.dispatch_recv()
        with self.phases.phase("experts"):
            y = self.experts(dispatched.batch, self.weights)
        with self.phases.phase("combine"):
            return transport.combine(y, dispatched, shared=shared)

    def _sit_out(self, router: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> None:
        """Join the round without tokens after a failure on this rank, since the other ranks wait for it."""
        ids = named["topk_ids"] if "topk_ids" in named else router[0] if len(router) == 2 else None
        if ids is not None:
            num_topk = ids.shape[1]
        else:
            assert self.config.routing is not None  # router_logits without a routing config were refused before
            num_topk = self.config.routing.num_topk
        self.transport.sit_out(num_topk=num_topk, scheme=self.scheme, layer=self.tag)

    def _prepare_or_refuse(
        self, hidden_states: torch.Tensor, router: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor | Quantized, Routing]:
        try:
            return self._prepare(hidden_states, router, named)
        except ValueError as error:
            self.transport.refuse(error)

    def _prepare(
        self, hidden_states: torch.Tensor, router: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor | Quantized, Routing]:
        """Check the input and return the transport's: tokens, scaled by router weights or quantized as configured,
        and the routing with physical ids."""
        rank = self.transport.rank
        check_tensor(hidden_states, "hidden_states")
        if hidden_states.dim() != 2:
            raise ValueError(
                f"hidden_states is {tuple(hidden_states.shape)} on rank {rank}, expected [num_tokens, hidden]"
            )
        routing = self._route(hidden_states, router, named)
        x: torch.Tensor | Quantized = hidden_states
        if self.config.apply_router_weight_on_input:
            x, routing = apply_weights_to_input(hidden_states, routing)
        if self.weights.w13_input_scale is not None and not isinstance(x, Quantized):
            x = quantize(x, self.scheme, static_scale=self.weights.w13_input_scale)
        return x, routing

    def _route(
        self, hidden_states: torch.Tensor, router: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]
    ) -> Routing:
        """Route these tokens to physical experts."""
        if not router and set(named) == {"topk_ids", "topk_weights"}:
            router = (named["topk_ids"], named["topk_weights"])
        elif not router and set(named) == {"router_logits"}:
            router = (named["router_logits"],)
        elif named or len(router) not in (1, 2):
            given = [f"{len(router)} by position", *named]
            raise ValueError(f"forward takes router_logits, or topk_ids and topk_weights, got {', '.join(given)}")
        if len(router) == 2:
            routing = Routing(topk_ids=router[0], topk_weights=router[1])
        elif self.config.routing is None:
            raise ValueError("the layer has no routing config: pass topk_ids and topk_weights, not router_logits")
        else:
            check_tensor(router[0], "router_logits")
            expected = (hidden_states.shape[0], self.config.num_experts)
            if tuple(router[0].shape) != expected:
                raise ValueError(
                    f"router_logits is {tuple(router[0].shape)}, expected [num_tokens, num_experts] {expected}"
                )
            return route(router[0], self.config.routing, routing_bias=self.routing_bias, placement=self.placement)
        return Routing(topk_ids=to_physical(routing.topk_ids, self.placement), topk_weights=routing.topk_weights)
