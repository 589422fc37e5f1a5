"""Launches the combine kernel. Runs on a CPU under TRITON_INTERPRET=1.

There is no host sync, and launches do not depend on counts or ids: all of them may be captured in a CUDA graph.

Letters: T tokens on this rank, H hidden.
"""

import torch
import triton

from ep_moe.config import ALIGNMENT, Layout
from ep_moe.kernel_launch.kernel import Kernel
from ep_moe.kernels.exchange.combine import _combine_kernel
from ep_moe.kernels.exchange.combine_send import Combining, Results
from ep_moe.tensors import aligned
from ep_moe.transport.one_sided.kernel_context import KernelContext, aligned_rows, is_aligned
from ep_moe.transport.one_sided.round_plan import RoundPlan
from ep_moe.transport.one_sided.tuning import SENT_BYTES, awaited_words, block_words, held_words


class CombineLauncher:
    """Launches the combines of one transport."""

    def __init__(self, context: KernelContext) -> None:
        self._context = context
        # for arguments that a launch does not need, and for results that nobody does: all rows at one address
        self.unused = torch.empty(context.config.hidden, dtype=context.config.dtype, device=context.device)
        self._unused_address = self.unused.data_ptr()

    def send(self, slot: int, plan: RoundPlan, y: torch.Tensor | None) -> None:
        """Launch the sending half of a combine, which without `y` sends NaN. Local, no host sync."""
        kernel = self.kernel_of(slot, plan, poisoned=y is None, shared=None, send=True, receive=False)
        results = Results(self.unused if y is None else aligned(y), self.unused, self.unused)
        self._launch(kernel, results, (0, 0))

    def receive(
        self,
        slot: int,
        plan: RoundPlan,
        y: torch.Tensor | None = None,
        *,
        send: bool = False,
        shared: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Launch the receiving half, or with `send` both halves; returns [T, H], which is `out` if that is given.

        Local, no host sync.
        """
        unused = self.unused
        shared = None if shared is None else aligned_rows(shared)
        target = out
        if out is None or not is_aligned(out):
            target = plan.new_result()
        assert target is not None
        kernel = self.kernel_of(slot, plan, poisoned=y is None, shared=shared, send=send, receive=True)
        results = Results(unused if y is None else aligned(y), unused if shared is None else shared, target)
        shared_stride = 0 if shared is None else shared.stride(0) // ALIGNMENT
        self._launch(kernel, results, (shared_stride, target.stride(0) // ALIGNMENT))
        return target if out is None or target is out else out.copy_(target)

    def _launch(self, kernel: Kernel, results: Results, strides: tuple[int, int]) -> None:
        """Launch a kernel, all of whose tensors are aligned to 16 bytes."""
        numbers = *strides, self._context.timeout_ns
        if kernel.run is None:
            kernel((results,), numbers)
        else:
            kernel.run([*map(torch.Tensor.data_ptr, results), *numbers])

    def repeat(self, slot: int, plan: RoundPlan, y: torch.Tensor, shared: torch.Tensor | None) -> torch.Tensor | None:
        """`receive` with `send`, if its kernel is loaded and reads y and shared in place; else None. No host sync."""
        context, unused = self._context, self._unused_address
        kernel = plan.combines.get((slot, False, None if shared is None else shared.dtype, True, True))
        y_address, shared_address, shared_stride = y.data_ptr(), unused, 0
        if kernel is None or kernel.run is None or y_address & 15 or not y.is_contiguous():
            return None
        if shared is not None:
            if not is_aligned(shared):
                return None
            shared_address, shared_stride = shared.data_ptr(), shared.stride(0) // ALIGNMENT
        result = plan.new_result()
        numbers = shared_stride, context.config.hidden // ALIGNMENT, context.timeout_ns
        kernel.run((y_address, shared_address, result.data_ptr(), *numbers))
        return result

    def kernel_of(
        self, slot: int, plan: RoundPlan, *, poisoned: bool, shared: torch.Tensor | None, send: bool, receive: bool
    ) -> Kernel:
        """The kernel of a combine or one half of it, for repeated launches."""
        key = (slot, poisoned, None if shared is None else shared.dtype, send, receive)
        kernel = plan.combines.get(key)
        if kernel is None:
            context = self._context
            config, num_ranks = context.config, context.ranks.R
            programs = context.tuning.combine(plan.num_tokens, num_ranks)
            held = held_words(num_ranks, config.dtype.itemsize, programs.num_warps)
            sent_bytes = SENT_BYTES * (2 if programs.num_warps > 4 else 1)
            sent = held_words(1, config.dtype.itemsize, programs.num_warps, held_bytes=sent_bytes)
            columns, single = triton.next_power_of_2(plan.num_topk), plan.layout is Layout.FLAT or poisoned
            senders, receivers = programs.of(send=send, receive=receive)
            combining = Combining(
                H=config.hidden,
                K=plan.num_topk,
                COLUMNS=columns,
                SENT_BLOCK=block_words(config.hidden, min(programs.sent_block, sent)),
                SUMMED_BLOCK=awaited_words(config.hidden, min(programs.summed_block, held), programs.num_warps),
                ROWS_IN_FLIGHT=1 if single else min(programs.rows_in_flight, columns),
                UNIT=ALIGNMENT,
                SUMMED=plan.layout is Layout.FLAT,
                POISONED=poisoned,
                SHARED=shared is not None,
            )
            halves = context.halves(send=send, receive=receive)
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
                device=context.device,
                prepare=context.memory.prepare,
            )
        return kernel
