"""Our transports as a dispatcher of SGLang.

Letters: T rows on this rank, H hidden, K top-k, R ranks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, CombineInputFormat, DispatchOutputFormat
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPPDispatchHooks
from sglang.srt.runtime_context import get_exec

from ep_moe.engines.common.rows import RowShare, end_round, rows_to_send, send_rows
from ep_moe.engines.sglang.method import LayerMethod
from ep_moe.engines.sglang.step import bound, standard
from ep_moe.group import PeerLostError
from ep_moe.layer import ExpertParallelMoE
from ep_moe.transport import Dispatched


class EpMoeCombineInput(NamedTuple):
    """What the experts return to the dispatcher."""

    hidden_states: torch.Tensor  # the experts' output, in the shape of the batch's layout
    dispatched: Dispatched

    @property
    def format(self) -> CombineInputFormat:
        """Rows of this rank's experts, which only our dispatcher combines."""
        return CombineInputFormat.DEEPEP_NORMAL


class EpMoeDispatchOutput(NamedTuple):
    """What the dispatcher gives to the experts."""

    hidden_states: torch.Tensor  # the batch's rows, in its layout
    hidden_states_scale: torch.Tensor | None
    dispatched: Dispatched
    state: LayerMethod
    made: ExpertParallelMoE

    @property
    def format(self) -> DispatchOutputFormat:
        """Rows for this rank's experts, which only ours compute."""
        return DispatchOutputFormat.DEEPEP_NORMAL

    def compute(self) -> EpMoeCombineInput:
        """The experts of this rank. Collective if they fail."""
        return EpMoeCombineInput(self.state.experts(self.made, self.dispatched), self.dispatched)


class EqualRows(NamedTuple):
    """Rows that all ranks have, for the experts."""

    hidden_states: torch.Tensor
    topk_output: Any
    state: LayerMethod

    @property
    def format(self) -> DispatchOutputFormat:
        """Rows for this rank's experts, which only ours compute."""
        return DispatchOutputFormat.DEEPEP_NORMAL

    def compute(self) -> torch.Tensor:
        """This rank's part of their sums, [T, H]. Local."""
        return self.state.part(self.hidden_states, self.topk_output)


class EqualRowsDispatcher(BaseDispatcher):
    """For a2a "none", where all ranks have equal rows: nothing is sent, and the model adds up what ranks return.

    Args: state: of the layer.
    """

    def __init__(self, state: LayerMethod) -> None:
        super().__init__()
        self._state = state

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> EqualRows:
        """The rows [T, H], with ids and weights [T, K]. Local."""
        return EqualRows(hidden_states, topk_output, self._state)

    def combine(self, combine_input: torch.Tensor) -> torch.Tensor:
        """What this rank's experts have computed, as it is. Local."""
        return combine_input


