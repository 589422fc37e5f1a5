"""The wire format of the one-sided exchange: regions of memory, headers, rows, words and their bit fields.

Every offset, width and bit field stands here, with the functions that pack and unpack it: jit functions for
kernels, plain ones for the host. A rank's memory for one slot has a region for each thing that peers write there:

| region | shape | written by |
|---|---|---|
| HEADERS | [R, header_stride] words, by source rank: status, format, layer, settings, rows for each expert | source |
| FLAGS | [R, M] words, the first of each group of tokens used: a bit for each token of it that was sent here | source |
| ENTRIES | [R, M, ENTRY] int32: K entries, then K weights | source |
| VALUES | [M, R, VALUE_STRIDE] int32 words of payload | source |
| SCALES | [R, M, SCALE_STRIDE] scales | source |
| LL_ROWS | [R, word_tokens, LL_STRIDE] words: K entries, K weights, values, scales | source |
| COMBINE_HEADERS | [R] words | rank of the experts |
| RETURNED | [R, M, H] in the model's dtype | rank of the experts |

A word (LL, as NCCL calls it) has 64 bits: the epoch of its round above 32 bits of payload. It is stored in one piece: a
reader that finds the epoch it waits for has the payload too, without any fence, and words never need to be cleared.

Rule: where a row lies follows from its source, its token and the sizes of the transport, never from a round's format,
K or `max_num_tokens`. So each word has one writer for ever: what a rank stores late, in a refused round or after the
others have masked it out, overwrites only its own words, which it stores again before they are read, or which nobody
reads. VALUES goes by token first: the rows of a round with a bound are one tensor, which a FLAT batch is.

Letters: R ranks, M max_tokens_per_rank, L the most experts that a rank owns, H hidden, G scale groups, K top-k.
"""

import dataclasses
import itertools
from typing import Literal, NamedTuple

import triton
import triton.language as tl

from ep_moe.kernels.numerics import INTERPRET

# regions of a rank's memory for one slot, by place in `Links.offsets`
HEADERS = tl.constexpr(0)
FLAGS = tl.constexpr(1)
ENTRIES = tl.constexpr(2)
VALUES = tl.constexpr(3)
SCALES = tl.constexpr(4)
LL_ROWS = tl.constexpr(5)
COMBINE_HEADERS = tl.constexpr(6)
RETURNED = tl.constexpr(7)

# words of a header, before those of the experts
STATUS = tl.constexpr(0)
FORMAT = tl.constexpr(1)  # fingerprint of the payload's format, or one of the bad ids
LAYER = tl.constexpr(2)
SETTINGS = tl.constexpr(3)
HEADER_WORDS = tl.constexpr(4)

# codes of a status word, above the STATUS_BITS bits of a value
FINE = tl.constexpr(0)  # the value is the number of tokens
REFUSED = tl.constexpr(1)  # the caller's input is bad
TOO_MANY = tl.constexpr(2)  # tokens, above the limit
BAD_IDS = tl.constexpr(3)  # ids that no rank owns: the value is their number
STATUS_BITS = tl.constexpr(28)
STATUS_MASK = tl.constexpr(2**28 - 1)  # larger values are sent as this one

PLACE_BITS = tl.constexpr(20)  # of an entry: a row's place among those of its source and expert; local expert above
PLACE_MASK = tl.constexpr(2**20 - 1)

FLAGGED_SINGLY = tl.constexpr(2 if INTERPRET else 256)  # most tokens of a source of which each has its own flag
FLAGGED_IN_PAIRS = tl.constexpr(6 if INTERPRET else 1024)
MOST_FLAGGED = tl.constexpr(4)  # tokens, by one word

DISPATCH = tl.constexpr(0)  # phases, as an abort word names them
COMBINE = tl.constexpr(1)

_PHASES: tuple[Literal["dispatch", "combine"], ...] = ("dispatch", "combine")
_NOBODY = 255  # in place of the rank, in an abort word that names none
_REGION_ALIGNMENT_BYTES = 256
_ROW_ALIGNMENT_BYTES = 16  # of a vector access
_LL_ALIGNMENT_WORDS = 16  # a cache line
_WORD_BYTES = 8
_SCALE_SHARE = 4  # scales take at most a fourth of the bytes of 8-bit values: one float32 for 16 elements


class Ranks(NamedTuple):
    """The ranks and their experts: constants of a kernel."""

    R: tl.constexpr
    RANKS: tl.constexpr  # R rounded up to a power of two
    RANK: tl.constexpr  # this one
    STARTS: tl.constexpr  # R + 1 numbers, the first physical expert of each rank
    L: tl.constexpr
    EXPERTS: tl.constexpr  # L rounded up
    PUTS: tl.constexpr = 0  # a bit for each rank that is reached by NVSHMEM's puts, see `peers`


class Row(NamedTuple):
    """The parts of a token's row: constants of a kernel."""

    K: tl.constexpr
    COLUMNS: tl.constexpr  # K rounded up to a power of two
    VALUE_WORDS: tl.constexpr  # 32-bit words of values
    G: tl.constexpr
    GROUPS: tl.constexpr  # G, at least 1, rounded up
    ENTRY: tl.constexpr  # int32 between two rows of ENTRIES, 2 * max_topk; the same for all rounds, as the next three
    VALUE_STRIDE: tl.constexpr  # int32 between two rows of VALUES
    SCALE_STRIDE: tl.constexpr  # scales between two rows of SCALES, in bytes the same for all rounds
    LL_STRIDE: tl.constexpr  # words between two rows of LL_ROWS


