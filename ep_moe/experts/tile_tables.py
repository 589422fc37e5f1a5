"""Tables of tile sizes: JSON files, the package's own and a user's.

A file for one shape is in a folder for its GPU, such as `NVIDIA_H200`, and named as vLLM names its own, by I, H, the
GPU and what the experts compute in, a scheme or the model's dtype: `N=2048,K=7168,device_name=NVIDIA_H200,
dtype=fp8_block.json`, without a space. `ep-moe tune` writes such files. It maps the tokens of an expert to tiles:

    {"16": {"backend": "triton", "BLOCK_SIZE_M": 16, "GROUP_SIZE_M": 16, "first": {"BLOCK_SIZE_N": 128, ...},
            "second": {...}},
     "64": {"backend": "hopper", "GROUP_SIZE_M": 8}}

A key is the most tokens that its entry is for; the last one serves more, too. An entry without "backend" has tiles for
Triton and leaves the choice of the backend to the experts; of "hopper", whose tiles follow from the rows, an entry
has the order alone. `default_tiles.json` lists such tables for all other shapes, each with its condition.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ep_moe.config import config_dir
from ep_moe.experts.formats import KERNELS
from ep_moe.experts.tuning import HOPPER_TILES, ExpertTiles, GemmTiles
from ep_moe.fields import shown

PACKAGED = config_dir() / "tuned"
_DEFAULT = Path(__file__).parent / "default_tiles.json"
_BLOCKS = (16, 256)
_SHARED_KEYS = {"BLOCK_SIZE_M": "block_m", "GROUP_SIZE_M": "group_m"}
_HOPPER_KEYS = {"GROUP_SIZE_M": "group_m"}
_GEMM_KEYS = {
    "BLOCK_SIZE_N": "block_n",
    "BLOCK_SIZE_K": "block_k",
    "SWAP_AB": "swap",
    "num_warps": "num_warps",
    "num_stages": "num_stages",
    "PROGRAMS_PER_SM": "programs_per_sm",
}
_LIMITS = {  # smallest, largest, whether a power of two
    **dict.fromkeys(("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"), (*_BLOCKS, True)),
    "GROUP_SIZE_M": (1, 1024, False),
    "num_warps": (1, 16, True),
    "num_stages": (1, 8, False),
    "PROGRAMS_PER_SM": (1, 32, False),
}
_CONDITIONS = {
    "dtypes": list,
    "shared_kib": int,
    "gated": bool,
    "group_k": int,
    "whole_blocks": bool,
    "weight_bits": int,
    "fp8_weights": bool,
}
SHARED_KIB = (227, 160, 99, 64)  # classes of GPUs by the shared memory of a block: as 9.0; 8.0 and gfx950; 8.9; gfx942
_log = logging.getLogger(__name__)
_WIDEST_GROUP = 128  # `group_k` of a condition is the largest power of two up to this that divides a scale's columns


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileTable:
    """Tiles by the tokens of an expert.

    Args:
        source: the file, for errors. when: what it is for. rows: (most tokens, tiles), ascending.
    """

    source: str
    when: Mapping[str, Any]
    rows: tuple[tuple[int, ExpertTiles], ...]

    def choose(self, expected_rows: int) -> ExpertTiles:
        """The tiles for experts that have `expected_rows` tokens on average. Local."""
        return next((tiles for most, tiles in self.rows if expected_rows <= most), self.rows[-1][1])


def table_name(intermediate: int, hidden: int, device_name: str, dtype: str) -> str:
    """The name of the file for a shape. Example: N=2048,K=7168,device_name=NVIDIA_H200,dtype=fp8_block.json."""
    return f"N={intermediate},K={hidden},device_name={device_name.replace(' ', '_')},dtype={dtype}.json"


def _values(entry: Any, keys: Mapping[str, str], where: str, *others: str) -> dict[str, Any]:
    """The values of these keys, by the names of fields. Errors: ValueError for missing, unknown and bad ones."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where} ({shown(entry)}) is not an object")
    if wrong := entry.keys() ^ {*keys, *others}:
        what = "unknown" if wrong & entry.keys() else "missing"
        name = sorted(wrong & entry.keys() or wrong)[0]
        raise ValueError(f"{where}: {what} key {name}; needed are {', '.join((*keys, *others))}")
    for key in keys:
        value = entry[key]
        if key == "SWAP_AB":
            if not isinstance(value, bool):
                raise ValueError(f"{where}: {key} ({shown(value)}) is not true or false")
            continue
        least, most, power = _LIMITS[key]
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if not fits or (power and value & (value - 1)):
            what = "a power of two" if power else "an integer"
            raise ValueError(f"{where}: {key} ({shown(value)}) is not {what} from {least} to {most}")
    return {field: entry[key] for key, field in keys.items()}


def tiles_of_json(entry: Any, where: str) -> ExpertTiles:
    """The tiles of one entry of a table. Errors: ValueError names `where`, the key, the value and the limit. Local."""
    backend = ""
    if isinstance(entry, dict) and "backend" in entry:
        backend, entry = entry["backend"], {key: value for key, value in entry.items() if key != "backend"}
        if backend not in KERNELS:
            raise ValueError(f"{where}: backend ({shown(backend)}) is not one of {', '.join(KERNELS)}")
    if backend == HOPPER_TILES.backend:
        return dataclasses.replace(HOPPER_TILES, **_values(entry, _HOPPER_KEYS, where))
    shared = _values(entry, _SHARED_KEYS, where, "first", "second")
    first, second = (GemmTiles(**_values(entry[name], _GEMM_KEYS, f"{where}: {name}")) for name in ("first", "second"))
    return ExpertTiles(first=first, second=second, backend=backend, **shared)


