"""Our transport in transformers' own expert parallelism.

transformers shards experts over a device mesh and calls a hook for each experts module: `EPImplementation` from 5.23
on, a tensor-parallel style in 5.17 and 5.18; the releases in between have no hook for other implementations.
Letters: T tokens on this rank, H hidden, K top-k, E experts of all ranks, R ranks of the expert group.
"""

import atexit
import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig

from ep_moe.config import TransportConfig
from ep_moe.engines.transformers.architectures import check_hook_in_step
from ep_moe.engines.transformers.experts import ExpertsModule, weights_of
from ep_moe.engines.transformers.hooks import NAME, HookConfig, ModuleLayer, with_topk, without_backward
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement
from ep_moe.transport import Transport, create_transport

STYLE = "ep_moe_experts"  # tensor-parallel style for transformers 5.17 and 5.18


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _SharedTransport:
    """One transport for all layers over one process group."""

    process_group: dist.ProcessGroup
    group: EPGroup
    transport: Transport

    def close(self) -> None:
        """Destroy transport and group, not the process group. Local, calling it twice is fine."""
        self.transport.destroy()
        self.group.destroy()


class SharedTransports:
    """Transports that are shared by all layers with the same sizes, also by those of later models.

    A transport lives until the process ends or another process group takes the name of its own. It cannot be closed
    with its last layer: ranks garbage-collect a model at different times, so that one rank would use the old transport
    and another a new one.
    """

    def __init__(self, config: HookConfig) -> None:
        self.config = config
        self._open: dict[tuple[Any, ...], _SharedTransport] = {}
        self._num_modules = 0

    def number_module(self) -> int:
        """Return the number of a new experts module, equal on ranks that build the same models in order. Local."""
        self._num_modules += 1
        return self._num_modules - 1

    def get(
        self, process_group: dist.ProcessGroup, num_experts: int, num_topk: int, like: torch.Tensor
    ) -> _SharedTransport:
        """The transport over a process group, for E experts, top-K, and hidden, dtype and device of w13 `like`
        [L, W, H]. Collective for the first layer with these sizes; all ranks call it in the same order.
        """
        sizes = TransportConfig(
            hidden=like.shape[2],
            max_tokens_per_rank=self.config.max_tokens_per_rank,
            dtype=like.dtype,
            num_slots=1,
        )
        sizes = with_topk(sizes, num_topk)
        key = (process_group.group_name, num_experts, sizes, like.device)
        shared = self._open.get(key)
        if shared is not None and shared.process_group is not process_group:
            shared.close()
            shared = None
        if shared is None:
            store = dist.distributed_c10d._get_default_store()
            group = EPGroup.from_process_group(process_group, store, device=like.device)
            transport = create_transport(
                self.config.transport,
                group,
                Placement.linear(num_experts, group.num_ranks),
                sizes,
            )
            shared = _SharedTransport(process_group=process_group, group=group, transport=transport)
            self._open[key] = shared
            atexit.register(shared.close)
        return shared