@dataclasses.dataclass(slots=True)
class _Round:
    """A round on a slot. In its context, an error of this rank ends it, and the other ranks get NaN for its part."""

    state: LayerMethod
    made: ExpertParallelMoE
    slot: int
    returning: Dispatched | None = None  # after `combine_send`

    def __enter__(self) -> "_Round":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Log a lost rank; after any other failure end the round of the slot. Collective then."""
        if not isinstance(error, Exception):
            return
        self.returning = None  # frees its batch
        if isinstance(error, PeerLostError):
            self.state.log_lost(error)
        else:
            end_round(self.made.transport, self.slot)


class EpMoeDispatcher(BaseDispatcher):
    """Dispatch and combine of one of our transports, with a2a "deepep". Slots are SGLang's sub-batches.

    Args: state: of the layer.
    """

    def __init__(self, state: LayerMethod) -> None:
        super().__init__()
        self._state = state
        self._rounds: dict[int, _Round] = {}
        self._between = DeepEPPDispatchHooks()

    def register_deepep_dispatch_hook(self, hook: Callable[[BaseDispatcher], None]) -> list[Any]:
        """Call `hook` between the halves of `dispatch`. Returns: what removes it."""
        return [self._between.register_hook(hook)]

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> EpMoeDispatchOutput:
        """`dispatch_a`, the registered hooks, and `dispatch_b`; without hooks in one launch. Collective."""
        if self._between.hook_dict:
            self.dispatch_a(hidden_states, topk_output)
            with self._rounds[0]:
                self._between(self)
            return self.dispatch_b()
        dispatched = self._begin(hidden_states, topk_output, 0, halves=False)
        return self._output(self._rounds[0], dispatched)

    def combine(self, combine_input: EpMoeCombineInput) -> torch.Tensor:
        """`combine_a` and `combine_b` in one launch. Collective."""
        return self._results(0, combine_input)

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any, tbo_subbatch_index: int | None = None) -> None:
        """Send this rank's rows.

        Args:
            hidden_states: [T, H] in the transport's dtype. topk_output: standard, with physical ids [T, K], -1 none.
            tbo_subbatch_index: of two batches that alternate.
        Errors: those of `Transport.dispatch_send`, on all ranks. Any other failure of this rank is raised here; the
        other ranks get NaN for its part. Collective.
        """
        self._begin(hidden_states, topk_output, tbo_subbatch_index or 0, halves=True)

    def _begin(self, hidden_states: torch.Tensor, topk_output: Any, slot: int, *, halves: bool) -> Dispatched | None:
        """Send this rank's rows; returns what arrives, None if it is received later. Collective."""
        state = self._state
        made = state.of_step()
        opened = self._rounds[slot] = _Round(state, made, slot)
        with opened:
            return send_rows(
                made.transport,
                lambda: self._rows(made, hidden_states, topk_output),
                num_topk=state.kind.num_topk,
                layout=made.config.layout,
                slot=slot,
                halves=halves,
                scheme=made.scheme,
                max_num_tokens=bound(hidden_states.shape[0], made.transport),
                layer=made.tag,
            )

    def dispatch_b(self, tbo_subbatch_index: int | None = None) -> EpMoeDispatchOutput:
        """Lay out what arrives for the experts. Collective."""
        slot = tbo_subbatch_index or 0
        with self._rounds[slot] as opened:
            dispatched = opened.made.transport.dispatch_recv(slot=slot)
        return self._output(opened, dispatched)

    def _output(self, opened: _Round, dispatched: Dispatched | None) -> EpMoeDispatchOutput:
        """What the experts get."""
        assert dispatched is not None
        batch = dispatched.batch
        with opened:
            self._record(batch.expert_num_tokens)
        return EpMoeDispatchOutput(batch.x, batch.scale, dispatched, self._state, opened.made)

    def combine_a(self, combine_input: EpMoeCombineInput, tbo_subbatch_index: int | None = None) -> None:
        """Weight, sum and send the experts' output. Collective."""
        y, dispatched = combine_input
        with self._rounds[tbo_subbatch_index or 0] as opened:
            opened.made.transport.combine_send(y, dispatched)
        opened.returning = dispatched

    def combine_b(self, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        """Receive the results of this rank's rows. Returns: [T, H]. Collective."""
        return self._results(tbo_subbatch_index or 0, None)

    def _results(self, slot: int, returned: EpMoeCombineInput | None) -> torch.Tensor:
        """The results of this rank's rows, [T, H]; `returned`: the experts' output, None if it has been sent."""
        opened = self._rounds[slot]
        transport = opened.made.transport
        with opened:
            if returned is not None:
                return transport.combine(returned.hidden_states, returned.dispatched)
            dispatched, opened.returning = opened.returning, None
            assert dispatched is not None
            return transport.combine_recv(dispatched)

    def _rows(self, made: ExpertParallelMoE, hidden_states: torch.Tensor, topk_output: Any) -> tuple[Any, Any]:
        """This rank's rows and their routing."""
        return rows_to_send(
            hidden_states,
            *standard(topk_output),
            share=RowShare(),
            scheme=made.scheme,
            weights_on_input=self._state.weights_on_input,
            input_scale=made.weights.w13_input_scale,
        )

    def _record(self, counts: torch.Tensor) -> None:
        """Give SGLang's recorder the rows of each local expert, [L] int32: what its balancer places experts by."""
        recorder = get_global_expert_distribution_recorder()
        recorder.on_deepep_dispatch_low_latency(counts)
        if get_exec().moe.expert_distribution_recorder_mode == "stat_approx":  # which takes a list: a host sync
            nothing: dict[str, Any] = dict.fromkeys(
                ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert")
            )
            recorder.on_deepep_dispatch_normal(counts.tolist(), **nothing)
