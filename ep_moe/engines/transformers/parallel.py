"""Our transport as an implementation of transformers' own expert parallelism.

transformers shards experts over a device mesh and calls a hook for each experts module: `EPImplementation` from 5.23
on, a tensor-parallel style in 5.17 and 5.18; the releases in between have no hook for other implementations.
Letters: T tokens on this rank, H hidden, K top-k, E experts of all ranks, R ranks of the expert group.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig

from ep_moe.config import MoEConfig, TransportConfig
from ep_moe.engines.common.transports import SharedTransports, with_topk
from ep_moe.engines.transformers.architectures import check_hook_in_step
from ep_moe.engines.transformers.experts import ExpertsModule, activation_of, weights_of
from ep_moe.engines.transformers.fp8 import ACTIVATION_SCALE, SCALE
from ep_moe.engines.transformers.hooks import NAME, HookConfig, ModuleWeights, without_backward
from ep_moe.layer import ExpertParallelMoE

STYLE = "ep_moe_experts"  # tensor-parallel style for transformers 5.17 and 5.18


class MeshExperts:
    """The forward of transformers' EP hooks: experts sharded over a device mesh, E / R neighbors on each rank.

    Args:
        experts: the module; its parameters hold this rank's experts when it is called.
        expert_group: the ranks over which the experts are sharded.
        batch_group: the ranks that hold the same tokens; each sends a slice and gathers the results.
        transports: the shared transports. config: options of the layer.
    """

    def __init__(
        self,
        experts: ExpertsModule,
        expert_group: dist.ProcessGroup,
        batch_group: dist.ProcessGroup,
        transports: SharedTransports,
        config: HookConfig,
    ) -> None:
        self._experts, self._config = experts, config
        self._expert_group, self._batch_group = expert_group, batch_group
        self._transports = transports
        self._index = transports.number_module()  # here, since ranks may first call modules in different orders
        self._weights: ModuleWeights | None = None
        self._layer: ExpertParallelMoE | None = None

    def _prepare(self, num_topk: int, dtype: torch.dtype) -> ExpertParallelMoE:
        """The layer for one call. Collective for the first module of these sizes."""
        module = self._experts
        if self._weights is None or not self._weights.serves(module):
            weights = weights_of(module)
            like, num_experts = weights.w13.values, weights.num_local_experts * self._expert_group.size()
            sizes = TransportConfig(
                hidden=like.shape[2], max_tokens_per_rank=self._config.max_tokens_per_rank, dtype=dtype, num_slots=1
            )
            sizes = with_topk(sizes, num_topk)
            self._transport = self._transports.get(self._expert_group, num_experts, sizes, like.device)
            self._moe = MoEConfig(
                hidden=like.shape[2],
                intermediate=weights.w2.values.shape[2],
                num_experts=num_experts,
                activation=activation_of(module),
                scheme=weights.scheme.name,
                layout=self._config.layout,
            )
            self._weights, self._layer = ModuleWeights(module, weights), None
        if self._layer is not None:
            return self._layer
        layer = ExpertParallelMoE(
            self._moe,
            self._weights.current(module),
            self._transport,
            experts=self._config.experts,
            layer_index=self._index,
        )
        if self._weights.kept is not None:  # copies are for one call
            self._layer = layer
        return layer

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute this rank's tokens [T, H]; ids [T, K] are global. Collective, inference only."""
        run = functools.partial(self._run, hidden_states, top_k_index, top_k_weights.float())
        return without_backward(self._experts, run, hidden_states, top_k_weights)

    def _run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        layer = self._prepare(ids.shape[1], x.dtype)
        sharers = self._batch_group.size()
        if sharers == 1:
            return layer.forward_routed(x, ids, weights)
        rows = -(-x.shape[0] // sharers)
        mine = slice(self._batch_group.rank() * rows, (self._batch_group.rank() + 1) * rows)
        part = layer.forward_routed(x[mine], ids[mine], weights[mine])
        padded = torch.nn.functional.pad(part, (0, 0, 0, rows - part.shape[0]))
        gathered = padded.new_empty(sharers * rows, padded.shape[1])
        with self._transports.join(self._expert_group, x.device).guard("gather"):
            dist.all_gather_into_tensor(gathered, padded, group=self._batch_group)
        return gathered[: x.shape[0]]


def register_parallelism(config: HookConfig) -> None:
    """Register with transformers' expert parallelism, if the installed release has a hook for it. Local."""
    transports = SharedTransports(config.transport)
    if _has_ep_implementations():
        _register_implementation(config, transports)
    elif _has_parallel_styles():
        _register_style(config, transports)


def _has_ep_implementations() -> bool:
    """True from transformers 5.23 on."""
    return "ep_implementation" in DistributedConfig.__dataclass_fields__


def _has_parallel_styles() -> bool:
    """True for transformers 5.17 and 5.18, whose expert parallelism is a set of tensor-parallel styles."""
    return "ep_size" not in DistributedConfig.__dataclass_fields__


def _register_implementation(config: HookConfig, transports: SharedTransports) -> None:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

    class EpMoeImplementation(EPImplementation):
        """Our transport between the ranks of an expert group, which may hold the same batch or different ones."""

        needs_shared_batch = False

        def __init__(self, experts: ExpertsModule, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            if not self.shares_batch:
                check_hook_in_step(experts)
            self._forward = MeshExperts(experts, ep_mesh.get_group(), tp_mesh.get_group(), transports, config)

        def __call__(
            self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            return self._forward(hidden_states, top_k_index, top_k_weights)

    EPImplementationInterface.register(NAME, EpMoeImplementation)


def _register_style(config: HookConfig, transports: SharedTransports) -> None:
    from transformers.distributed.tensor_parallel import (
        ALL_PARALLEL_STYLES,
        TensorParallelLayer,
        _use_local_dtensor_params,
    )

    class EpMoeExpertsStyle(TensorParallelLayer):
        """Our transport between the ranks of a tensor-parallel mesh, which hold the same batch."""

        def install_forward(self, module: ExpertsModule, mesh: Any) -> ExpertsModule:
            group = mesh.get_group()
            exchange = MeshExperts(module, group, group, transports, config)

            def forward(
                hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
            ) -> torch.Tensor:
                with _use_local_dtensor_params(module):
                    return exchange(hidden_states, top_k_index, top_k_weights)

            module.forward = forward
            return module

    style: Any = EpMoeExpertsStyle()
    ALL_PARALLEL_STYLES.register(STYLE, style)


def parallel_config(config: PreTrainedConfig, num_ranks: int) -> DistributedConfig:
    """See `ep_moe.engines.transformers.distributed_config`."""
    if _has_ep_implementations():
        return DistributedConfig(tp_size=num_ranks, ep_size=num_ranks, ep_implementation=NAME)
    if not _has_parallel_styles():
        raise RuntimeError(
            f"transformers {transformers.__version__} has no hook for other implementations of expert parallelism: use "
            f"5.17, 5.18 or 5.23, or ep_moe.engines.transformers.from_pretrained, which works with any"
        )
    plan: Any = config.base_model_ep_plan
    if not plan:
        raise ValueError(f"{type(config).__name__} has no expert-parallel plan")
    styles = {"grouped_gemm": "grouped_gemm", "moe_tp_experts": STYLE}  # ids stay global: no style for the router
    chosen = {f"model.{name}": styles[style] for name, style in plan.items() if style in styles}
    quantized: Any = getattr(config, "quantization_config", None) or {}
    settings = quantized if isinstance(quantized, dict) else quantized.to_dict()
    if settings.get("quant_method") == "fp8":
        endings = [SCALE, *[ACTIVATION_SCALE] * (settings.get("activation_scheme") == "static")]
        weights = [name for name, style in chosen.items() if style == "grouped_gemm"]
        chosen |= {f"{name}_{ending}": "grouped_gemm" for name in weights for ending in endings}
    return DistributedConfig(tp_size=num_ranks, tp_plan=chosen)
