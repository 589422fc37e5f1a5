"""The replacements for the forward of a transformers experts module.

Letters: T tokens on this rank, H hidden, K top-k, E logical experts, M max_tokens_per_rank.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch

from ep_moe.balance import RebalanceStatus
from ep_moe.balance.carrier import copy_all
from ep_moe.config import Layout
from ep_moe.engines.transformers.experts import ExpertsModule, activation_of, are_views, state_of, weights_of
from ep_moe.engines.transformers.moving import HeldExperts
from ep_moe.engines.transformers.regrouping import (
    Recipe,
    Regrouped,
    Rehearsal,
    hand_over_experts,
    regroup_experts,
    rehearse_experts,
)
from ep_moe.experts import create_experts
from ep_moe.group import EPGroup, PeerLostError
from ep_moe.layer import ExpertParallelMoE, refuse_backward
from ep_moe.local_moe import local_moe
from ep_moe.placement import Placement
from ep_moe.routing import PositionTable, Routing
from ep_moe.transport import Transport
from ep_moe.transport.checks import bad_ids_message, is_bad_id
from ep_moe.weights import ExpertWeights

Model = Any  # a transformers model; its mixins are more than a type checker can follow
NAME = "ep_moe"  # the name under which transformers knows our implementations
DecodeExperts = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # layer, tokens, ids, weights
MAX_TOKENS_PER_RANK = 4096  # the default M


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HookConfig:
    """Options of experts that transformers selects by name, as of `register`."""

    transport: str = "auto"
    experts: str = "auto"
    layout: Layout = Layout.COMPACT
    max_tokens_per_rank: int = MAX_TOKENS_PER_RANK


def without_backward(module: ExpertsModule, run: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """`refuse_backward` for `inputs` and the module's parameters. Local."""
    return refuse_backward(run, (*inputs, *module.parameters(recurse=False)))


class ModuleWeights:
    """The current weights of an experts module, as long as `serves` is true for it.

    Parameters in our memory order are used in place; transposed and interleaved ones are copied in each call, since
    writes to them cannot be detected.
    """

    def __init__(self, module: ExpertsModule, weights: ExpertWeights) -> None:
        self._state = state_of(module)
        self.kept = weights if are_views(weights, module) else None

    def serves(self, module: ExpertsModule) -> bool:
        """True while the module's parameters are those at construction. Local, no host sync."""
        return state_of(module) == self._state

    def current(self, module: ExpertsModule) -> ExpertWeights:
        """The weights for one call. Local, no host sync."""
        return weights_of(module) if self.kept is None else self.kept


