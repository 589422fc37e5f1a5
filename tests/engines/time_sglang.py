"""One rank of SGLang whose MoE layers are timed: tensor parallel x expert parallel, its Triton runner beside ours.

Ranks have equal rows (a2a "none"), and both sides are followed by the all-reduce of SGLang's models.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sglang_twins
import torch

MODEL = {  # that SGLang's options are for; layers have sizes of their own
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 768,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
EAGER_TOKENS = 512  # steps with more rows have prompts


def make(*, rank: int, world: int, port: int, max_tokens: int) -> "Sglang":
    """Import SGLang and start its ranks. Collective."""
    os.environ.update(EP_MOE_SGLANG="1", EP_MOE_STRICT="1", SGLANG_IS_FLASHINFER_AVAILABLE="false")
    os.environ["SGLANG_SKIP_P2P_CHECK"] = "1"  # it starts processes without `_without_others`
    _without_others()
    return Sglang(rank=rank, world=world, port=port, max_tokens=max_tokens)


def _without_others() -> None:
    """Let SGLang be imported without packages that no layer of experts calls."""
    import triton  # noqa: F401 torch and Triton look for some of them: they come first
    import tvm_ffi  # noqa: F401

    sglang_twins.EMPTY = (*sglang_twins.EMPTY, "flashinfer")
    empty = sglang_twins._Empty()
    for name in ("IPython", "IPython.display"):  # which may be there, without what it needs
        spec = empty.find_spec(name)
        assert spec is not None
        sys.modules[name] = empty.create_module(spec)
    sglang_twins.install()


class Sglang:
    """The engine of `time_layers`. Args: as `make`."""

    name = "sglang"
    backends = ("triton",)
    equal_rows = True

    def __init__(self, *, rank: int, world: int, port: int, max_tokens: int) -> None:
        import sglang
        from sglang.srt import runtime_context
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.moe import utils
        from sglang.srt.server_args import ServerArgs

        self.version = sglang.__version__
        self._world, self._built = world, 0
        self.device = torch.device("cuda", torch.cuda.current_device())
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODEL))
            given = {
                "--model-path": folder,
                "--dtype": "bfloat16",
                "--tp-size": str(world),
                "--ep-size": str(world),
                "--moe-runner-backend": "triton",
                "--attention-backend": "triton",
                "--sampling-backend": "pytorch",
                "--chunked-prefill-size": str(max_tokens),
                "--max-running-requests": "512",
            }
            words = [word for pair in given.items() for word in pair]
            flags = ["--skip-tokenizer-init", "--disable-shared-experts-fusion"]
            args = ServerArgs.from_cli_args(parser.parse_args([*words, *flags]))
            runtime_context.publish(args, role="scheduler")
            utils.initialize_moe_config(args)
            config = ModelConfig.from_server_args(args)
        parallel_state.init_distributed_environment(
            world_size=world,
            rank=rank,
            local_rank=rank,
            backend="nccl",
            distributed_init_method=f"tcp://127.0.0.1:{port}",
        )
        parallel_state.initialize_model_parallel(world, world, backend="nccl")
        dp_attention.initialize_dp_attention(args, config)
        custom = parallel_state.get_moe_ep_group().ca_comm
        reducer = "NCCL" if custom is None or custom.disabled else type(custom).__name__
        self.words = {"ranks": "tensor parallel x expert parallel", "a2a": "none"}
        self.words["all_reduce"] = reducer if world > 1 else ""

    def build(self, case: Any, backend: str, label: str, fill: Callable[[Any], None]) -> Any:
        del backend  # one, chosen by the options
        from sglang.srt.layers.moe.ep_moe.layer import get_moe_impl_class
        from sglang.srt.layers.quantization.fp8 import Fp8Config

        blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        quant = None if case.scheme == "none" else Fp8Config(is_checkpoint_fp8_serialized=True, **blocks)
        self._built += 1
        with self.device:
            layer = get_moe_impl_class(quant)(
                num_experts=case.num_experts[self._world],
                top_k=case.num_topk,
                hidden_size=case.hidden,
                intermediate_size=case.intermediate,
                layer_id=self._built - 1,
                params_dtype=torch.bfloat16,
                quant_config=quant,
                prefix=f"{label}.experts",
                inplace=False,  # calls are repeated with the same tokens
            )
            fill(layer)
            layer.quant_method.process_weights_after_loading(layer)
        return layer

    def switch_on(self) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry

        from ep_moe.engines.sglang import register

        register()
        HookRegistry.apply_hooks()

    def kernel_of(self, layer: Any) -> str:
        """SGLang's classes of exchange and experts."""
        return f"{type(layer.dispatcher).__name__}, {type(layer.quant_method).__name__} with Triton"

    def group_of(self, layer: Any) -> Any:
        return layer.quant_method.ep_moe.group

    def route(self, layer: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights, by torch: the router is not timed."""
        weights, ids = logits.softmax(-1).topk(layer.top_k, -1)
        return ids.int(), (weights / weights.sum(-1, keepdim=True)).float()

    def call_of(self, layer: Any, x: torch.Tensor, logits: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The layer without its router, and the all-reduce of the model around it."""
        from sglang.srt.distributed import moe_expert_parallel_all_reduce
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        ids, weights = self.route(layer, logits)
        routed = StandardTopKOutput(weights, ids, logits)
        dp_attention.set_is_extend_in_batch(x.shape[0] > EAGER_TOKENS)

        def call() -> torch.Tensor:
            output: torch.Tensor = layer(x, routed)
            return moe_expert_parallel_all_reduce(output) if self._world > 1 else output

        return call

    @contextlib.contextmanager
    def capturing(self) -> Iterator[torch.cuda.Stream]:
        """SGLang's context of a capture."""
        from sglang.srt.distributed.parallel_state import graph_capture

        with graph_capture() as context:
            yield context.stream