def tiles_to_json(tiles: ExpertTiles) -> dict[str, Any]:
    """The entry of a table that `tiles_of_json` reads as these tiles. Local."""
    named = {"backend": tiles.backend} if tiles.backend else {}
    if tiles.backend == HOPPER_TILES.backend:
        return named | {key: getattr(tiles, field) for key, field in _HOPPER_KEYS.items()}
    gemms = {
        name: {key: getattr(getattr(tiles, name), field) for key, field in _GEMM_KEYS.items()}
        for name in ("first", "second")
    }
    return named | {key: getattr(tiles, field) for key, field in _SHARED_KEYS.items()} | gemms


def _table(rows: Any, source: str, when: Mapping[str, Any]) -> TileTable:
    """Read one table. Errors: ValueError names the file, the key, the value and the limit."""
    if not isinstance(rows, dict) or not rows:
        raise ValueError(f"{source}: a table ({shown(rows)}) is not an object with at least one key")
    found: list[tuple[int, ExpertTiles]] = []
    for key, entry in rows.items():
        where, last = f"{source}: {key}", found[-1][0] if found else 0
        if not key.isascii() or not key.isdecimal() or int(key) <= last:
            raise ValueError(f"{source}: key ({shown(key)}) is not an integer above {last}")
        found.append((int(key), tiles_of_json(entry, where)))
    return TileTable(source=source, when=when, rows=tuple(found))


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
        raise ValueError(f"{path}: {error}") from None


@functools.cache
def read_table(path: Path) -> TileTable:
    """Read the table of one shape; later calls return what the first one read.

    Errors: ValueError that names the file, the key, the value and the limit. Local.
    """
    return _table(_read_json(path), str(path), {})


@functools.cache
def read_default_tables(path: Path = _DEFAULT) -> tuple[TileTable, ...]:
    """Read the tables for all shapes without one of their own. Errors: as of `read_table`. Local."""
    tables = _read_json(path)
    if not isinstance(tables, list):
        raise ValueError(f"{path}: {shown(tables)} is not a list of tables")
    found = []
    for number, table in enumerate(tables):
        source = f"{path}: table {number}"
        if not isinstance(table, dict) or table.keys() != {"when", "rows"} or not isinstance(table["when"], dict):
            raise ValueError(f"{source} ({shown(table)}) is not an object of 'when' and 'rows'")
        for key, value in table["when"].items():
            if key not in _CONDITIONS or type(value) is not _CONDITIONS[key]:
                raise ValueError(f"{source}: condition {key} ({shown(value)}) is not one of {', '.join(_CONDITIONS)}")
        found.append(_table(table["rows"], source, table["when"]))
    return tuple(found)


def default_table(
    dtype: torch.dtype,
    *,
    gated: bool,
    shared_kib: int = SHARED_KIB[0],
    group_k: int = 0,
    whole_blocks: bool = True,
    weight_bits: int = 0,
    fp8_weights: bool = False,
) -> TileTable:
    """The table for shapes without one of their own, as measured fastest on an H200, and those of decoded weights on an
    H100 (docs/BENCHMARKS.md); for GPUs of less shared memory those that are compiled to fit it, which nobody measured.

    Few tokens want tiles of 16 or 32 tokens, which Hopper's tensor cores support only as columns: `SWAP_AB`. The two
    halves of a gated w13 want eight warps; fp8, with two sets of accumulators, at most 64 tokens.

    Args:
        dtype: of the rows that weights multiply. gated: whether w13 has two halves.
        shared_kib: KiB of shared memory that a thread block may have; its class is the largest that does not exceed it.
        group_k: columns that share a weight scale, which no step of the reduction crosses; 0 without block scales.
        whole_blocks: whether 128 rows of a weight lie in one block of its scales; else each row loads its own.
        weight_bits: of an element of weights that are decoded to `dtype`; 0 if they are not.
        fp8_weights: whether these are fp8 numbers, which are decoded in fewer instructions than integers.
    Errors: ValueError if no table is for this dtype. Local.
    """
    name = str(dtype).removeprefix("torch.")
    group = min(group_k & -group_k, _WIDEST_GROUP)
    facts = {"gated": gated, "group_k": group, "whole_blocks": whole_blocks}
    facts |= {"weight_bits": weight_bits, "fp8_weights": fp8_weights}
    facts["shared_kib"] = next((size for size in SHARED_KIB if size <= shared_kib), SHARED_KIB[-1])
    for table in read_default_tables():
        wanted = dict(table.when)
        if name in wanted.pop("dtypes", [name]) and wanted.items() <= facts.items():
            return table
    raise ValueError(f"{_DEFAULT} has no table for {name}, {facts}")


def device_name(device: torch.device) -> str:
    """The name of a device in tables. Example: NVIDIA H200; of a CPU: cpu. Local."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def find_table(
    intermediate: int, hidden: int, device: torch.device, dtype: str, folder: Path | None = None
) -> TileTable | None:
    """The table of a shape: a user's in `folder`, else the package's; None if there is neither. Logged once.

    Args: as of `table_name`; dtype: the scheme's name, or that of the model's dtype if it is not quantized.
    Errors: as of `read_table`. Local.
    """
    name = device_name(device)
    file = Path(name.replace(" ", "_")) / table_name(intermediate, hidden, name, dtype)
    paths = [path / file for path in (folder, PACKAGED) if path is not None]
    found = next((path for path in paths if path.is_file()), None)
    log_once(f"expert kernels take {found}" if found else f"expert kernels take default tiles: no table {file}")
    return None if found is None else read_table(found)


@functools.cache
def log_once(text: str) -> None:
    """Log which table is used, or why an entry of it is not. Local."""
    _log.info("%s", text)
