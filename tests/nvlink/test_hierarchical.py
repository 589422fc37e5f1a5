"""The hierarchical transport with one-sided stores inside nodes of two ranks."""

import dataclasses
from unittest import mock

import pytest

from ep_moe.config import TransportConfig
from ep_moe.group import EPGroup
from ep_moe.kernel_launch.kernel import Kernel, Tensors, present
from ep_moe.placement import Placement
from ep_moe.testing import TransportCase, check_round
from ep_moe.testing.transports import check_abandon, check_sit_out
from ep_moe.transport.base import RoundKind
from ep_moe.transport.hierarchical import HierarchicalTransport
from ep_moe.transport.one_sided.round_plan import distinct_sizes
from ep_moe.transport.one_sided.warmup import _kernels_of
from nvlink.common import on_ranks
from nvlink.test_cases import cases

NAMES = ("mixed-layouts", "compact-fewer-experts-than-ranks", "flat-mxfp8-of-more-rows")


def make(group: EPGroup, placement: Placement, config: TransportConfig) -> HierarchicalTransport:
    """The transport, with messages of one row between nodes."""
    config = dataclasses.replace(config, ranks_per_node=2, chunk_rows=1)
    return relayed(HierarchicalTransport(group, placement, config, inside="nvlink"))


def relayed(transport: HierarchicalTransport) -> HierarchicalTransport:
    """It, without gathered rounds."""
    transport.most_gathered = 0
    return transport


def check_on_rank(group: EPGroup) -> list[str]:
    """The errors of a few small cases on this rank, in halves and whole, and of a round that a rank sits out."""
    wrong = []
    for number, name in enumerate(NAMES):
        case = cases(group.num_ranks)[name]
        transport = make(group, case.make_placement(), case.config)
        try:
            check_round(transport, case, group.device, halves=(number != 1,) * 2)
        except AssertionError as error:
            wrong.append(str(error))
        group.barrier()
        transport.destroy()
    try:
        check_sit_out(make, group)
    except AssertionError as error:
        wrong.append(str(error))
    return wrong


def abandon_on_rank(group: EPGroup) -> None:
    check_abandon(make, group)


class Recorder:
    """Notes what kernels are compiled for: constants, dtypes of tensors and which are absent."""

    def __init__(self) -> None:
        self.found: set[tuple[object, ...]] = set()

    def note(self, kernel: Kernel, tensors: Tensors) -> None:
        """Add a launch of an exchange."""
        name = kernel._kernel.__name__
        if name in ("_dispatch_kernel", "_combine_kernel"):
            dtypes = tuple(tensor.dtype for tensor in present(tensors))
            self.found.add((name, repr(kernel._constants), repr(kernel._options), dtypes))


def check_warmed(group: EPGroup) -> list[str]:
    """Kernels that rounds inside the node launch, and that a warm-up of their kinds would not have compiled."""
    launched, warmed, missing = Recorder(), Recorder(), []
    through_triton = Kernel.through_triton

    def launch_and_note(self: Kernel, tensors: Tensors, numbers: tuple[int, ...] = ()) -> None:
        launched.note(self, tensors)
        through_triton(self, tensors, numbers)

    for scheme in ("none", "fp8_block", "nvfp4"):
        case = TransportCase(name=scheme, tokens=(3, 1) * 2, scheme=scheme, hidden=64, num_topk=3)
        config = dataclasses.replace(case.config, ranks_per_node=2, chunk_rows=40)
        transport = relayed(HierarchicalTransport(group, case.make_placement(), config, inside="nvlink"))
        with mock.patch.object(Kernel, "through_triton", launch_and_note):
            check_round(transport, case, group.device)
        inner = transport._relay.inner
        with mock.patch.object(inner, "warmup") as warm:
            transport.warmup([RoundKind(num_topk=3, scheme=scheme, shared_dtype=case.dtype, counted=True)])
        launchers = inner._dispatches, inner._combines
        for kind in warm.call_args.args[0]:
            for rows in distinct_sizes(inner.config.max_tokens_per_rank):
                for kernel, tensors, _ in _kernels_of(kind, rows, *launchers):
                    warmed.note(kernel, tensors)
        missing += [f"{scheme}: {launch}" for launch in launched.found - warmed.found]
        transport.destroy()
    return [*missing, *([] if launched.found else ["nothing was launched"])]


def test_a_warm_up_covers_quantized_rounds_inside_a_node() -> None:
    assert on_ranks(check_warmed, num_ranks=4) == [[]] * 4


def test_nodes_of_two_ranks() -> None:
    assert on_ranks(check_on_rank, num_ranks=4) == [[]] * 4


@pytest.mark.matrix
def test_abandoned_rounds_of_nodes() -> None:
    on_ranks(abandon_on_rank, num_ranks=4)
