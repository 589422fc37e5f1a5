"""Our experts as experts of vLLM's modular kernels; `ep_moe.functional.vllm` has classes that need no vLLM.

Letters: T rows on this rank, H hidden, I intermediate, K top-k, L local experts, C rows of an expert in BATCHED.
"""

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceDelegate
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym

from ep_moe.engines.vllm.parameters import activation_of
from ep_moe.engines.vllm.prepare_finalize import BatchMetadata
from ep_moe.experts import Experts, create_experts
from ep_moe.layout import Batched, ExpertBatch
from ep_moe.quant import QuantScheme, StoredMatrix, get_scheme
from ep_moe.weights import ExpertWeights

_FP8 = torch.float8_e4m3fn


class EpMoeExperts(mk.FusedMoEExpertsModular):
    """What both formats share. The constructor is vLLM's own, as its code makes experts from their class.

    Without `bind`, weights and activation are those that vLLM passes with each call: unquantized or fp8 in blocks, with
    w13 in the order [gate; up].
    """

    def __init__(
        self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None
    ) -> None:
        super().__init__(moe_config, quant_config, max_num_tokens, num_dispatchers)
        self._experts: Experts | None = None
        self._weights: ExpertWeights | None = None
        self._made_of: tuple[object, ...] = ()
        self._most_rows = 0

    def bind(self, weights: ExpertWeights, experts: Experts, most_rows: int = 0) -> None:
        """Compute these weights, whatever w1 and w2 a call passes. Local.

        Args: most_rows: rows of the largest output of any step.
        """
        self._weights, self._experts, self._made_of, self._most_rows = weights, experts, (), most_rows

    _supports_current_device = _supports_no_act_and_mul = staticmethod(lambda: True)

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return (weight_key, activation_key) in ((None, None), (kFp8Static128BlockSym, kFp8Dynamic128Sym))

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        if activation is MoEActivation.SWIGLUOAI:  # interleaved, which only `bind` separates
            return False
        try:
            activation_of(activation, alpha=None, beta=None, limit=None)
        except ValueError:
            return False
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return bool(moe_parallel_config.tp_size == 1)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """The prepare/finalize weights and sums, unless the batch is FLAT, in which ours knows that we have."""
        return TopKWeightAndReduceDelegate()

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """vLLM's sizes, without its check that there are as many rows as ids: COMPACT has other rows. Local."""
        return w1.shape[0], a1.shape[-2], w1.shape[1], a1.shape[-1], topk_ids.shape[1]

    def workspace_shapes(self, *sizes: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspaces but for memory that the output shares: of the largest step, as vLLM allocates none while it
        serves, and a step of fewer tokens may have more rows. The third is the output's own shape.

        Args: sizes: M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation.
        """
        rows, _, hidden, _, _, num_local_experts, metadata, _ = sizes
        if isinstance(metadata, BatchMetadata) and metadata.batch is not None:
            return (self._most_rows * hidden,), (0,), metadata.batch.output_shape
        return (0,), (0,), (num_local_experts, rows, hidden)

    def apply(self, **call: Any) -> None:
        """Compute all local experts.

        Args: call: vLLM's arguments, by name: `output` of the batch's shape is written; `hidden_states`, `a1q_scale`
            and `expert_tokens_meta` are the batch; `w1`, `w2` and `activation` are used unless `bind` was called.
        Errors: ValueError for a batch, weights or an activation that do not fit. Local, on the current stream.
        """
        if self._weights is None or self._made_of:
            self._make(call["w1"], call["w2"], call["activation"])
        assert self._weights is not None
        assert self._experts is not None
        self._experts(self._batch(call, self._weights.scheme), self._weights, out=call["output"])

    def _batch(self, call: dict[str, Any], scheme: QuantScheme) -> ExpertBatch:
        """Our batch, or one made of the tensors of another prepare/finalize in BATCHED."""
        metadata, x = call["expert_tokens_meta"], call["hidden_states"]
        if isinstance(metadata, BatchMetadata) and metadata.batch is not None:
            return metadata.batch
        if x.dim() != 3 or metadata is None or metadata.expert_num_tokens is None:
            raise ValueError("experts of ep_moe in the Standard format need the prepare/finalize of ep_moe")
        experts, height = x.shape[:2]
        starts = torch.arange(experts, dtype=torch.int32, device=x.device) * height
        return Batched(
            x=x,
            scale=call["a1q_scale"],
            scheme=scheme,
            dtype=call["output"].dtype,
            expert_row_start=starts,
            expert_num_tokens=metadata.expert_num_tokens[:experts].to(torch.int32),
            row_index=None,
            expected_rows=height,
        )

    def _make(self, w1: torch.Tensor, w2: torch.Tensor, activation: Any) -> None:
        """Take the weights of a call, unless they are those of the last one."""
        made_of = (w1.data_ptr(), w2.data_ptr(), w1.shape, w2.shape, activation)
        if made_of == self._made_of:
            return
        if activation is MoEActivation.SWIGLUOAI:
            raise ValueError("activation 'swigluoai' has interleaved gate and up rows; [gate; up] is computed here")
        quant = self.quant_config
        scheme = get_scheme("none")
        if quant.quant_dtype is not None:
            if quant.quant_dtype != _FP8 or not quant.block_shape:
                raise ValueError(f"weights of {quant.quant_dtype} without blocks are not computed here")
            rows, columns = quant.block_shape
            scheme = get_scheme(f"fp8_block_{rows}x{columns}")
        self._weights = ExpertWeights(
            w13=StoredMatrix(w1, scale=quant.w1_scale),
            w2=StoredMatrix(w2, scale=quant.w2_scale),
            scheme=scheme,
            w13_bias=quant.w1_bias,
            w2_bias=quant.w2_bias,
        )
        ours = activation_of(
            activation,
            alpha=getattr(quant, "gemm1_alpha", None),
            beta=getattr(quant, "gemm1_beta", None),
            limit=getattr(quant, "gemm1_clamp_limit", None),
        )
        self._experts = create_experts("auto", ours, w1.device, scheme=scheme)
        self._made_of = made_of


class EpMoeBatchedExperts(EpMoeExperts):
    """vLLM's BatchedExperts format: ours in BATCHED, or a prepare/finalize of vLLM's own."""

    @staticmethod
    def activation_format() -> Any:
        """BatchedExperts."""
        return mk.FusedMoEActivationFormat.BatchedExperts


class EpMoeStandardExperts(EpMoeExperts):
    """vLLM's Standard format: COMPACT and FLAT, with our prepare/finalize only."""

    @staticmethod
    def activation_format() -> Any:
        """Standard."""
        return mk.FusedMoEActivationFormat.Standard