class MeshExperts:
    """The forward of transformers' EP hooks: experts sharded over a device mesh, E / R neighbors on each rank.

    Args:
        experts: the module; its parameters hold this rank's experts when it is called.
        expert_group: the ranks over which the experts are sharded.
        batch_group: the ranks that hold the same tokens; each sends a slice and gathers the results.
        transports: the shared transports.
    """

    def __init__(
        self,
        experts: ExpertsModule,
        expert_group: dist.ProcessGroup,
        batch_group: dist.ProcessGroup,
        transports: SharedTransports,
    ) -> None:
        self._experts = experts
        self._expert_group, self._batch_group = expert_group, batch_group
        self._transports = transports
        self._index = transports.number_module()  # now, since ranks may first call modules in different orders
        self._shared: _SharedTransport | None = None
        self._layer: ModuleLayer | None = None

    def _prepare(self, num_topk: int) -> tuple[ExpertParallelMoE, _SharedTransport]:
        if self._layer is None or self._shared is None or not self._layer.serves(self._experts):
            weights = weights_of(self._experts)
            num_experts = weights.num_local_experts * self._expert_group.size()
            self._shared = self._transports.get(self._expert_group, num_experts, num_topk, weights.w13.values)
            self._layer = ModuleLayer(
                self._experts, weights, self._shared.transport, self._transports.config, self._index
            )
        return self._layer.layer(self._experts), self._shared

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute this rank's tokens [T, H]; ids [T, K] are global. Collective, inference only."""

        def run() -> torch.Tensor:
            return self._run(hidden_states, top_k_index, top_k_weights.float())

        return without_backward(self._experts, run, hidden_states, top_k_weights)

    def _run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        layer, shared = self._prepare(ids.shape[1])
        sharers = self._batch_group.size()
        if sharers == 1:
            return layer.forward_routed(x, ids, weights)
        rows = -(-x.shape[0] // sharers)
        first = self._batch_group.rank() * rows
        mine = slice(first, first + rows)
        part = layer.forward_routed(x[mine], ids[mine], weights[mine])
        padded = torch.nn.functional.pad(part, (0, 0, 0, rows - part.shape[0]))
        gathered = padded.new_empty(sharers * rows, padded.shape[1])
        with shared.group.guard("gather"):
            dist.all_gather_into_tensor(gathered, padded, group=self._batch_group)
        return gathered[: x.shape[0]]


def register_parallelism(config: HookConfig) -> None:
    """Register with transformers' expert parallelism, if the installed release has a hook for it. Local."""
    if _has_ep_implementations():
        _register_implementation(SharedTransports(config))
    elif _has_parallel_styles():
        _register_style(SharedTransports(config))


def _has_ep_implementations() -> bool:
    """True from transformers 5.23 on."""
    return "ep_implementation" in DistributedConfig.__dataclass_fields__


def _has_parallel_styles() -> bool:
    """True for transformers 5.17 and 5.18, whose expert parallelism is a set of tensor-parallel styles."""
    return "ep_size" not in DistributedConfig.__dataclass_fields__


def _register_implementation(transports: SharedTransports) -> None:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

    class EpMoeImplementation(EPImplementation):
        """Our transport between the ranks of an expert group, which may hold the same batch or different ones."""

        needs_shared_batch = False

        def __init__(self, experts: ExpertsModule, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            if not self.shares_batch:
                check_hook_in_step(experts)
            self._forward = MeshExperts(experts, ep_mesh.get_group(), tp_mesh.get_group(), transports)

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            return self._forward(hidden_states, top_k_index, top_k_weights)

    EPImplementationInterface.register(NAME, EpMoeImplementation)


def _register_style(transports: SharedTransports) -> None:
    from transformers.distributed.tensor_parallel import (
        ALL_PARALLEL_STYLES,
        TensorParallelLayer,
        _use_local_dtensor_params,
    )

    class EpMoeExpertsStyle(TensorParallelLayer):
        """Our transport between the ranks of a tensor-parallel mesh, which hold the same batch."""

        def install_forward(self, module: ExpertsModule, mesh: Any) -> ExpertsModule:
            group = mesh.get_group()
            exchange = MeshExperts(module, group, group, transports)

            def forward(
                hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
            ) -> torch.Tensor:
                with _use_local_dtensor_params(module):
                    return exchange(hidden_states, top_k_index, top_k_weights)

            module.forward = forward
            return module

    style: Any = EpMoeExpertsStyle()
    ALL_PARALLEL_STYLES.register(STYLE, style)


def distributed_config(config: PreTrainedConfig, num_ranks: int) -> DistributedConfig:
    """The `distributed_config` that makes transformers' own `from_pretrained` shard experts and use ep_moe for them.

        AutoModelForCausalLM.from_pretrained(directory, distributed_config=distributed_config(config, 8))

    All ranks see the same batch; each sends a slice of it. The number of experts must divide by `num_ranks`.

    Args:
        config: of the model. num_ranks: of torch's default process group.
    Errors: RuntimeError for transformers 5.19 to 5.22, which have no hook for other implementations;
        ValueError for a model without an expert-parallel plan. Local.
    """
    if _has_ep_implementations():
        return DistributedConfig(tp_size=num_ranks, ep_size=num_ranks, ep_implementation=NAME)
    if not _has_parallel_styles():
        raise RuntimeError(
            f"transformers {transformers.__version__} lets nobody else exchange its experts' tokens: use 5.17, 5.18 or "
            f"5.23, or ep_moe.engines.transformers.from_pretrained, which works with any"
        )
    plan: Any = config.base_model_ep_plan
    if not plan:
        raise ValueError(f"{type(config).__name__} has no expert-parallel plan")
    styles = {"grouped_gemm": "grouped_gemm", "moe_tp_experts": STYLE}  # ids stay global: no style for the router
    return DistributedConfig(
        tp_size=num_ranks, tp_plan={f"model.{name}": styles[style] for name, style in plan.items() if style in styles}
    )
