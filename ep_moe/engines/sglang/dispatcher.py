"""Our transports as a dispatcher of SGLang.

Letters: T rows on this rank, H hidden, K top-k, R ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, CombineInputFormat, DispatchOutputFormat
from sglang.srt.layers.moe.token_dispatcher.deepep import DeepEPPDispatchHooks
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.runtime_context import get_exec

from ep_moe.engines.common.rows import rows_to_send, whole_output
from ep_moe.engines.sglang.method import LayerMethod
from ep_moe.engines.sglang.step import bound, without_padding
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


class _Round(NamedTuple):
    """A round that is open on a slot."""

    made: ExpertParallelMoE
    num_rows: int  # T, before ranks with equal rows share them


class EpMoeDispatcher(BaseDispatcher):
    """Dispatch and combine of one of our transports. Slots are SGLang's sub-batches.

    Where all ranks have equal rows (a2a "none"), each sends its slice of them and leaves zeros in the others, which the
    sum of the model completes.

    Args: state: of the layer.
    """

    def __init__(self, state: LayerMethod) -> None:
        super().__init__()
        self._state = state
        self._rounds: dict[int, _Round] = {}
        self._returning: dict[int, Dispatched] = {}
        self._between = DeepEPPDispatchHooks()

    def register_deepep_dispatch_hook(self, hook: Callable[[BaseDispatcher], None]) -> list[Any]:
        """Call `hook` between the halves of `dispatch`. Returns: what removes it."""
        return [self._between.register_hook(hook)]

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> EpMoeDispatchOutput:
        """`dispatch_a`, the registered hooks, and `dispatch_b`; without hooks in one launch. Collective."""
        if self._between.hook_dict:
            self.dispatch_a(hidden_states, topk_output)
            try:
                self._between(self)
            except Exception as error:
                self._fail(0, error)
                raise
            return self.dispatch_b()
        return self._output(0, self._begin(hidden_states, topk_output, 0, apart=False))

    def combine(self, combine_input: EpMoeCombineInput) -> torch.Tensor:
        """`combine_a` and `combine_b` in one launch. Collective."""
        return self._results(0, combine_input)

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any, tbo_subbatch_index: int | None = None) -> None:
        """Send this rank's rows.

        Args:
            hidden_states: [T, H] in the transport's dtype. topk_output: standard, with physical ids [T, K], -1 none.
            tbo_subbatch_index: of two batches that run in turns.
        Errors: those of `Transport.dispatch_send`, on all ranks. Any other failure of this rank is raised here; the
        other ranks get NaN for its part. Collective.
        """
        self._begin(hidden_states, topk_output, tbo_subbatch_index or 0, apart=True)

    def _begin(self, hidden_states: torch.Tensor, topk_output: Any, slot: int, *, apart: bool) -> Dispatched | None:
        """Send this rank's rows; returns what arrives, None if it is received apart. Collective."""
        state = self._state
        made = state.of_step()
        transport, begun = made.transport, made.transport.num_rounds
        # the bound of the round is the same on all ranks, also on one that fails
        options: dict[str, Any] = {
            "scheme": made.scheme,
            "slot": slot,
            "max_num_tokens": bound(hidden_states.shape[0], state.share, transport),
            "layer": made.tag,
        }
        try:
            x, routing = self._rows(made, hidden_states, topk_output)
        except ValueError as error:
            transport.refuse(error, slot=slot)
        except Exception:
            transport.sit_out(num_topk=state.sizes.num_topk, **options)
            raise
        self._rounds[slot] = _Round(made, hidden_states.shape[0])
        try:
            call = transport.dispatch_send if apart else transport.dispatch
            dispatched = call(x, routing, layout=made.config.layout, **options)
        except Exception as error:
            self._fail(slot, error)
            if transport.num_rounds == begun and not isinstance(error, PeerLostError):
                transport.sit_out(num_topk=state.sizes.num_topk, **options)
            raise
        return dispatched

    def dispatch_b(self, tbo_subbatch_index: int | None = None) -> EpMoeDispatchOutput:
        """Lay out what arrives for the experts. Collective."""
        slot = tbo_subbatch_index or 0
        try:
            dispatched = self._rounds[slot].made.transport.dispatch_recv(slot=slot)
        except Exception as error:
            self._fail(slot, error)
            raise
        return self._output(slot, dispatched)

    def _output(self, slot: int, dispatched: Dispatched | None) -> EpMoeDispatchOutput:
        """What the experts get."""
        assert dispatched is not None
        batch, made = dispatched.batch, self._rounds[slot].made
        if not self._state.equal_rows:
            try:
                self._record(batch.expert_num_tokens)
            except Exception as error:
                self._fail(slot, error)
                raise
        return EpMoeDispatchOutput(batch.x, batch.scale, dispatched, self._state, made)

    def combine_a(self, combine_input: EpMoeCombineInput, tbo_subbatch_index: int | None = None) -> None:
        """Weight, sum and send the experts' output. Collective."""
        slot = tbo_subbatch_index or 0
        y, dispatched = combine_input
        try:
            self._rounds[slot].made.transport.combine_send(y, dispatched)
        except Exception as error:
            self._fail(slot, error)
            raise
        self._returning[slot] = dispatched

    def combine_b(self, tbo_subbatch_index: int | None = None) -> torch.Tensor:
        """Receive the results of this rank's rows. Returns: [T, H]. Collective."""
        return self._results(tbo_subbatch_index or 0, None)

    def _results(self, slot: int, returned: EpMoeCombineInput | None) -> torch.Tensor:
        """The results of this rank's rows, [T, H]; `returned`: the experts' output, None if it has been sent."""
        share, (made, num_rows) = self._state.share, self._rounds[slot]
        config = made.transport.config
        try:
            output = torch.empty(num_rows, config.hidden, dtype=config.dtype, device=made.transport.device)
            own = output[share.own(num_rows)]
            if returned is None:
                made.transport.combine_recv(self._returning.pop(slot), out=own)
            else:
                made.transport.combine(returned.hidden_states, returned.dispatched, out=own)
        except Exception as error:
            self._fail(slot, error)
            raise
        whole_output(share, None, output)
        return output

    def _rows(self, made: ExpertParallelMoE, hidden_states: torch.Tensor, topk_output: Any) -> tuple[Any, Any]:
        """This rank's rows and their routing."""
        state = self._state
        if not TopKOutputChecker.format_is_standard(topk_output):
            raise ValueError(f"the router's output is {topk_output.format}, needed is the standard one")
        ids, weights = topk_output.topk_ids, topk_output.topk_weights
        if state.equal_rows:
            ids = without_padding(ids)
        if state.factor is not None:
            weights = weights * state.factor
        return rows_to_send(
            hidden_states,
            ids,
            weights,
            share=state.share,
            scheme=made.scheme,
            weights_on_input=state.weights_on_input,
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

    def _fail(self, slot: int, error: Exception) -> None:
        """Log a lost rank; after any other failure end the round of the slot. The other ranks get NaN for its part.

        It may be an earlier round, which a failure in the engine's own code left open. Collective.
        """
        self._returning.pop(slot, None)  # frees its batch
        if isinstance(error, PeerLostError):
            self._state.plugin.log.error("ep_moe in %s: %s", self._state.name, error)
        else:
            self._rounds[slot].made.transport.abandon(slot=slot)
