"""Tile sizes as SGLang's configs name them, and their use by the kernels here.

A config is {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 8, "num_warps": 4,
"num_stages": 3}; a file maps numbers of tokens to configs. BLOCK_SIZE_N counts rows of a weight: of the first one half
are the gate's and half the linear half's, which a program of ours multiplies together.

Letters: M tokens, E experts, N intermediate, K hidden.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ep_moe.environment import sglang_configs_dir, tiles_dir
from ep_moe.experts.tile_tables import default_table, find_table
from ep_moe.experts.tuning import ExpertTiles, GemmTiles, fit_stages, fit_steps
from ep_moe.fields import shown
from ep_moe.functional.formats import Flags
from ep_moe.quant import QuantScheme

Config = Mapping[str, Any]
_KEYS = {  # smallest, largest, whether a power of two, default
    "BLOCK_SIZE_M": (16, 256, True, None),
    "BLOCK_SIZE_N": (16, 256, True, None),
    "BLOCK_SIZE_K": (16, 256, True, None),
    "GROUP_SIZE_M": (1, 1024, False, None),
    "num_warps": (1, 16, True, 4),
    "num_stages": (1, 8, False, 3),
}
_WITHOUT_MEANING = ("USE_TMA", "waves_per_eu", "matrix_instr_nonkdim", "kpack")  # of other kernels and GPUs
_WARPS_PER_SM = 8  # of programs that share an SM
_SWAPPED_ROWS = 64  # tiles of fewer tokens have them as columns: a tensor core's product has 64 rows
_DTYPES = {"fp8_w8a8": torch.float8_e4m3fn, "int8_w8a8": torch.int8, "float32": torch.float32}
_SCHEMES = {"fp8_w8a8": "fp8_tensor", "int8_w8a8": "int8_token", "float32": "float32", None: "bfloat16"}
_WEIGHT_BITS = {"int8_w8a16": 8, "int4_w4a16": 4}

_override: contextvars.ContextVar[Config | None] = contextvars.ContextVar("override_config", default=None)


@contextlib.contextmanager
def override_config(config: Config | None) -> Iterator[None]:
    """Compute all calls of this context with this config; None uses files and tables again. Local to the thread."""
    token = _override.set(config)
    try:
        yield
    finally:
        _override.reset(token)


def get_config() -> Config | None:
    """The config of the innermost `override_config`, None outside of all. Local."""
    return _override.get()


def override_key() -> str:
    """What plans of calls depend on beside their arguments: the override as text, empty without one. Local."""
    override = _override.get()
    return str(override) if override else ""


def get_config_dtype_str(
    dtype: torch.dtype,
    use_int8_w8a16: bool | None = False,
    use_int4_w4a16: bool | None = False,
    use_fp8_w8a8: bool | None = False,
    use_int8_w8a8: bool | None = False,
) -> str | None:
    """The name of a format in names of config files; None for 16 bits, since they have one set of files. Local."""
    names = "fp8_w8a8", "int8_w8a8", "int4_w4a16", "int8_w8a16"
    flags = use_fp8_w8a8, use_int8_w8a8, use_int4_w4a16, use_int8_w8a16
    used = (name for name, flag in zip(names, flags, strict=True) if flag)
    return next(used, "float32" if dtype == torch.float32 else None)


def get_config_file_name(
    E: int,  # noqa: N803
    N: int,  # noqa: N803
    dtype: str | None,
    block_shape: Sequence[int] | None = None,
    per_channel_quant: bool = False,
    down_moe: bool = False,
) -> str:
    """The name of the file with a shape's tuned sizes on the current GPU, or on "cpu" without one. Local.

    Args: per_channel_quant: weights have a scale for each row. down_moe: of the second GEMM.
    """
    device = torch.cuda.get_device_name().replace(" ", "_") if torch.cuda.is_available() else "cpu"
    kind = f",dtype={dtype}" if dtype else ""
    block = f",block_shape={list(block_shape)}" if block_shape and all(block_shape) else ""
    channels, second = ",per_channel_quant=True" if per_channel_quant else "", "_down" if down_moe else ""
    return f"E={E},N={N},device_name={device}{kind}{block}{channels}{second}.json"


def _places(folder: Path) -> list[Path]:
    """Where a folder may have files: for the installed Triton, for others from the newest, in the folder itself."""

    def version(path: Path) -> tuple[int, ...]:
        return tuple(int(number) for number in re.findall(r"\d+", path.name))

    try:
        installed = f"triton_{importlib.metadata.version('triton').replace('.', '_')}"
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    for_triton = sorted(folder.glob("configs/triton_*"), key=version, reverse=True)
    return [*sorted(for_triton, key=lambda path: path.name != installed), folder]


@functools.lru_cache
def get_moe_configs(
    E: int,  # noqa: N803
    N: int,  # noqa: N803
    dtype: str | None,
    block_n: int | None = 0,
    block_k: int | None = 0,
    per_channel_quant: bool = False,
    down_moe: bool = False,
) -> dict[int, Any] | None:
    """Read the configs of a shape by the number of tokens; None without a file. Later calls return the same.

    The file is sought in the folder SGLANG_MOE_CONFIG_DIR, and then in EP_MOE_TILES_DIR: in their
    configs/triton_<version>, first the installed one's, and in the folder itself.

    Args:
        E, N: experts and intermediate size, that of w2 as it is stored. dtype: of `get_config_dtype_str`.
        block_n, block_k: of a block of scales, 0 without. per_channel_quant: weights have a scale for each row.
        down_moe: those of the second GEMM, or without a file of its own those of the first.
    Errors: ValueError names a file that is no table of configs. Local.
    """
    name = get_config_file_name(E, N, dtype, [block_n or 0, block_k or 0], per_channel_quant, down_moe)
    folders = [folder for folder in (sglang_configs_dir(), tiles_dir()) if folder is not None]
    path = next((place / name for folder in folders for place in _places(folder) if (place / name).is_file()), None)
    if path is None:
        return get_moe_configs(E, N, dtype, block_n, block_k, per_channel_quant) if down_moe else None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        configs = {int(tokens): entry for tokens, entry in table.items() if tokens != "triton_version"}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an object of configs by numbers of tokens: {error}") from None
    for tokens, entry in configs.items():
        _checked(entry, f"{path}: {tokens}")
    if not configs:
        raise ValueError(f"{path} has no configs")
    return configs


def get_default_config(
    M: int,  # noqa: N803
    E: int,  # noqa: N803
    N: int,  # noqa: N803
    K: int,  # noqa: N803
    topk: int,
    dtype: str | None,
    is_marlin: bool,
    block_shape: Sequence[int] | None = None,
) -> dict[str, int]:
    """The tiles of our own tables as a config: those that calls without an override or a file have.

    Args:
        M, E, N, K, topk: tokens, experts, intermediate and hidden size, experts of a token.
        dtype: of `get_config_dtype_str`. is_marlin: without meaning here. block_shape: of the scales.
    Local.
    """
    del is_marlin
    rows = max(math.ceil(M * topk / max(E, 1)), 1)
    group = block_shape[1] if block_shape else 0
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    table = None if block_shape or dtype in _WEIGHT_BITS else find_table(N, K, device, _SCHEMES[dtype], tiles_dir())
    found = None if table is None else table.choose(rows)
    if found is not None and found.backend in ("", "triton"):  # a config has tiles of Triton's kernels
        tiles = found
    elif dtype in _WEIGHT_BITS:
        tiles = default_table(torch.bfloat16, gated=True, weight_bits=_WEIGHT_BITS[dtype]).choose(rows)
    else:
        whole = not block_shape or (block_shape[0] % 128 == 0 and N % block_shape[0] == 0)
        stored = _DTYPES.get(dtype or "", torch.bfloat16)
        tiles = default_table(stored, gated=True, group_k=group, whole_blocks=whole).choose(rows)
    tiles = fit_steps(tiles, group, across=dtype in _WEIGHT_BITS)
    return {
        "BLOCK_SIZE_M": tiles.block_m,
        "BLOCK_SIZE_N": min(2 * tiles.first.block_n, 256),
        "BLOCK_SIZE_K": tiles.first.block_k,
        "GROUP_SIZE_M": tiles.group_m,
        "num_warps": tiles.first.num_warps,
        "num_stages": tiles.first.num_stages,
    }


def try_get_optimal_moe_config(
    w1_shape: tuple[int, ...],
    w2_shape: tuple[int, ...],
    top_k: int,
    dtype: str | None,
    M: int,  # noqa: N803
    is_marlin: bool = False,
    block_shape: Sequence[int] | None = None,
    per_channel_quant: bool = False,
    return_down_config: bool = False,
) -> Any:
    """The override, or the file's config for the nearest number of tokens, or the default one.

    Args:
        w1_shape, w2_shape: of the stored weights. per_channel_quant: as of `get_moe_configs`.
        return_down_config: return the config and (that of the second GEMM, the largest BLOCK_SIZE_M of its file), both
            None beside an override and without a file. Its BLOCK_SIZE_M is the first's, since both share the sort.
        The others: as of `get_default_config`.
    Errors: as of `get_moe_configs`. Local.
    """
    block_n, block_k = block_shape or (0, 0)
    key = w2_shape[0], w2_shape[2], dtype, block_n, block_k, per_channel_quant
    config, down = _given_configs(key, M)
    if config is None:
        config = get_default_config(M, w2_shape[0], w2_shape[2], w1_shape[2], top_k, dtype, is_marlin, block_shape)
    if not return_down_config:
        return config
    if down is None:
        return config, (None, None)
    of_second = get_moe_configs(*key, True) or {}
    most = max(one["BLOCK_SIZE_M"] for one in of_second.values())
    return config, ({**down, "BLOCK_SIZE_M": config["BLOCK_SIZE_M"]}, most)


ConfigsKey = tuple[int, int, str | None, int, int, bool]


def _given_configs(key: ConfigsKey, num_tokens: int) -> tuple[Config | None, Config | None]:
    """The override, or the configs of files by `configs_key`, of the first and of the second GEMM; None without one."""
    override = _override.get()
    if override:
        return override, None
    first, second = (
        None if configs is None else configs[min(configs, key=lambda tokens: abs(tokens - num_tokens))]
        for configs in (get_moe_configs(*key), get_moe_configs(*key, True))
    )
    return first, second


def _checked(config: Any, where: str) -> dict[str, int]:
    """The values of all keys. Errors: ValueError names the key, the value and the limit."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} ({shown(config)}) is not an object")
    found = {}
    for key in config:
        if key not in _KEYS and key not in _WITHOUT_MEANING:
            raise ValueError(f"{where}: unknown key {key}; known are {', '.join(_KEYS)}")
    for key, (least, most, power, default) in _KEYS.items():
        value = config.get(key, default)
        fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if not fits or (power and value & (value - 1)):
            kind = "a power of two" if power else "an integer"
            raise ValueError(f"{where}: {key} ({shown(value)}) is not {kind} from {least} to {most}")
        found[key] = value
    return found


