"""What runs in place of a transformers experts module's own forward.

Letters: T tokens on this rank, H hidden, K top-k, E logical experts, M max_tokens_per_rank.
"""

import dataclasses
from collections.abc import Callable

import torch

from ep_moe.config import Layout, MoEConfig, TransportConfig
from ep_moe.engines.transformers.experts import ExpertsModule, activation_of, are_views, state_of, weights_of
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE, refuse_backward
from ep_moe.placement import Placement
from ep_moe.transport import Transport, create_transport
from ep_moe.weights import ExpertWeights

NAME = "ep_moe"  # by which transformers knows us
MAX_TOKENS_PER_RANK = 4096  # M where nobody says another


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HookConfig:
    """How experts run where transformers itself asks for them by name.

    Args:
        transport, experts: implementations by name.
        layout: what the experts compute on.
        max_tokens_per_rank: M of the expert-parallel hooks; experts of one process take any number of tokens.
    """

    transport: str = "auto"
    experts: str = "auto"
    layout: Layout = Layout.COMPACT
    max_tokens_per_rank: int = MAX_TOKENS_PER_RANK


def with_topk(config: TransportConfig, num_topk: int) -> TransportConfig:
    """The config for rounds of up to K experts of a token, never for fewer than it was for. Local."""
    return dataclasses.replace(config, max_topk=max(config.max_topk, num_topk))


def without_backward(module: ExpertsModule, run: Callable[[], torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """`refuse_backward` for a module's parameters too: they are read without a graph. Local."""
    return refuse_backward(run, (*inputs, *module.parameters(recurse=False)))


class ModuleLayer:
    """An experts module as a layer, whose weights are never older than the module's.

    Parameters that lie as ours do are read where they are. Transposed and interleaved ones have to be copied, and are
    copied for each call, since nothing tells whether they were written to in between; `from_pretrained` and
    `shard_experts` copy once and are the ways to speed for such a model.

    Args:
        module: as long as `serves` is true of it.
        weights: the module's. transport: of the layer, for as many experts as its placement has.
        config: names the implementation and the layout; the router stays transformers' own.
        index: the layer's number, which ranks compare in each round.
    Errors: ValueError for an activation that is not computed here, and for what does not fit the transport.
    """

    def __init__(
        self, module: ExpertsModule, weights: ExpertWeights, transport: Transport, config: HookConfig, index: int
    ) -> None:
        self.transport = transport
        self._index = index
        self._state = state_of(module)
        self._experts = config.experts
        self._config = MoEConfig(
            hidden=weights.w13.shape[2],
            intermediate=weights.w2.shape[2],
            num_experts=transport.placement.num_experts,
            activation=activation_of(module),
            scheme=weights.scheme.name,
            layout=config.layout,
        )
        layer = self._make(weights)
        self._layer = layer if are_views(weights, module) else None

    def _make(self, weights: ExpertWeights) -> ExpertParallelMoE:
        return ExpertParallelMoE(self._config, weights, self.transport, experts=self._experts, layer_index=self._index)

    def serves(self, module: ExpertsModule) -> bool:
        """True while the module's parameters are the tensors that this was made from. Local, no host sync."""
        return state_of(module) == self._state

    def layer(self, module: ExpertsModule) -> ExpertParallelMoE:
        """The layer with the weights that the module has now, for one call. Local, no host sync."""
        return self._make(weights_of(module)) if self._layer is None else self._layer


class LocalExperts:
    """All experts of one module in this process: the function behind `experts_implementation="ep_moe"`."""

    def __init__(self, module: ExpertsModule, config: HookConfig, top_k_index: torch.Tensor) -> None:
        num_tokens, num_topk = top_k_index.shape
        weights = weights_of(module)
        self._num_experts = weights.num_local_experts
        sizes = TransportConfig(
            hidden=weights.w13.shape[2],
            max_tokens_per_rank=max(config.max_tokens_per_rank, num_tokens),
            dtype=weights.w13.dtype,
        )
        self._sizes = with_topk(sizes, num_topk)
        transport = create_transport(
            "local", EPGroup.single(weights.w13.device), Placement.linear(self._num_experts, 1), self._sizes
        )
        self._layer = ModuleLayer(module, weights, transport, config, 0)

    def serves(self, module: ExpertsModule, top_k_index: torch.Tensor) -> bool:
        """True while the module's parameters are those that this was made from, and T and K fit. Local."""
        num_tokens, num_topk = top_k_index.shape
        fits = num_tokens <= self._sizes.max_tokens_per_rank and num_topk <= self._sizes.max_topk
        return fits and self._layer.serves(module)

    def __call__(
        self,
        module: ExpertsModule,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """As transformers calls it; id E is what its own expert parallelism writes for another rank's. Local."""
        ids = torch.where(top_k_index == self._num_experts, -1, top_k_index)
        return self._layer.layer(module)(hidden_states, ids, top_k_weights.float())


class Session:
    """What makes a model's experts spread over ranks; `model.ep_moe`.

    Attributes:
        group: the ranks.
        transport: moves the tokens of all layers.
        layers: the `ExpertParallelMoE` of each MoE layer, in order.
        idle: True while this rank takes part in every forward pass but sends no tokens, because nobody wants its
            output; its MoE layers then return zeros. For a rank that has finished while others generate.
    """

    def __init__(self, group: EPGroup, transport: Transport, layers: tuple[ExpertParallelMoE, ...]) -> None:
        self.group = group
        self.transport = transport
        self.layers = layers
        self.idle = False
        # One column more than there are experts, for ids that are none: counting then needs no host sync.
        self._load = torch.zeros(
            len(layers), transport.placement.num_experts + 1, dtype=torch.int64, device=group.device
        )

    @property
    def expert_load(self) -> torch.Tensor:
        """[MoE layers, E] int64 on the device: how often this rank's tokens chose each logical expert. Local."""
        return self._load[:, :-1].clone()

    @property
    def scheme(self) -> str:
        """Name of the layers' scheme, or names, comma between, where a checkpoint stores layers in several. Local."""
        return ", ".join(dict.fromkeys(layer.scheme.name for layer in self.layers))

    def reset_expert_load(self) -> None:
        """Count from zero again. Local, no host sync."""
        self._load.zero_()

    def count(self, layer: int, topk_ids: torch.Tensor) -> None:
        """Add a layer's ids [T, K], -1 none, to `expert_load`. Local, no host sync."""
        num_experts = self._load.shape[1] - 1
        ids = topk_ids.reshape(-1).long()
        ids = torch.where((ids < 0) | (ids >= num_experts), num_experts, ids)
        self._load[layer].scatter_add_(0, ids, torch.ones_like(ids))

    def destroy(self) -> None:
        """Free what the transport holds; the model can no longer run. The group stays. Local, twice is fine."""
        self.transport.destroy()


class ShardedExperts:
    """One layer's experts, this rank's here and the others' on other ranks; the forward of its experts module."""

    def __init__(self, session: Session, index: int) -> None:
        self._session, self._index = session, index
        self.called = False  # since somebody else set it to False

    @property
    def session(self) -> Session:
        """Of the whole model."""
        return self._session

    @property
    def layer(self) -> ExpertParallelMoE:
        """The layer that computes the module's experts."""
        return self._session.layers[self._index]

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute this rank's tokens [T, H], ids [T, K] logical. Collective."""
        session, layer = self._session, self.layer
        self.called = True
        if session.idle:
            layer(hidden_states[:0], top_k_index[:0], top_k_weights[:0].float())
            return torch.zeros_like(hidden_states)
        session.count(self._index, top_k_index)
        return layer(hidden_states, top_k_index, top_k_weights.float())
