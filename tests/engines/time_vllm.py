"""One rank of vLLM whose MoE layers are timed: data parallel x expert parallel, its own kernels beside ours."""

import contextlib
import dataclasses
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

ATTENTION = "vllm.vllm_flash_attn"  # compiled parts that no layer of experts calls


def make(*, rank: int, world: int, port: int, max_tokens: int) -> "Vllm":
    """Import vLLM and start its ranks. Collective."""
    os.environ.update(EP_MOE_VLLM="1", EP_MOE_STRICT="1", VLLM_NO_USAGE_STATS="1")
    _without_attention()
    return Vllm(rank=rank, world=world, port=port, max_tokens=max_tokens)


def _without_attention() -> None:
    """Let vLLM be imported without its attention kernels, if the folder has none."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = f"{found.submodule_search_locations[0]}/vllm_flash_attn"
    if any(name.endswith(".so") for name in os.listdir(folder)):
        return
    module = types.ModuleType(ATTENTION)
    for name in (
        "compile_flash_attn_varlen_func_from_specs",
        "fa_version_unsupported_reason",
        "flash_attn_varlen_func",
        "get_scheduler_metadata",
        "is_fa_version_supported",
    ):
        setattr(module, name, None)
    sys.modules[ATTENTION] = module


@dataclasses.dataclass
class Made:
    """A layer, and the config that vLLM's forward context needs with it."""

    config: Any
    runner: Any

    @property
    def method(self) -> Any:
        """Its quantization method."""
        return self.runner.routed_experts.quant_method


class Vllm:
    """The engine of `time_layers`. Args: as `make`."""

    name = "vllm"
    backends = ("triton", "auto")
    equal_rows = False

    def __init__(self, *, rank: int, world: int, port: int, max_tokens: int) -> None:
        import vllm
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.v1.worker.workspace import init_workspace_manager

        self.version = vllm.__version__
        self.words = {"ranks": "data parallel x expert parallel", "a2a": "allgather_reducescatter" if world > 1 else ""}
        self._rank, self._world, self._port, self._max_tokens = rank, world, port, max_tokens
        self.device = torch.device("cuda", torch.cuda.current_device())
        init_workspace_manager(self.device)
        with set_current_vllm_config(self._config("triton")):
            parallel_state.init_distributed_environment(
                world_size=1,
                rank=0,
                distributed_init_method=f"tcp://127.0.0.1:{port + 5}",
                local_rank=rank,
                backend="nccl",
            )
            parallel_state.initialize_model_parallel(1, 1)

    def _config(self, backend: str) -> Any:
        from vllm.config import DeviceConfig, KernelConfig, ParallelConfig, VllmConfig

        config = VllmConfig(
            parallel_config=ParallelConfig(enable_expert_parallel=True),
            kernel_config=KernelConfig(moe_backend=backend),
            device_config=DeviceConfig("cuda"),
        )
        config.scheduler_config.max_num_batched_tokens = self._max_tokens
        if self._world > 1:
            parallel = config.parallel_config
            parallel.data_parallel_size, parallel.data_parallel_rank = self._world, self._rank
            parallel.data_parallel_master_ip, parallel.data_parallel_master_port = "127.0.0.1", self._port
            parallel._data_parallel_master_port_list = [self._port + step for step in range(1, 5)]
        return config

    def build(self, case: Any, backend: str, label: str, fill: Callable[[Any], None]) -> Made:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.fused_moe.layer import FusedMoE
        from vllm.model_executor.layers.fused_moe.oracle import mxfp4
        from vllm.model_executor.layers.quantization.fp8 import Fp8Config
        from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

        mxfp4._user_moe_activation_override = lambda: None  # asks for the options of a model
        blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        quants = {
            "none": lambda: None,
            "fp8_block": lambda: Fp8Config(is_checkpoint_fp8_serialized=True, **blocks),
            "mxfp4_w4a16": GptOssMxfp4Config,
        }
        config = self._config(backend)
        with set_current_vllm_config(config), self.device:
            runner = FusedMoE(
                num_experts=case.num_experts[self._world],
                top_k=case.num_topk,
                hidden_size=case.hidden,
                intermediate_size=case.intermediate,
                params_dtype=torch.bfloat16,
                renormalize=True,
                has_bias=case.gpt_oss,
                activation="swigluoai" if case.gpt_oss else "silu",
                quant_config=quants[case.scheme](),
                prefix=label,
            )
            fill(runner.routed_experts)
            runner.routed_experts.quant_method.process_weights_after_loading(runner.routed_experts)
        return Made(config, runner)

    def switch_on(self) -> None:
        from ep_moe.engines.vllm import register

        register()

    def kernel_of(self, layer: Made) -> str:
        """vLLM's classes of exchange and experts."""
        kernel = layer.method.moe_kernel
        return f"{type(kernel.prepare_finalize).__name__}, {type(kernel.fused_experts).__name__}"

    def group_of(self, layer: Made) -> Any:
        return layer.method.ep_moe.group

    def route(self, layer: Made, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = logits.new_empty(logits.shape[0], layer.runner.moe_config.hidden_dim, dtype=torch.bfloat16)
        weights, ids = layer.runner.router.select_experts(hidden_states=x, router_logits=logits)
        return ids, weights

    def call_of(self, layer: Made, x: torch.Tensor, logits: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The whole layer, its router's top-k included; the linear layer before it is not."""
        from vllm.forward_context import set_forward_context

        count = x.shape[0]
        context: dict[str, Any] = {"num_tokens": count}
        if self._world > 1:
            context["num_tokens_across_dp"] = torch.tensor([count] * self._world, dtype=torch.int32, device="cpu")

        def call() -> torch.Tensor:
            with set_forward_context(None, layer.config, **context):
                output: torch.Tensor = layer.runner(x, logits)
            return output

        return call

    @contextlib.contextmanager
    def capturing(self) -> Iterator[torch.cuda.Stream]:
        """vLLM's context of a capture."""
        from vllm.distributed.parallel_state import graph_capture

        with graph_capture(device=self.device) as context:
            yield context.stream
