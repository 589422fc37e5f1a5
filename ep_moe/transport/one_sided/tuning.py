"""Launch parameters of the exchange kernels, by T and R.

They were tuned on 4 H200s (docs/BENCHMARKS.md); results are correct on any machine. Letters: T tokens, R ranks.
"""

import dataclasses

import triton

from ep_moe.kernels.numerics import INTERPRET

WORD_TOKENS = 64  # up to this T a rank sends rows as LL words: twice the bytes, but no fence
_HELD_BYTES = 128  # of a thread's registers, for rows that are accumulated
SENT_BYTES = 32  # of a thread, for each of the rows in flight that a sender weights and sums
MANY = 2**30  # of programs or words, if nothing limits them
SELF_COUNTED_TOKENS = 512  # up to this T every program of a dispatch reads all ids itself
_FEW_TOKENS = 256  # up to this T a limit of `num_sms` takes programs as they are, and launches fewer of them


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """Programs of the halves of a dispatch or combine: in one launch, and of a half that is launched by itself."""

    senders: int
    receivers: int
    senders_alone: int
    receivers_alone: int

    def of(self, *, send: bool, receive: bool) -> tuple[int, int]:
        """The senders and receivers of a launch of these halves, 0 for one that is not among them."""
        if send and receive:
            return self.senders, self.receivers
        return self.senders_alone * send, self.receivers_alone * receive


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DispatchTuning(Programs):
    """How a dispatch is launched."""

    announcers: int  # programs, at most
    num_warps: int
    word_block: int  # 32-bit words of a token that a program sends at a time as LL words
    taken_block: int  # 32-bit words of a row that a program receives at a time
    taken_tokens: int  # that a program receives at a time if they are sent as rows: 1, 2 or 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CombineTuning(Programs):
    """How a combine is launched."""

    num_warps: int
    sent_block: int  # columns that a program sends at a time
    summed_block: int  # columns that a program sums at a time
    rows_in_flight: int  # rows of a token that are loaded at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Launch parameters of a transport.

    Args:
        most_receivers: of one launch (`Occupancy.most_receivers`). Senders never wait: they do not count.
        num_sms: programs of one launch at most, so that they take at most as many SMs; 0 sets no limit.
    """

    most_receivers: int
    num_sms: int = 0

    def dispatch(self, num_tokens: int, num_ranks: int, *, packs: bool = True) -> DispatchTuning:
        """For T tokens of this rank at most. packs: the receivers copy rows, as in all layouts but FLAT."""
        if INTERPRET:
            return DispatchTuning(
                announcers=1,
                senders=1,
                receivers=1,
                senders_alone=1,
                receivers_alone=2,
                num_warps=4,
                word_block=512,
                taken_block=1024,
                taken_tokens=2,
            )
        words, self_counted = num_tokens <= WORD_TOKENS, num_tokens <= SELF_COUNTED_TOKENS
        announcers = min(32, self._share(8)) if self_counted else 1
        most = 256 if not packs or (num_tokens > _FEW_TOKENS and self_counted) else 128  # receivers that pack need SMs
        most_senders = max(min(num_tokens * 4 if words else num_tokens, most), 16)
        senders = min(most_senders, self._share(2, announcers))
        taken_tokens = 1 if words else 2 if num_tokens <= 1024 or num_ranks > 4 else 4  # registers hold their rows
        receivers = min(max(num_tokens * num_ranks // taken_tokens, 16), 264, self.most_receivers)
        return DispatchTuning(
            announcers=announcers,
            senders=senders,
            receivers=min(receivers, self._share(1, announcers + senders)),
            senders_alone=min(most_senders, self._share(1, announcers)),
            receivers_alone=min(receivers, self._share(1)),
            num_warps=4,
            word_block=512,
            taken_block=2048,
            taken_tokens=taken_tokens,
        )

    def receivers(self, num_tokens: int, num_ranks: int) -> int:
        """The most programs that wait at once in a round of T tokens."""
        both = self.dispatch(num_tokens, num_ranks), self.combine(num_tokens, num_ranks)
        return max(each.receivers_alone for each in both)  # which are not fewer than beside senders

    def combine(self, num_tokens: int, num_ranks: int) -> CombineTuning:
        """For T tokens of this rank at most."""
        if INTERPRET:
            return CombineTuning(
                senders=1,
                receivers=1,
                senders_alone=2,
                receivers_alone=1,
                num_warps=4,
                sent_block=1024,
                summed_block=2048,
                rows_in_flight=2,
            )
        wide = self.num_sms > 0 and num_tokens > _FEW_TOKENS  # a program uses most of an SM
        senders, most = max(num_tokens * num_ranks * 4, 32), 328 if _FEW_TOKENS < num_tokens <= 1024 else 264
        # smaller blocks for the fewest tokens, and where some senders would have two larger ones and others one
        small = num_tokens <= 16 or (num_tokens <= 64 and senders > most)
        block = 1024 if small else 8192 if wide else 2048
        shared = max(self.num_sms * 5 // 8, 1) if wide else most  # senders do most of the work
        receivers = min(max(num_tokens * 7, 8), 264, max(self.most_receivers // (4 if wide else 1), 1))
        return CombineTuning(
            senders=min(senders, shared, MANY if wide else self._share(2)),
            receivers=min(receivers, self._share(1, shared) if wide else self._share(2)),
            senders_alone=min(senders, most, self._share(1)),
            receivers_alone=min(receivers, self._share(1)),
            num_warps=8 if wide else 4,
            sent_block=block,
            summed_block=block,
            rows_in_flight=8,
        )

    def _share(self, parts: int, taken: int = 0) -> int:
        """`num_sms` less `taken` programs, divided into `parts`; MANY without a limit."""
        return max((self.num_sms - taken) // parts, 1) if self.num_sms else MANY


def block_words(row_words: int, most: int = MANY) -> int:
    """Words, or columns, of a row that a program moves at a time: a power of two, at most `most`."""
    return min(triton.next_power_of_2(row_words), most)


def awaited_words(row_words: int, most: int, num_threads: int) -> int:
    """`block_words` for a program of `num_threads` that polls them: at least one per thread.

    With fewer, several warps would poll the same word and could disagree on whether it has arrived.
    """
    return max(block_words(row_words, most), num_threads)


def held_words(num_ranks: int, itemsize: int, num_threads: int, *, held_bytes: int = _HELD_BYTES) -> int:
    """Columns that a program may load from each rank's row before it accumulates: registers must hold them all."""
    return max(held_bytes * num_threads // (itemsize * triton.next_power_of_2(num_ranks)), 1)