class LocalExperts:
    """All experts of one module in this process: the function behind `experts_implementation="ep_moe"`; safe in CUDA
    graphs."""

    def __init__(self, module: ExpertsModule, config: HookConfig) -> None:
        weights = weights_of(module)
        self._weights, self._layout = ModuleWeights(module, weights), config.layout
        self.serves = self._weights.serves
        device = weights.w13.values.device
        self._experts = create_experts(config.experts, activation_of(module), device, scheme=weights.scheme)

    def __call__(
        self,
        module: ExpertsModule,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Called by transformers, whose own expert parallelism marks experts of other ranks with id E.

        Errors: ValueError for other ids, on a CPU; on a GPU, where that would be a host sync, they are none. Local.
        """
        weights = self._weights.current(module)
        if top_k_index.device.type == "cpu":
            num_experts = weights.num_local_experts
            bad = top_k_index[is_bad_id(top_k_index, num_experts) & (top_k_index != num_experts)]
            if bad.numel():
                raise ValueError(bad_ids_message(bad.numel(), int(bad.max()), num_experts, 0))
        routing = Routing(topk_ids=top_k_index, topk_weights=top_k_weights.float())
        return local_moe(hidden_states, routing, weights, self._experts, layout=self._layout)


class SteppedRebalancer(Protocol):
    """A `Rebalancer`, or one that begins at other times."""

    @property
    def status(self) -> RebalanceStatus:
        """What has been done so far."""
        ...

    def step(self) -> None:
        """Called between two forward passes, on all ranks."""
        ...

    def finish(self) -> None:
        """End the rebalance that is under way, if there is one. Collective."""
        ...

    def destroy(self) -> None:
        """Free its memory; placements stay."""
        ...


class Session:
    """The expert-parallel state of a model, `model.ep_moe`.

    Args:
        held: experts of a rank that has no layers until `regroup`.

    Attributes:
        group: the ranks.
        layers: the `ExpertParallelMoE` of each MoE layer, in order.
        idle: if True, this rank takes part in every forward pass without sending tokens, and its MoE layers return
            zeros; for a rank that has finished while others still generate.
        experts: name of the layers' experts implementation.
        decoder: the `Decoder` of `ep_moe.engines.transformers.decoding`, None until it is needed.
        logged: messages about decoding that have been logged.
        why_own_routers: the reason why the model keeps its own routers, "" if ours route.
        rebalancer: a `Rebalancer` that moves experts between passes, None if nothing does; `destroy` ends it.
        decode_experts: a function that experts modules call in place of their layers, set by `decoding`.
    """

    def __init__(
        self,
        group: EPGroup,
        transport: Transport | None,
        layers: tuple[ExpertParallelMoE, ...],
        recipe: Recipe,
        held: Sequence[HeldExperts] = (),
    ) -> None:
        self.group = group
        self.layers = layers
        self.idle = False
        self._kept_load: list[torch.Tensor] = []
        self.experts = recipe.experts
        self._transport, self._recipe, self._held = transport, recipe, tuple(held)
        self._losses: list[str] = []  # since the layers were made
        self.decoder: Any = None
        self.logged: set[str] = set()
        self.why_own_routers = ""
        self.decode_experts: DecodeExperts | None = None
        self.rebalancer: SteppedRebalancer | None = None

    @property
    def transport(self) -> Transport:
        """Moves the tokens of all layers. Errors: RuntimeError on a rank that has yet to join others."""
        if self._transport is None:
            raise RuntimeError(f"rank {self.group.seat} has no experts yet: it gets them by `regroup`")
        return self._transport

    @property
    def expert_load(self) -> torch.Tensor:
        """[MoE layers, E] int64 on the device: how often this rank's tokens chose each expert. A copy. Local."""
        return torch.stack([table.counts for table in self._tables])

    def total_expert_load(self) -> torch.Tensor:
        """`expert_load`, summed over ranks. Collective."""
        return self.group.all_reduce_sum(self.expert_load)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Which rank has which expert now, by MoE layer. Local."""
        return tuple(layer.placement for layer in self.layers)

    @property
    def _tables(self) -> list[PositionTable]:
        return [layer.positions for layer in self.layers if isinstance(layer.positions, PositionTable)]

    @property
    def scheme(self) -> str:
        """Name of the layers' scheme; several, separated by commas, if layers differ. Local."""
        return ", ".join(dict.fromkeys(layer.scheme.name for layer in self.layers))

    def end_pass(self) -> None:
        """A boundary between two forward passes of all ranks, at which experts may move. As `Rebalancer.step`."""
        if self.rebalancer is not None:
            self.rebalancer.step()

    def reset_expert_load(self) -> None:
        """Set the counts to zero. Local, no host sync."""
        for table in self._tables:
            table.lanes.zero_()

    def keep_expert_load(self) -> None:
        """Keep the counts for `restore_expert_load`, also of another group. Local, no host sync."""
        counts = [table.lanes for table in self._tables]
        self._kept_load += map(torch.empty_like, counts[len(self._kept_load) :])
        copy_all(zip(self._kept_load, counts, strict=True))

    def restore_expert_load(self) -> None:
        """Set the counts to those of the last `keep_expert_load`. Local, no host sync."""
        copy_all(zip((table.lanes for table in self._tables), self._kept_load, strict=True))

    @contextlib.contextmanager
    def sitting_out(self, idle: bool = True) -> Iterator[None]:
        """Set `idle` in the block, and restore it afterwards. Local."""
        before, self.idle = self.idle, idle
        try:
            yield
        finally:
            self.idle = before

    @contextlib.contextmanager
    def decoding(self, experts: DecodeExperts) -> Iterator[None]:
        """In the block, experts modules call this function in place of their layers. Local."""
        self.decode_experts = experts
        try:
            yield
        finally:
            self.decode_experts = None

    def regroup(self, group: EPGroup) -> Regrouped:
        """Go on in another group: give its ranks all experts, and make transport, tables and layers anew.

        Ranks keep the experts that they have as far as they have positions for them. The others come from ranks that
        have them, and what was on lost ranks alone is read from the checkpoint, as far as it is needed. There are as
        many positions as at the start, but on fewer ranks no more on each than then, unless the experts need them. The
        model stays the same object, its layers have the counts of `expert_load`. `decoder` loses its graphs and
        transport (`RowDecoder.regroup`), a `rebalancer` is ended and removed: make another one.

        Args:
            group: of `EPGroup.regroup`; ranks that are new to it have loaded the model in their standby group.
        Errors: RuntimeError on all ranks, which names the lost rank and the file, if an expert is on no rank and the
            checkpoint has gone or changed; PeerLostError if another rank is lost meanwhile. After both it may be
            called again, in the next group. Collective.
        """
        if self.group.failure is not None and not self._losses:
            self._losses.append(str(self.group.failure))
        self.leave()
        try:
            made = regroup_experts(self._recipe, self._held, group, "; ".join(self._losses) or "ranks have left")
        except PeerLostError as error:
            self._losses.append(str(error))
            raise
        self._transport, self.layers, done = made
        self.group, self._held, self._losses = group, (), []
        return done

    @contextlib.contextmanager
    def rehearsing(self, rehearsal: Rehearsal) -> Iterator[None]:
        """In the block the model runs as a rank of a group whose other ranks are not there (`EPGroup.rehearsal`), with
        experts of zeros.

        What it compiles, loads and allocates there, nobody waits for when it joins such a group by `regroup`. `decoder`
        has neither graphs nor a transport before and after the block. In place of transports other than "peer",
        "gathered" and "collective", the latter is taken. Local, host sync.
        """
        before = self.group, self._transport, self.layers
        held = self._held or tuple(map(HeldExperts.of, self.layers))
        self.group = self.group.rehearsal(rehearsal.rank, rehearsal.num_ranks)
        try:
            self._transport, self.layers = rehearse_experts(self._recipe, held, self.group, rehearsal.num_physical)
            yield
        finally:
            if self.decoder is not None:
                self.decoder.leave()
            if self._transport is not None and self._transport is not before[1]:
                self._transport.destroy()
            self.group.destroy()
            self.group, self._transport, self.layers = before

    def hand_over(self, leaving: Collection[int]) -> None:
        """Give the experts of ranks that are about to leave to the others, in the group so far, whose layers end.

        Then those that leave call `destroy`, here and of their group, and the others regroup without them: nothing is
        read from the checkpoint for these experts.

        Args:
            leaving: ranks of the group, the same on all of them.
        Errors: ValueError for a rank of none, or for all; PeerLostError if another rank is lost meanwhile, after which
            the ranks that are left, those that were about to leave too, regroup as after any loss. Collective.
        """
        unknown = [rank for rank in leaving if not 0 <= rank < self.group.num_ranks]
        if unknown or len({*leaving}) == self.group.num_ranks:
            raise ValueError(f"leaving ({sorted(leaving)}) must be some of {self.group.num_ranks} ranks, and not all")
        self.leave()
        hand_over_experts(self._recipe, self._held, self.group, leaving)
        self.group.wait_for_all("hand over")  # none leaves before the others have what it had

    def leave(self) -> None:
        """End layers, transports and graphs ahead of `EPGroup.regroup`, and keep the experts for `regroup`.

        Only for NCCL's sake, which waits up to 10 s for graphs that hold operations of the old group: `regroup` does it
        too. Local, calling it twice is fine.
        """
        if self.layers:
            self._held = tuple(map(HeldExperts.of, self.layers))
        self.layers = ()
        if self.decoder is not None:
            self.decoder.leave()
        self._end()
        self.rebalancer = None

    def _end(self) -> None:
        if self.rebalancer is not None:
            self.rebalancer.destroy()
        if self._transport is not None:
            self._transport.destroy()

    def destroy(self) -> None:
        """Destroy the transports, not the group; the model can no longer run. Local, calling it twice is fine."""
        if self.decoder is not None:
            self.decoder.destroy()
        self._end()


class ShardedExperts:
    """The forward of an experts module whose experts are sharded over ranks."""

    def __init__(self, session: Session, index: int) -> None:
        self._session, self._index = session, index
        self.called = False  # set by each call, reset by `ep_moe.engines.transformers.architectures`

    @property
    def session(self) -> Session:
        """The session of the whole model."""
        return self._session

    @property
    def layer(self) -> ExpertParallelMoE:
        """The layer that computes the module's experts."""
        return self._session.layers[self._index]

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute this rank's tokens [T, H], ids [T, K] logical. Collective."""
        session = self._session
        self.called = True
        if session.decode_experts is not None:
            return session.decode_experts(self._index, hidden_states, top_k_index, top_k_weights)
        layer = self.layer
        if session.idle:
            layer.forward_routed(hidden_states[:0], top_k_index[:0], top_k_weights[:0].float())
            return torch.zeros_like(hidden_states)
        return layer.forward_routed(hidden_states, top_k_index, top_k_weights.float())
