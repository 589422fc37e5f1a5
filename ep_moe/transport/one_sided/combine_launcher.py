"""Launches the combine kernel. Runs on a CPU under TRITON_INTERPRET=1.

There is no host sync, and launches do not depend on counts or ids: all of them may be captured in a CUDA graph.

Letters: T tokens on this rank, H hidden.
"""

import torch
import triton

from ep_moe.config import ALIGNMENT, Layout
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernels.device import Device
from ep_moe.kernels.exchange.combine import _combine_kernel
from ep_moe.kernels.exchange.combine_send import Combining, Results
from ep_moe.kernels.exchange.round_state import Halves
from ep_moe.tensors import aligned
from ep_moe.transport.one_sided.round_plan import ExchangeRound, KernelContext, aligned_rows, is_aligned
from ep_moe.transport.one_sided.tuning import SENT_BYTES, awaited_words, block_words, held_words


class CombineLauncher:
    """Launches the combines of one transport."""

    def __init__(self, context: KernelContext) -> None:
        self._context = context
        # for arguments that a launch does not need, and for results that no rank reads: all rows at one address
        self.unused = torch.empty(context.config.hidden, dtype=context.config.dtype, device=context.device)
        self._unused_at, self._result_stride = self.unused.data_ptr(), context.config.hidden // ALIGNMENT

    def send(self, round_: ExchangeRound, y: torch.Tensor | None) -> None:
        """Launch the sending half of a combine, which without `y` sends NaN. Local, no host sync."""
        kernel = self.kernel_of(round_, poisoned=y is None, shared_dtype=None, send=True, receive=False)
        results = Results(self.unused if y is None else aligned(y), self.unused, self.unused)
        numbers = 0, 0, self._context.timeout_ns
        if kernel.run is None:
            kernel((results,), numbers)
        else:
            kernel.run((*map(torch.Tensor.data_ptr, results), *numbers))

    def receive(
        self,
        round_: ExchangeRound,
        y: torch.Tensor | None = None,
        *,
        send: bool = False,
        shared: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Launch the receiving half, or with `send` both halves; returns [T, H], which is `out` if there is one.

        y: contiguous; with `send` and without y the experts' rows are NaN. Local, no host sync.
        """
        plan, shared_dtype = round_.plan, None if shared is None else shared.dtype
        kernel = plan.combines.get((round_.slot, y is None, shared_dtype, send, True)) or self.kernel_of(
            round_, poisoned=y is None, shared_dtype=shared_dtype, send=send, receive=True
        )
        y_at = shared_at = self._unused_at
        shared_stride, stride = 0, self._result_stride
        if y is not None:
            y_at = y.data_ptr()
            if y_at & 15:
                y = y.clone()
                y_at = y.data_ptr()
        if shared is not None:
            shared = aligned_rows(shared)
            shared_at, shared_stride = shared.data_ptr(), shared.stride(0) // ALIGNMENT
        if out is not None and is_aligned(out):
            result, stride = out, out.stride(0) // ALIGNMENT
        else:
            result = plan.new_result()
        numbers = shared_stride, stride, self._context.timeout_ns
        if kernel.run is None:
            unused = self.unused
            results = Results(unused if y is None else y, unused if shared is None else shared, result)
            with self._context.waiting("combine", round_.round):
                kernel((results,), numbers)
        else:
            kernel.run((y_at, shared_at, result.data_ptr(), *numbers))
        return result if out is None or result is out else out.copy_(result)

    def kernel_of(
        self,
        round_: ExchangeRound,
        *,
        poisoned: bool,
        shared_dtype: torch.dtype | None,
        send: bool,
        receive: bool,
    ) -> Kernel:
        """The kernel of a combine or one half of it. Local."""
        plan, slot = round_.plan, round_.slot
        key = (slot, poisoned, shared_dtype, send, receive)
        kernel = plan.combines.get(key)
        if kernel is None:
            context = self._context
            config, num_ranks = context.config, context.ranks.R
            programs = context.tuning.combine(plan.spec.num_tokens, num_ranks)
            num_threads = programs.num_warps * Device.of(context.device).warp_size
            held = held_words(num_ranks, config.dtype.itemsize, num_threads)
            sent_bytes = SENT_BYTES * (2 if programs.num_warps > 4 else 1)
            sent = held_words(1, config.dtype.itemsize, num_threads, held_bytes=sent_bytes)
            columns, single = triton.next_power_of_2(plan.spec.num_topk), plan.spec.layout is Layout.FLAT or poisoned
            senders, receivers = programs.of(send=send, receive=receive)
            combining = Combining(
                H=config.hidden,
                K=plan.spec.num_topk,
                COLUMNS=columns,
                SENT_BLOCK=block_words(config.hidden, min(programs.sent_block, sent)),
                SUMMED_BLOCK=awaited_words(config.hidden, min(programs.summed_block, held), num_threads),
                ROWS_IN_FLIGHT=1 if single else min(programs.rows_in_flight, columns),
                UNIT=ALIGNMENT,
                SUMMED=plan.spec.layout is Layout.FLAT,
                POISONED=poisoned,
                SHARED=shared_dtype is not None,
            )
            halves = Halves(send, receive)
            kernel = plan.combines[key] = Kernel(
                _combine_kernel,
                senders + receivers,
                fixed=(
                    context.memory.links[slot],
                    context.states.slots[slot],
                    config.max_tokens_per_rank,
                    senders,
                    senders,  # the first receiver comes behind them
                ),
                constants={"ranks": context.ranks, "combining": combining, "halves": halves},
                options={**context.options(programs.num_warps), "enable_fp_fusion": False},
                early=True,
                device=context.device,
                prepare=context.memory.prepare,
            )
        return kernel
