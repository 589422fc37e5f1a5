"""The layer as a module: what calls may be recorded by autograd, compiled, or split into micro-batches.

Letters: T tokens on this rank, H hidden, K top-k, E logical experts.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from ep_moe.config import MoEConfig, TransportConfig
from ep_moe.experts import Experts, create_experts
from ep_moe.fields import shown
from ep_moe.layer import op
from ep_moe.layer.backward import recorded, refuse_backward, refuse_result
from ep_moe.layer.base import UNOBSERVED, Layer, Phases
from ep_moe.layer.micro_batches import SLOTS, OverlappedCall
from ep_moe.layer.warmup import warm_up
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.routing import PositionTable
from ep_moe.transport import Transport
from ep_moe.transport.layer_tag import LayerTag
from ep_moe.weights import ExpertWeights


class ExpertParallelMoE(Layer):
    """One MoE layer whose experts are spread over the ranks of a transport.

    Its weights are plain tensors, not parameters: a model's `to` and `state_dict` ignore them.

    Args:
        config: sizes, routing, activation and scheme of the layer; the same on every rank.
        weights: this rank's experts, in the order of `placement.local_experts(rank)` and in `config.scheme`.
        transport: moves the tokens; one serves all layers of a model.
        placement: logical to physical experts; by default the transport's. A `PositionTable` of this rank also counts
            the experts of tokens, and may be updated between calls; layers that compute the same share one. Without
            one, a layer makes its own if experts have copies, with all ranks on one node.
        experts: name of the experts implementation; "auto" chooses by device.
        routing_bias: [E], for the routing methods that take one.
        shared_experts: called with hidden_states [T, H] between dispatch_send and dispatch_recv; its output is added
            in float32. Its backward is refused as the layer's; under torch.compile only if it is a module.
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
        placement: Placement | PositionTable | None = None,
        experts: str = "auto",
        routing_bias: torch.Tensor | None = None,
        shared_experts: Callable[[torch.Tensor], torch.Tensor] | None = None,
        layer_index: int | None = None,
        phases: Phases | None = None,
    ) -> None:
        super().__init__()
        for name, value, kind in (("config", config, MoEConfig), ("weights", weights, ExpertWeights)):
            if not isinstance(value, kind):
                raise ValueError(f"{name} ({shown(value)}) is no {kind.__name__}")
        if not isinstance(getattr(transport, "config", None), TransportConfig):
            raise ValueError(f"transport ({shown(transport)}) is no Transport")
        self.config = config
        self.weights = weights
        self.transport = transport
        placement = transport.placement if placement is None else placement
        if isinstance(placement, Placement) and placement.num_physical > placement.num_experts:
            placement = PositionTable(placement, transport.rank, device=transport.device)
        self.positions = placement
        self.scheme = get_scheme(config.scheme)
        self.experts: Experts = create_experts(
            experts, config.activation, weights.w13.values.device, scheme=self.scheme
        )
        self.routing_bias = routing_bias
        self.shared_experts = shared_experts
        self.phases: Phases = UNOBSERVED if phases is None else phases
        self._check()
        number = transport.number_layer() if layer_index is None else layer_index
        if type(number) is not int or number < 0:
            raise ValueError(f"layer_index ({number!r}) must be an int of at least 0")
        changing = isinstance(placement, PositionTable) and placement.changing
        self.tag = LayerTag.of(number, config, self.placement, changing=changing)
        self._layout, self._weight_tensors = config.layout, tuple(weights.tensors())
        self._number = op.number_of(self)
        self._exchange_stream: torch.cuda.Stream | None = None  # of micro-batches, made by the first such call

    def __deepcopy__(self, memo: dict[int, Any]) -> "ExpertParallelMoE":
        """A layer with its own weights, on the same transport, with the same positions, experts implementation and
        observer."""
        shared = (self.transport, self.positions, self.experts, self.phases, self._exchange_stream)
        twin = type(self).__new__(type(self))
        memo.update({id(value): value for value in shared} | {id(self): twin})
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copy a number of its own: by the original's, a compiled call would compute with its weights."""
        super().__setstate__(state)
        self._number = op.number_of(self)

    def _check(self) -> None:
        config, weights, transport = self.config, self.weights, self.transport
        rank = transport.rank
        expected = {
            "hidden": (transport.config.hidden, config.hidden),
            "num_experts": (self.placement.num_experts, config.num_experts),
            "num_local_experts": (weights.num_local_experts, self.placement.num_local_experts(rank)),
            "first physical experts": (self.placement.starts, transport.placement.starts),
            "scheme": (weights.scheme.name, self.scheme.name),
            "rows of w13": (weights.w13.values.shape[1], config.w13_rows),
            "columns of w13": (weights.w13.values.shape[2], self.scheme.weight.row_values(config.hidden)),
            "rows of w2": (weights.w2.values.shape[1], config.hidden),
            "columns of w2": (weights.w2.values.shape[2], self.scheme.weight.row_values(config.intermediate)),
            "dtype of w13": (weights.w13.values.dtype, self.scheme.weight.dtype or transport.config.dtype),
        }
        if self.routing_bias is not None:
            expected["shape of routing_bias"] = (tuple(self.routing_bias.shape), (config.num_experts,))
        if isinstance(self.positions, PositionTable):
            expected["rank of the table of positions"] = (self.positions.rank, rank)
            expected["device of the table of positions"] = (self.positions.words.device, weights.w13.values.device)
        if weights.w13_input_scale is not None:
            expected["granularity of w13_input_scale"] = ("tensor", self.scheme.payload.granularity)
            expected["elements of w13_input_scale"] = (weights.w13_input_scale.numel(), 1)
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise ValueError(f"{name} ({found}) does not fit the layer on rank {rank}, which needs {wanted}")

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        *,
        num_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
    ) -> torch.Tensor:
        """Send each token through the experts that the layer's routing chooses.

        Args:
            hidden_states: [T, H] in the transport's dtype, T <= max_tokens_per_rank; T may differ between ranks.
            router_logits: [T, E], any float dtype.
            num_tokens: optional, [1] int32 on the device: the first `num_tokens` rows are tokens. The others are
                padding, for CUDA graphs of fixed T: they go to no expert, and their rows of the result are zero.
            max_num_tokens: optional bound, T <= max_num_tokens <= max_tokens_per_rank, on the rows that any rank
                brings to this round, the same on all ranks. What a call allocates then grows with it, and not
                with max_tokens_per_rank.
        Returns: [T, H] in the transport's dtype.
        Errors: bad input on one rank raises ValueError on every rank, and the next call works; with a transport that
        does not wait for its peers (`peer`), ranks that do not raise get NaN, and their `check` raises the error.
        `PeerLostError` if a rank does not answer. Any other failure of this rank, such as out of memory, is raised
        here; the other ranks get NaN for the tokens that they sent to it, and the next call works. RuntimeError once
        the transport or its group is destroyed, and from the backward pass, which is not supported.
        Collective: every rank calls it the same number of times, also with zero tokens. Under torch.compile it is one
        operator, `ep_moe::layer`. `local` and `collective` read counts back to the host; `peer` and `gathered` are
        safe in CUDA graphs.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._recorded(hidden_states, (router_logits,), num_tokens, max_num_tokens)
        return self.run(hidden_states, (router_logits,), num_tokens, max_num_tokens)

    def forward_routed(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        num_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
    ) -> torch.Tensor:
        """`forward` for tokens that are already routed; a rank may call this while others call `forward`.

        Args:
            topk_ids: [T, K] int32 or int64, logical, -1 none. topk_weights: [T, K] float32.
            hidden_states, num_tokens, max_num_tokens: as in `forward`.
        Returns and errors: as in `forward`. Collective.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._recorded(hidden_states, (topk_ids, topk_weights), num_tokens, max_num_tokens)
        return self.run(hidden_states, (topk_ids, topk_weights), num_tokens, max_num_tokens)

    def forward_micro_batches(
        self,
        hidden_states: torch.Tensor,
        router: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        num_micro_batches: int = 2,
        max_num_tokens: int | None = None,
    ) -> torch.Tensor:
        """`forward`, or `forward_routed`, in micro-batches: the exchange of one runs under the experts of another.

        Each rank splits its tokens evenly, and the result has the bits of a `forward` of each part. On a GPU the
        exchange runs on a stream of the layer's own: `TransportConfig.num_sms` leaves SMs to the experts.

        Args:
            hidden_states: as in `forward`, T <= num_micro_batches * max_tokens_per_rank.
            router: router_logits, or topk_ids and topk_weights.
            num_micro_batches: the same on all ranks; `num_slots` of the transport is at least 2.
            max_num_tokens: as in `forward`, of the tokens of all micro-batches.
        Returns and errors: as in `forward`; after an error on a rank the others get NaN, or the error, for all
        micro-batches from there on. ValueError on this rank alone for a bad `num_micro_batches`. RuntimeError under
        torch.compile. Collective, with num_micro_batches rounds; safe in CUDA graphs where `forward` is.
        """
        slots = self.transport.config.num_slots
        if type(num_micro_batches) is not int or num_micro_batches < 1 or slots < SLOTS:
            raise ValueError(
                f"num_micro_batches ({num_micro_batches!r}) must be an int of at least 1, for a transport of at least "
                f"{SLOTS} slots; num_slots is {slots}"
            )
        if torch.compiler.is_compiling():
            raise RuntimeError("forward_micro_batches is no operator of torch.compile: call it outside, or use forward")
        device = self.transport.device
        if device.type == "cuda" and self._exchange_stream is None:
            # it gets SMs first, as soon as programs of the experts end
            self._exchange_stream = torch.cuda.Stream(device, priority=-1)
        parts = router if isinstance(router, tuple) else (router,)

        def run() -> torch.Tensor:
            call = OverlappedCall(self, self._exchange_stream)
            return call.run(hidden_states, parts, num_micro_batches, max_num_tokens)

        return refuse_backward(run, (hidden_states, *parts, *self._kept_tensors()))

    def warmup(self, *, num_topk: int | None = None, padded: bool = False, micro_batches: bool = False) -> None:
        """Compile and load the kernels of this layer's calls, so that none compiles while other ranks wait.

        A layer with the same config and the same optional tensors as another one on its transport needs no warm-up of
        its own. Rounds without tokens are run for each power of two up to max_tokens_per_rank.

        Args:
            num_topk: K of `forward_routed`, by default that of the routing config.
            padded: compile for calls with `num_tokens` too. micro_batches: for `forward_micro_batches` too.
        Errors: ValueError if neither `num_topk` nor a routing config is given, or if K exceeds the transport's
        max_topk; on a GPU also those of `forward`. Collective, host sync; on a CPU it does nothing.
        """
        overlapped = self.forward_micro_batches if micro_batches else None
        warm_up(self, num_topk=num_topk, padded=padded, overlapped=overlapped)

    def _recorded(
        self,
        hidden_states: torch.Tensor,
        router: tuple[torch.Tensor, ...],
        num_tokens: torch.Tensor | None,
        max_num_tokens: int | None,
    ) -> torch.Tensor:
        """A call in grad mode, or one that is compiled: both are refused a backward pass."""
        if torch.compiler.is_compiling():
            trained = recorded(self._kept_tensors()) if torch.is_grad_enabled() else None
            router_, weights = router if len(router) == 2 else (*router, None)
            return torch.ops.ep_moe.layer(
                hidden_states,
                router_,
                weights,
                num_tokens,
                max_num_tokens,
                trained[0] if trained else None,
                self._number,
            )
        for value in (hidden_states, *router, *self._kept_tensors()):
            if getattr(value, "requires_grad", False):
                run = functools.partial(self.run, hidden_states, router, num_tokens, max_num_tokens)
                return refuse_backward(run, (hidden_states, *router, *self._kept_tensors()))
        return refuse_result(self.run(hidden_states, router, num_tokens, max_num_tokens))