# functions of fields, not properties or methods: what of a NamedTuple a kernel sees depends on Triton's release


@triton.constexpr_function
def header_stride(L: int) -> int:
    """Words of one source's header."""
    return L + HEADER_WORDS.value


@triton.constexpr_function
def ll_values(K: int) -> int:
    """Where values begin in a row of LL words."""
    return 2 * K


@triton.constexpr_function
def ll_scales(K: int, VALUE_WORDS: int) -> int:
    """Where scales begin in a row of LL words."""
    return 2 * K + VALUE_WORDS


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Regions:
    """The regions of one slot on one rank: O(R * M * H) bytes.

    Args:
        num_ranks: R. max_experts: L. max_tokens: M. hidden: H. max_topk: the largest K.
        itemsize: bytes of an element of the model's dtype. word_tokens: up to this T a rank sends rows as LL words.
    """

    num_ranks: int
    max_experts: int
    max_tokens: int
    hidden: int
    max_topk: int
    itemsize: int
    word_tokens: int

    @property
    def value_bytes(self) -> int:
        """From a row of VALUES to the next."""
        return _rounded(self.hidden * self.itemsize, _ROW_ALIGNMENT_BYTES)

    @property
    def scale_bytes(self) -> int:
        """From a row of SCALES to the next."""
        return _rounded(max(self.hidden // _SCALE_SHARE, 1), _ROW_ALIGNMENT_BYTES)

    @property
    def ll_words(self) -> int:
        """From a row of LL_ROWS to the next."""
        return _rounded((self.value_bytes + self.scale_bytes) // 4 + 2 * self.max_topk, _LL_ALIGNMENT_WORDS)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each region, by its number."""
        rows = self.num_ranks * self.max_tokens
        return (
            self.num_ranks * (HEADER_WORDS.value + self.max_experts) * _WORD_BYTES,
            rows * _WORD_BYTES,
            rows * 8 * self.max_topk,
            rows * self.value_bytes,
            rows * self.scale_bytes,
            self.num_ranks * self.word_tokens * self.ll_words * _WORD_BYTES,
            self.num_ranks * _WORD_BYTES,
            rows * self.hidden * self.itemsize,
        )

    @property
    def offsets(self) -> tuple[int, ...]:
        """The byte offset of each region, and last that of the next slot."""
        return (0, *itertools.accumulate(_rounded(size, _REGION_ALIGNMENT_BYTES) for size in self.sizes))


def _rounded(size: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-size // step) * step


@triton.jit
def make_word(epoch, payload):
    """A word of `epoch` int32 and `payload` int32, of any shape; epoch -1 and payload 5 give 0xFFFFFFFF00000005."""
    return (epoch.to(tl.int64) << 32) | (payload.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def epoch_of(word):
    """The epoch of a word, int32."""
    return (word >> 32).to(tl.int32)


@triton.jit
def payload_of(word):
    """The payload of a word, int32: the lower half, whose sign comes back with it."""
    return ((word << 32) >> 32).to(tl.int32)


@triton.jit
def pack_status(code, value):
    """The payload of a status word. value: int32, at most STATUS_MASK is sent; a negative one becomes STATUS_MASK."""
    return code << STATUS_BITS | tl.minimum(value & 0x7FFFFFFF, STATUS_MASK)


@triton.jit
def code_of(status):
    """The code of a status."""
    return (status >> STATUS_BITS) & 7


@triton.jit
def value_of(status):
    """The value of a status."""
    return status & STATUS_MASK


@triton.jit
def pack_entry(expert, place):
    """The entry of a token's row at a rank. expert: local there. place: among rows of its source and expert."""
    return (expert << PLACE_BITS) | place


@triton.jit
def expert_of(entry):
    """The local expert of an entry."""
    return entry >> PLACE_BITS


@triton.jit
def place_of(entry):
    """The place of an entry."""
    return entry & PLACE_MASK


@triton.jit
def tokens_per_flag(num_tokens):
    """Tokens that one flag word of a source announces, by the number of tokens in its header: 1, 2 or 4."""
    return tl.where(num_tokens <= FLAGGED_SINGLY, 1, tl.where(num_tokens <= FLAGGED_IN_PAIRS, 2, MOST_FLAGGED))


@triton.jit
def make_abort(number, suspect, phase):
    """An abort word: `suspect` did not answer in a phase of round `number`. Example: rank 2, COMBINE has payload 259.

    The smallest of several words names the earliest phase, for which the others may wait.
    """
    return make_word(number, (suspect + 1 + 256 * phase).to(tl.int32))


def host_word(epoch: int, payload: int) -> int:
    """`make_word` of the host."""
    return epoch << 32 | payload & 0xFFFFFFFF


def host_abort(suspects: tuple[int, ...]) -> int:
    """An abort word that the host writes, for no particular round; it names the first suspect, if there is one."""
    return host_word(0, suspects[0] + 1 if suspects else _NOBODY)


class Abort(NamedTuple):
    """The fields of an abort word."""

    round: int
    phase: Literal["dispatch", "combine"]
    suspects: tuple[int, ...]  # one rank, or none


def read_abort(word: int) -> Abort | None:
    """Unpack an abort word; None for one without payload, which names nothing."""
    payload = word & 0xFFFFFFFF
    if not payload:
        return None
    suspect = payload & 0xFF
    return Abort(word >> 32, _PHASES[payload >> 8 & 1], () if suspect == _NOBODY else (suspect - 1,))
