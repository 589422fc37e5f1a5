"""Tables of tile sizes: what is chosen from them, and what is wrong with a bad one."""

import copy
import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_moe.environment import default_tiles_dir, tiles_dir
from ep_moe.experts import tile_tables
from ep_moe.experts.tile_tables import (
    PACKAGED,
    default_table,
    find_table,
    read_default_tables,
    read_table,
    table_name,
    tiles_of_json,
    tiles_to_json,
)
from ep_moe.experts.tuning import HOPPER_TILES, GemmTiles

GEMM = {"BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "SWAP_AB": False, "num_warps": 8, "num_stages": 2, "PROGRAMS_PER_SM": 3}


def good() -> dict[str, Any]:
    """A table of two buckets."""
    entry = {"BLOCK_SIZE_M": 16, "GROUP_SIZE_M": 4, "first": dict(GEMM), "second": {**GEMM, "SWAP_AB": True}}
    return copy.deepcopy({"8": entry}) | copy.deepcopy({"64": {**entry, "BLOCK_SIZE_M": 128}})


def write(folder: Path, content: Any, name: str = "table.json") -> Path:
    """Write a table into a file."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_buckets(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, good()))
    assert [table.choose(rows).block_m for rows in (0, 8, 9, 64, 65, 10**6)] == [16, 16, 128, 128, 128, 128]
    tiles = table.choose(1)
    expected = GemmTiles(block_n=64, block_k=32, swap=False, num_warps=8, num_stages=2, programs_per_sm=3)
    assert (tiles.group_m, tiles.first, tiles.second.swap) == (4, expected, True)


def set_to(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    """A change of a table: the value at this path."""

    def change(table: dict[str, Any]) -> None:
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_to(24, "8", "BLOCK_SIZE_M"), ("8: BLOCK_SIZE_M (24)", "a power of two from 16 to 256")),
        (set_to(512, "8", "first", "BLOCK_SIZE_N"), ("8: first: BLOCK_SIZE_N (512)", "16 to 256")),
        (set_to(8, "64", "second", "BLOCK_SIZE_K"), ("64: second: BLOCK_SIZE_K (8)", "16 to 256")),
        (set_to(True, "8", "first", "num_stages"), ("num_stages (True)", "an integer from 1 to 8")),
        (set_to(6, "8", "first", "num_warps"), ("num_warps (6)", "a power of two from 1 to 16")),
        (set_to(0, "8", "first", "PROGRAMS_PER_SM"), ("PROGRAMS_PER_SM (0)", "1 to 32")),
        (set_to(1, "8", "first", "SWAP_AB"), ("SWAP_AB (1)", "true or false")),
        (set_to(4.0, "8", "GROUP_SIZE_M"), ("GROUP_SIZE_M (4.0)", "an integer from 1 to 1024")),
        (set_to(4, "8", "first", "waves"), ("8: first: unknown key waves", "num_warps")),
        (lambda table: table["8"].pop("second"), ("8: missing key second",)),
        (lambda table: table["8"]["first"].pop("num_warps"), ("8: first: missing key num_warps",)),
        (set_to(3, "8", "first"), ("8: first (3) is not an object",)),
        (set_to("cutlass", "64", "backend"), ("64: backend ('cutlass') is not one of triton, hopper",)),
        (set_to(["triton"], "64", "backend"), ("64: backend (['triton']) is not one of",)),
        (set_to("hopper", "8", "backend"), ("8: unknown key BLOCK_SIZE_M; needed are GROUP_SIZE_M",)),
        (set_to({"backend": "hopper", "GROUP_SIZE_M": 0}, "8"), ("8: GROUP_SIZE_M (0)", "from 1 to 1024")),
        (set_to({"backend": "hopper"}, "8"), ("8: missing key GROUP_SIZE_M",)),
        (set_to({}, "32"), ("key ('32') is not an integer above 64",)),
        (set_to({}, "many"), ("key ('many') is not an integer",)),
        (lambda table: table.clear(), ("is not an object with at least one key",)),
    ],
)
def test_bad_tables(change: Callable[[dict[str, Any]], Any], words: tuple[str, ...], tmp_path: Path) -> None:
    table = good()
    change(table)
    path = write(tmp_path, table)
    with pytest.raises(ValueError) as caught:
        read_table(path)
    assert [word for word in (str(path), *words) if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ("Expecting",)),
        ("{}", ("is not a list of tables",)),
        ([{"rows": good()}], ("table 0", "'when' and 'rows'")),
        ([{"when": {"gated": 1}, "rows": good()}], ("table 0: condition gated (1)", "dtypes, shared_kib, gated")),
        ([{"when": {"phase": 1}, "rows": good()}], ("table 0: condition phase (1)",)),
        ([{"when": {}, "rows": {"1": {}}}], ("table 0: 1: missing key BLOCK_SIZE_M",)),
    ],
)
def test_bad_default_tables(content: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ValueError) as caught:
        read_default_tables(path)
    assert [word for word in (str(path), *words) if word not in str(caught.value)] == []


def test_the_default_tables_serve_every_format() -> None:
    """A step of the sum never crosses a scale, whatever number of columns shares one."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8):
        for gated in (True, False):
            assert default_table(dtype, gated=gated).choose(1).block_m == 16
    for group_k in (16, 32, 48, 96, 128, 256, 384):
        for whole in (True, False):
            for rows in (4, 16, 500):
                for dtype in (torch.float8_e4m3fn, torch.int8):
                    tiles = default_table(dtype, gated=True, group_k=group_k, whole_blocks=whole).choose(rows)
                    assert (group_k % tiles.first.block_k, group_k % tiles.second.block_k) == (0, 0)
    with pytest.raises(ValueError, match=r"default_tiles\.json has no table for float64, .*'group_k': 0"):
        default_table(torch.float64, gated=True)


def test_a_table_for_a_shape_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "N=2048,K=7168,device_name=NVIDIA_H200,dtype=fp8_block.json"
    assert table_name(2048, 7168, "NVIDIA H200", "fp8_block") == name
    (tmp_path / "cpu").mkdir()
    path = write(tmp_path / "cpu", good(), table_name(80, 144, "cpu", "bfloat16"))
    cpu = torch.device("cpu")
    monkeypatch.setattr(tile_tables, "PACKAGED", tmp_path / "packaged")
    tile_tables.log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="ep_moe.experts"):
        for _ in range(2):
            found = find_table(80, 144, cpu, "bfloat16", tmp_path)
            assert found is not None
            assert found.source == str(path)
            assert find_table(80, 144, cpu, "float16", tmp_path) is None
            assert find_table(80, 144, cpu, "bfloat16") is None
    others = [f"cpu/{table_name(80, 144, 'cpu', dtype)}" for dtype in ("float16", "bfloat16")]
    told = [f"expert kernels take default tiles: no table {other}" for other in others]
    assert caplog.messages == [f"expert kernels take {path}", *told]
    packaged = tmp_path / "packaged" / "cpu"
    packaged.mkdir(parents=True)
    write(packaged, good(), path.name)
    assert find_table(80, 144, cpu, "bfloat16", tmp_path) == found  # a user's first
    path.unlink()
    found = find_table(80, 144, cpu, "bfloat16", tmp_path)
    assert found is not None
    assert found.source == str(packaged / path.name)