def tiles_of(
    config: Config, scheme: QuantScheme, dtype: torch.dtype, device: torch.device, *, gated: bool
) -> ExpertTiles:
    """A config as tiles of our kernels, which fit scales and the GPU's shared memory; `gated`: of two halves at once.

    Errors: ValueError names the key, the value and the limit. Local.
    """
    return _tiles_of(tuple(_checked(config, "config").items()), scheme, dtype, device, gated)


@functools.lru_cache(maxsize=256)
def _tiles_of(
    items: tuple[tuple[str, int], ...], scheme: QuantScheme, dtype: torch.dtype, device: torch.device, gated: bool
) -> ExpertTiles:
    sizes = dict(items)
    rows, stored = scheme.payload, scheme.weight
    swap = sizes["BLOCK_SIZE_M"] < _SWAPPED_ROWS

    def gemm(block_n: int) -> GemmTiles:
        options = {name: sizes[name] for name in ("num_warps", "num_stages")}
        programs = max(_WARPS_PER_SM // sizes["num_warps"], 1)
        return GemmTiles(block_n=block_n, block_k=sizes["BLOCK_SIZE_K"], swap=swap, programs_per_sm=programs, **options)

    columns = sizes["BLOCK_SIZE_N"]
    tiles = ExpertTiles(
        block_m=sizes["BLOCK_SIZE_M"],
        group_m=sizes["GROUP_SIZE_M"],
        first=gemm(max(columns // 2, 16) if gated else columns),
        second=gemm(columns),
    )
    decoded = stored.quantized and stored.dtype != rows.dtype
    tiles = fit_steps(tiles, stored.group_width, across=decoded and not rows.quantized)
    if device.type != "cuda":
        return tiles
    from ep_moe.kernels.device import Device  # imports Triton, which exists only on Linux

    limits = Device.of(device)
    bits = 8 * (rows.dtype or dtype).itemsize, 8 * (stored.dtype or dtype).itemsize // stored.packed
    return fit_stages(
        tiles,
        limits.shared_bytes,
        *bits,
        gated=gated,
        rearranged=stored.packed > 1,
        paired=decoded,
        warp_groups=limits.warp_groups,
    )


def configs_key(flags: Flags, w2: torch.Tensor, dtype: torch.dtype) -> ConfigsKey:
    """The arguments of `get_moe_configs` for a call with tokens in this dtype. Local."""
    used = flags.use_int8_w8a16, flags.use_int4_w4a16, flags.use_fp8_w8a8, flags.use_int8_w8a8
    block_n, block_k = flags.block_shape or (0, 0)
    return w2.shape[0], w2.shape[-1], get_config_dtype_str(dtype, *used), block_n, block_k, flags.per_channel_quant


def found_tiles(
    flags: Flags, w2: torch.Tensor, hidden_states: torch.Tensor, scheme: QuantScheme, *, gated: bool = True
) -> ExpertTiles | None:
    """The tiles of an override or a file for a call; None if there is neither, so that our tables choose. Local."""
    dtype, device = hidden_states.dtype, hidden_states.device
    config, down = _given_configs(configs_key(flags, w2, dtype), hidden_states.shape[0])
    if config is None:
        return None
    tiles = tiles_of(config, scheme, dtype, device, gated=gated)
    if down is None:
        return tiles
    return dataclasses.replace(tiles, second=tiles_of(down, scheme, dtype, device, gated=gated).second)
