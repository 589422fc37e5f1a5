"""Registration of "ep_moe" with transformers, done by the functions that need it and not at import."""

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.distributed import DistributedConfig
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ep_moe.config import Layout
from ep_moe.engines.transformers.architectures import refuse_unsupported_models
from ep_moe.engines.transformers.experts import LOCAL, SHARDED, ExpertsModule
from ep_moe.engines.transformers.hooks import MAX_TOKENS_PER_RANK, NAME, HookConfig, LocalExperts, without_backward
from ep_moe.engines.transformers.parallel import parallel_config, register_parallelism


def register(
    *,
    transport: str = "auto",
    experts: str = "auto",
    layout: Layout | str = Layout.COMPACT,
    max_tokens_per_rank: int = MAX_TOKENS_PER_RANK,
) -> None:
    """Register "ep_moe" with transformers, as an `experts_implementation`, also of experts in fp8, and for its expert
    parallelism.

    Call it before a model is made that names "ep_moe", and again for other options; `from_pretrained`, `shard_experts`
    and `distributed_config` call it if it was not called before. A model with transposed or interleaved experts, such
    as gpt-oss, works but is slow: its weights are copied into our order in each call; `from_pretrained` and
    `shard_experts` copy them once. After `register`, setting "ep_moe" on a model with experts that supports no
    implementation, such as Llama 4, is a ValueError; transformers itself would ignore it.

    Args: as in `from_pretrained`, for models that transformers itself loads; `transport` and `max_tokens_per_rank`
        apply to its expert parallelism only, see `distributed_config`. Local.
    """
    config = HookConfig(
        transport=transport, experts=experts, layout=Layout(layout), max_tokens_per_rank=max_tokens_per_rank
    )
    for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        interface.register(NAME, _experts_function(config))
    register_parallelism(config)
    refuse_unsupported_models(NAME)


def ensure_registered() -> None:
    """Call `register` unless "ep_moe" is registered already. Local."""
    if NAME not in ALL_EXPERTS_FUNCTIONS:
        register()


def distributed_config(config: PreTrainedConfig, num_ranks: int) -> DistributedConfig:
    """The `distributed_config` that makes transformers' own `from_pretrained` shard experts and use ep_moe for them.

        AutoModelForCausalLM.from_pretrained(directory, distributed_config=distributed_config(config, 8))

    All ranks see the same batch; each sends a slice of it. The number of experts must divide by `num_ranks`.

    Args:
        config: of the model. num_ranks: of torch's default process group.
    Errors: RuntimeError for transformers 5.19 to 5.22, which have no hook for other implementations;
        ValueError for a model without an expert-parallel plan. Local.
    """
    ensure_registered()
    return parallel_config(config, num_ranks)


def _experts_function(config: HookConfig) -> Any:
    """The function that transformers calls in place of an experts module's own forward."""

    @torch.compiler.disable
    def ep_moe_experts_forward(
        self: ExpertsModule, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        def run() -> torch.Tensor:
            sharded = getattr(self, SHARDED, None)
            if sharded is not None:
                return sharded(hidden_states, top_k_index, top_k_weights)
            local = getattr(self, LOCAL, None)
            if local is None or not local.serves(self):
                local = LocalExperts(self, config)
                setattr(self, LOCAL, local)
            return local(self, hidden_states, top_k_index, top_k_weights)

        return without_backward(self, run, hidden_states, top_k_weights)

    return ep_moe_experts_forward