def test_the_package_s_tables_can_be_read() -> None:
    assert read_default_tables()
    paths = list(PACKAGED.glob("*/*.json"))
    assert paths
    for path in paths:
        assert read_table(path).rows
        assert path.name.split(",")[2] == f"device_name={path.parent.name}"


def test_tiles_are_written_as_they_are_read() -> None:
    entry = good()["64"]
    for written in (entry, entry | {"backend": "triton"}, {"backend": "hopper", "GROUP_SIZE_M": 4}):
        assert tiles_to_json(tiles_of_json(written, "entry")) == written
    assert tiles_of_json(written, "entry") == dataclasses.replace(HOPPER_TILES, group_m=4)


def test_the_folder_of_a_user_s_tables(tmp_path: Path) -> None:
    home = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert tiles_dir(home) is None
    folder = tmp_path / "ep_moe" / "tiles"
    assert default_tiles_dir(home) == folder
    folder.mkdir(parents=True)
    assert tiles_dir(home) == folder
    assert tiles_dir({"EP_MOE_TILES_DIR": str(tmp_path)}) == tmp_path
    with pytest.raises(ValueError, match=r"EP_MOE_TILES_DIR \('/nowhere/at/all'\) is not a directory"):
        tiles_dir({"EP_MOE_TILES_DIR": "/nowhere/at/all"})
