"""Reads Triton's IR as text: the loads, stores, products and reductions of a kernel."""

import collections
import dataclasses
import math
import re
from typing import Literal

Place = tuple[str, int]  # file and line

ELEMENT_BYTES = {"i1": 1, "i8": 1, "f8E4M3FN": 1, "f8E5M2": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4}
FP8 = ("f8E4M3FN", "f8E5M2")

_LOCATION = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_FILE = re.compile(r'^"(.*)":(\d+):\d+')
_FIRST_REFERENCE = re.compile(r"#loc\d*")
_MEMORY = re.compile(r"tt\.(load|store) .* : (.*) loc\((.*)\)$")
_WIDENED = re.compile(r"tt\.fp_to_fp .* : tensor<(?:\d+x)+f8\w+> -> ")
_POINTERS = re.compile(r"^tensor<((?:\d+x)+)!tt\.ptr<(\w+)")
_DOT = re.compile(r"tt\.dot .*?(?:, inputPrecision = (\w+).*?)? : tensor<(\d+)x(\d+)x(\w+)> \* tensor<\d+x(\d+)x(\w+)>")
_GROUP_DOT = re.compile(  # of Gluon: operands in shared memory, or the left one in registers
    r"ttng\.warp_group_dot\b.* : (?:!ttg\.memdesc|tensor)<(\d+)x(\d+)x(\w+),.*> "
    r"\* !ttg\.memdesc<\d+x(\d+)x(\w+),.*loc\("
)
_CHECKED = re.compile(r"\btt\.(load|store|dot)|\bttng\.warp_group_dot ")
_POINTER = re.compile(r"^!tt\.ptr<(\w+)")
_CALL = re.compile(r"^callsite\((#loc\d*) at (#loc\d*)\)$")
_REDUCTION = re.compile(r"^\}\) : \(tensor<((?:\d+x)+)\w+>.* loc\((.*)\)$")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """A load or store of `elements` elements of `element_bytes` each; 1 for a scalar."""

    kind: Literal["load", "store"]
    element: str
    elements: int
    place: Place | None

    @property
    def element_bytes(self) -> int:
        """Bytes of an element; pointers and wider types count as 8."""
        return ELEMENT_BYTES.get(self.element, 8)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A product of tiles [m, k] and [k, n]."""

    m: int
    n: int
    k: int
    left: str
    right: str
    precision: str

    @property
    def fp8(self) -> bool:
        """True if both operands are fp8."""
        return self.left in FP8 and self.right in FP8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """A reduction or scan of `elements` elements; `frames` are its source lines, innermost first."""

    elements: int
    frames: tuple[Place, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ir:
    """A kernel's accesses, products and reductions, before they are laid out on threads."""

    accesses: list[Access]
    dots: list[Dot]
    reductions: list[Reduction]
    widens_fp8: bool  # converts a block of fp8 to a wider type


def _elements(shape: str) -> int:
    """The product of a shape like 64x128x."""
    return math.prod(int(size) for size in shape.split("x") if size)


def _places(text: str) -> dict[str, str]:
    return {match[1]: match[2] for line in text.splitlines() if (match := _LOCATION.match(line))}


def _resolve(location: str, named: dict[str, str]) -> Place | None:
    """The file and line of a location; of an inlined call those of the callee, as in the machine code's line table."""
    for _ in range(len(named) + 1):
        if match := _FILE.match(location):
            return match[1], int(match[2])
        reference = _FIRST_REFERENCE.search(location)
        if reference is None or reference[0] not in named:
            return None
        location = named[reference[0]]
    return None


def _frames(location: str, named: dict[str, str]) -> tuple[Place, ...]:
    """The lines of a location, those of the innermost call first."""
    location = named.get(location, location)
    if match := _FILE.match(location):
        return ((match[1], int(match[2])),)
    if match := _CALL.match(location):
        return (*_frames(match[1], named), *_frames(match[2], named))
    reference = _FIRST_REFERENCE.search(location)
    return _frames(reference[0], named) if reference and reference[0] in named else ()


def read(text: str) -> Ir:
    """Read the module that Triton keeps as "ttir", or Gluon, which has none, as "ttgir".

    Errors: RuntimeError for a load, store or product that is not written as the ones known here.
    """
    named = _places(text)
    accesses, dots, reductions = [], [], []
    for line in text.splitlines():
        if match := _MEMORY.search(line):
            block, scalar = _POINTERS.match(match[2]), _POINTER.match(match[2])
            element = block[2] if block else scalar[1] if scalar else ""
            elements = _elements(block[1]) if block else 1
            kind: Literal["load", "store"] = "load" if match[1] == "load" else "store"
            accesses.append(Access(kind=kind, element=element, elements=elements, place=_resolve(match[3], named)))
        elif match := _DOT.search(line):
            m, k, n = int(match[2]), int(match[3]), int(match[5])
            dots.append(Dot(m=m, n=n, k=k, left=match[4], right=match[6], precision=match[1] or "ieee"))
        elif match := _GROUP_DOT.search(line):
            m, k, n = int(match[1]), int(match[2]), int(match[4])
            dots.append(Dot(m=m, n=n, k=k, left=match[3], right=match[5], precision="ieee"))
        elif match := _REDUCTION.match(line.strip()):
            reductions.append(Reduction(elements=_elements(match[1]), frames=_frames(match[2], named)))
        elif _CHECKED.search(line):
            raise RuntimeError(f"cannot read this line of Triton's IR: {line.strip()}")
    widens_fp8 = _WIDENED.search(text) is not None
    return Ir(accesses=accesses, dots=dots, reductions=reductions, widens_fp8=widens_fp8)


def loaded_again(before: str, after: str) -> list[Place | None]:
    """The places of volatile loads that are more in "ttgir" (`after`) than in "ttir" (`before`)."""
    return [*(_volatile_loads(after) - _volatile_loads(before))]


def from_caches(text: str) -> list[Place | None]:
    """The places of volatile loads, in "ttir", that do not say ".cv"."""
    return [*_volatile_loads("\n".join(line for line in text.splitlines() if "cacheModifier = cv" not in line))]


def _volatile_loads(text: str) -> collections.Counter[Place | None]:
    named, found = _places(text), collections.Counter[Place | None]()
    for line in text.splitlines():
        if "isVolatile = true" in line and (match := _MEMORY.search(line)):
            found[_resolve(match[3], named)] += 1
    return found
