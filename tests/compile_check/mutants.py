"""The exchange kernels with one line of their source changed, each of which a rule on the order of accesses must find.

`compile_check.mutate` compiles them.
"""

import dataclasses
from typing import Literal

BARRIER = "tl.debug_barrier()  # all warps have read the state"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """A change of source, and the words of what must be found.

    Attributes:
        module: of `ep_moe.kernels.exchange`, or `device`. old, new: text there, and what takes its place everywhere.
        kernel: the one that is compiled. beside: together with the one before, whose finding is another.
    """

    name: str
    module: str
    old: str
    new: str
    found: str
    kernel: Literal["dispatch", "combine"] = "dispatch"
    beside: bool = False


MUTANTS = (
    Mutant(
        name="no fence behind rows",
        module="dispatch_send",
        old="order_rows(ranks.PUTS)  # release",
        new="pass  # release",
        found="rows and their flag: the flag follows its rows without a barrier and then a fence",
    ),
    Mutant(
        name="a relaxed flag",
        module="waits",
        old='sem="acquire", scope="sys"',
        new='sem="relaxed", scope="gpu"',
        found="loads of rows: a plain load of what peers write, with nothing acquired",
        beside=True,
    ),
    Mutant(
        name="an agreement of two warps",
        module="device",
        old="return 8 * warp_size()",
        new="return 2 * warp_size()",
        found="agreement: 128 threads agree on 64 elements in is_off",
        beside=True,
    ),
    Mutant(
        name="aborts loaded plainly",
        module="waits",
        old="mask=source < ranks.R, other=0, volatile=True",
        new="mask=source < ranks.R, other=0, volatile=False",
        found="what changes meanwhile: a plain load in load_aborts",
        beside=True,
    ),
    Mutant(
        name="weak words",
        module="peers",
        old=', cache_modifier=".wt"',
        new="",
        found="stores of a dispatch: put_word stores weakly what others poll",
        beside=True,
    ),
    Mutant(
        name="a report without a fence",
        module="round_state",
        old="        fence()\n",
        new="        tl.debug_barrier()\n",
        found="a report: the flag follows its rows without a fence at system scope after the barrier",
        beside=True,
    ),
    Mutant(
        name="a fence without a barrier",
        module="device",
        old="    tl.debug_barrier()\n    if not INTERPRET:\n        _machine(",
        new="    if not INTERPRET:\n        _machine(",
        found="rows and their flag: the flag follows its rows without a barrier and then a fence",
    ),
    Mutant(
        name="no agreement",
        module="waits",
        old="waiting = agree(late, trouble(exchange, ranks, round_, start, polls))",
        new="waiting = tl.max(late.to(tl.int32), 0) + trouble(exchange, ranks, round_, start, polls)",
        found="agreement: warps may part ways",
        beside=True,
    ),
    Mutant(
        name="a fence of one GPU",
        module="device",
        old="fence.acq_rel.sys",
        new="fence.acq_rel.gpu",
        found="rows and their flag: the flag follows its rows without a fence at system scope after the barrier",
    ),
    Mutant(
        name="words loaded plainly",
        module="dispatch_receive",
        old="volatile=True",
        new="volatile=False",
        found="loads of rows: a plain load of what peers write",
        beside=True,
    ),
    Mutant(
        name="half a word",
        module="peers",
        old="publish(to + index, word, mask)",
        new="publish((to + index).to(tl.pointer_type(tl.int32)), word.to(tl.int32), mask)",
        found="stores of a dispatch: a word does not travel in one piece from put_word",
        beside=True,
    ),
    Mutant(
        name="a weak abort",
        module="peers",
        old="publish(as_pointer(address, tl.int64) + ranks.RANK, word, None)",
        new="tl.store(as_pointer(address, tl.int64) + ranks.RANK, word)",
        found="stores of a dispatch: put_abort stores weakly what others poll",
        beside=True,
    ),
    Mutant(
        name="a weak report",
        module="round_state",
        old="publish(own.report_ptr, make_word(number, (verdict << 8 | source).to(tl.int32)), None)",
        new="tl.store(own.report_ptr, make_word(number, (verdict << 8 | source).to(tl.int32)))",
        found="stores of a dispatch: report stores weakly what others poll",
        beside=True,
    ),
    Mutant(
        name="rows loaded as constants",
        module="dispatch_receive",
        old="part = tl.load(from_ptr + word, mask=(word < row.VALUE_WORDS) & came)",
        new="part = tl.inline_asm_elementwise("
        '"ld.global.nc.b32 $0, [$1];", "=r,l", [from_ptr + word], tl.int32, False, 1)',
        found="loads of rows: a load of what peers write through the read-only cache",
        beside=True,
    ),
    Mutant(
        name="a warp ahead in a dispatch",
        module="dispatch_receive",
        old=BARRIER,
        new="pass",
        found="the state of a dispatch: overwritten before all warps have met that read it",
        beside=True,
    ),
    Mutant(
        name="results loaded plainly",
        module="combine_receive",
        old="volatile=True",
        new="volatile=False",
        found="loads of results: a plain load of what peers write",
        kernel="combine",
    ),
    Mutant(
        name="a launch counted by one program",
        module="round_state",
        old='sem="relaxed", scope="gpu"',
        new='sem="relaxed", scope="cta"',
        found="what changes meanwhile: an atomic operation in begin_combine is not gpu",
        kernel="combine",
        beside=True,
    ),
    Mutant(
        name="an unknown store",
        module="combine_send",
        old="store_word(exchange, ranks, peer, RETURNED, piece, column, _clean(total, dtype), column < H)",
        new="tl.store(peer.base.to(tl.pointer_type(dtype)) + column, _clean(total, dtype), mask=column < H)",
        found="stores of a combine: a store to memory of the group that no rule knows",
        kernel="combine",
        beside=True,
    ),
    Mutant(
        name="weak results",
        module="peers",
        old=', cache_modifier=".wt"',
        new="",
        found="stores of a combine: put_word stores weakly what others poll",
        kernel="combine",
        beside=True,
    ),
    Mutant(
        name="a warp ahead in a combine",
        module="combine",
        old=BARRIER,
        new="pass",
        found="the state of a combine: overwritten before all warps have met that read it",
        kernel="combine",
        beside=True,
    ),
    Mutant(
        name="no wait for the launch before",
        module="combine",
        old="    start_early()\n",
        new="",
        found="early launch: an access before the kernel before this one has ended",
        kernel="combine",
        beside=True,
    ),
)
