"""SGLang's `invoke_fused_moe_kernel` and its configs, against float64 loops written from its documentation alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.calls import assert_compiles, assert_named
from helpers.experts_oracle import (
    EXPERTS,
    FORMATS,
    HIDDEN,
    INNER,
    LIMITS,
    ROUNDED_LIMIT,
    TOKENS,
    TOPK,
    activated,
    generator,
    made,
    rounded,
)

from ep_moe.functional.formats import Flags
from ep_moe.functional.sglang import (
    get_config,
    get_default_config,
    get_moe_configs,
    invoke_fused_moe_kernel,
    moe_align_block_size,
    outplace_fused_experts,
    override_config,
    try_get_optimal_moe_config,
)
from ep_moe.functional.sglang.configs import found_tiles, tiles_of
from ep_moe.quant import get_scheme
from ep_moe.testing import worst_row_error

BLOCK = 16
CONFIG = {"BLOCK_SIZE_M": BLOCK, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_stages": 2}
PAIRS = TOKENS * TOPK


def arguments(name: str, **changes: Any) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Arguments of the first GEMM, the pairs' weights and the real numbers of B."""
    form, random = FORMATS[name], generator(11)
    weight = made(form, 2 * INNER, HIDDEN, torch.bfloat16, 12)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(1)[:, :TOPK].int()
    pairs, experts, count = moe_align_block_size(ids, BLOCK, EXPERTS)
    weights = torch.rand(TOKENS, TOPK, generator=random) + 0.1
    flags = dict.fromkeys(("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"))
    given = dict.fromkeys(flags, False) | {
        "A": torch.randn(TOKENS, HIDDEN, generator=random).bfloat16(),
        "B": weight.values,
        "bias": None,
        "C": torch.full((TOKENS, TOPK, 2 * INNER), torch.nan, dtype=torch.bfloat16),
        "A_scale": None,
        "B_scale": weight.scale,
        "B_zp": weight.zero,
        "topk_weights": weights,
        "topk_ids": ids,
        "sorted_token_ids": pairs,
        "expert_ids": experts,
        "num_tokens_post_padded": count,
        "mul_routed_weight": False,
        "top_k": TOPK,
        "config": CONFIG,
        "compute_type": torch.bfloat16,
        **form.flags,
        **changes,
    }
    return given, weights, weight.real


def expected(given: dict[str, Any], real: torch.Tensor, form: str) -> torch.Tensor:
    """Each pair's row."""
    how = FORMATS[form].rows
    static = None if given["A_scale"] is None else float(given["A_scale"])
    rows = rounded(given["A"].double(), "bfloat16" if how == "none" else how, static)
    ids = given["topk_ids"].flatten().long()
    out = (real[ids] @ rows[torch.arange(PAIRS) // given["top_k"], :, None]).squeeze(2)
    out = out if given["bias"] is None else out + given["bias"][ids].double()
    return out * given["topk_weights"].reshape(-1, 1).double() if given["mul_routed_weight"] else out


def check(found: torch.Tensor, wanted: torch.Tensor, form: str) -> None:
    limit = LIMITS[torch.bfloat16] if FORMATS[form].rows == "none" else ROUNDED_LIMIT
    assert float(worst_row_error(found.reshape(wanted.shape), wanted)) < limit


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, weighted: bool, run: Any) -> None:
    bias = torch.randn(EXPERTS, 2 * INNER, generator=generator(5)).bfloat16() if weighted else None
    given, _, real = arguments(name, bias=bias, mul_routed_weight=weighted)
    assert run(invoke_fused_moe_kernel, **given) is None
    check(given["C"], expected(given, real, name), name)


def test_static_scale(run: Any) -> None:
    given, _, real = arguments("fp8_tensor", A_scale=torch.tensor([0.013]))
    run(invoke_fused_moe_kernel, **given)
    check(given["C"], expected(given, real, "fp8_tensor"), "fp8_tensor")


def test_flags_without_meaning_change_nothing() -> None:
    given, _, _ = arguments("none")
    invoke_fused_moe_kernel(**given)
    plain = given["C"].clone()
    for changes in ({"b_use_tma": True}, {"no_combine": True}, {"compute_type": "bf16"}, {"block_shape": None}):
        given["C"].fill_(torch.nan)
        invoke_fused_moe_kernel(**given | changes)
        assert torch.equal(given["C"], plain)


def test_rows_in_sorted_order(run: Any) -> None:
    """A sorted C becomes the A of the second GEMM, which is read in blocks and has a row for each pair."""
    given, _, _ = arguments("none")
    run(invoke_fused_moe_kernel, **given)
    by_pair, pairs = given["C"].view(PAIRS, -1), given["sorted_token_ids"]
    listed = torch.full((len(pairs), 2 * INNER), torch.nan, dtype=torch.bfloat16)
    run(invoke_fused_moe_kernel, **given | {"C": listed}, c_sorted=True)
    there = pairs < PAIRS
    assert torch.equal(listed[there], by_pair[pairs[there].long()])
    assert bool(listed[~there].isnan().all())
    second, _, real = arguments("none", B=torch.randn(EXPERTS, 32, 2 * INNER, generator=generator(2)).bfloat16())
    real = second["B"].double()
    rows = second | {"A": by_pair, "top_k": 1, "C": torch.empty(PAIRS, 32, dtype=torch.bfloat16)}
    run(invoke_fused_moe_kernel, **rows)
    check(rows["C"], expected(rows, real, "none"), "none")
    other = torch.empty_like(rows["C"])
    listed[~there] = 0
    run(invoke_fused_moe_kernel, **rows | {"A": listed, "C": other}, a_use_tma=True)
    assert torch.equal(other, rows["C"])


@pytest.mark.parametrize("filtered", [True, False])
def test_blocks_of_no_expert(filtered: bool, run: Any) -> None:
    """Zeros whatever the flag; where C is sorted, as they were."""
    given, _, real = arguments("none")
    given["expert_ids"][1] = -1
    dropped = given["sorted_token_ids"][BLOCK : 2 * BLOCK]
    dropped = dropped[dropped < PAIRS].long()
    run(invoke_fused_moe_kernel, **given, filter_expert=filtered)
    found, wanted = given["C"].view(PAIRS, -1), expected(given, real, "none")
    rest = torch.ones(PAIRS, dtype=torch.bool)
    rest[dropped] = False
    check(found[rest], wanted[rest], "none")
    assert len(dropped)
    assert bool((found[dropped] == 0).all())
    listed = torch.full((len(given["sorted_token_ids"]), 2 * INNER), torch.nan, dtype=torch.bfloat16)
    run(invoke_fused_moe_kernel, **given | {"C": listed}, c_sorted=True, filter_expert=filtered)
    assert bool(listed[BLOCK : 2 * BLOCK].isnan().all())


def test_pairs_of_no_expert() -> None:
    """Those of `moe_align_block_size` become zeros; left out by it, they stay as they were."""
    given, _, real = arguments("none")
    given["topk_ids"][2], given["topk_ids"][5, 1] = -1, EXPERTS + 3
    none = (given["topk_ids"].flatten() < 0) | (given["topk_ids"].flatten() >= EXPERTS)
    names = "sorted_token_ids", "expert_ids", "num_tokens_post_padded"
    for ignored, more in ((False, {"return_inactive_prefix_count": True}), (True, {})):
        lists = dict(zip(names, moe_align_block_size(given["topk_ids"], BLOCK, EXPERTS, ignored, **more), strict=True))
        c = torch.full((PAIRS, 2 * INNER), torch.nan, dtype=torch.bfloat16)
        invoke_fused_moe_kernel(**given | lists | {"C": c})
        wanted = expected(given | {"topk_ids": given["topk_ids"].clamp(0, EXPERTS - 1)}, real, "none")
        check(c[~none], wanted[~none], "none")
        assert bool(c[none].isnan().all() if ignored else (c[none] == 0).all())


@pytest.mark.parametrize("listed", [False, True], ids=["by pair", "sorted"])
def test_swiglu_behind_the_gemm(listed: bool) -> None:
    """Columns in turns become half as many; rows of no pair and of no expert stay as they were."""
    given, _, real = arguments("none")
    given["expert_ids"][1] = -1
    wanted = activated(expected(given, real, "none"), fuse_swiglu_interleaved=True)
    pairs, there = given["sorted_token_ids"].long(), given["sorted_token_ids"] < PAIRS
    there[BLOCK : 2 * BLOCK] = False
    there[int(given["num_tokens_post_padded"]) :] = False
    rows = len(pairs) if listed else PAIRS
    c = torch.full((rows, INNER), torch.nan, dtype=torch.bfloat16)
    invoke_fused_moe_kernel(**given | {"C": c}, fuse_swiglu=True, c_sorted=listed)
    target = torch.arange(rows)[there] if listed else pairs[there]
    check(c[target], wanted[pairs[there]], "none")
    rest = torch.ones(rows, dtype=torch.bool)
    rest[target] = False
    assert bool(c[rest].isnan().all())
    with pytest.raises(ValueError, match=r"C is \(60, 192\)"):
        invoke_fused_moe_kernel(**given | {"C": c.new_empty(PAIRS, 2 * INNER)}, fuse_swiglu=True)


def test_sums_behind_the_gemm() -> None:
    """Rows of a token are added to what C has."""
    given, _, real = arguments("none", mul_routed_weight=True)
    before = torch.randn(TOKENS, 2 * INNER, generator=generator(3))
    wanted = before.double() + expected(given, real, "none").view(TOKENS, TOPK, -1).sum(1)
    c = before.bfloat16()
    invoke_fused_moe_kernel(**given | {"C": c}, fuse_sum_all_reduce=True, router_topk=TOPK)
    assert float(worst_row_error(c, wanted)) < LIMITS[torch.bfloat16]


def test_blocks_in_any_order() -> None:
    """What counts are the lists, not `topk_ids`; an expert may have blocks in several places."""
    given, _, real = arguments("none")
    flipped = given["sorted_token_ids"][: int(given["num_tokens_post_padded"])].view(-1, BLOCK).flip(0)
    given["sorted_token_ids"][: flipped.numel()] = flipped.flatten()
    given["expert_ids"][: len(flipped)] = given["expert_ids"][: len(flipped)].flip(0)
    changed = given | {"topk_ids": torch.zeros_like(given["topk_ids"])}
    invoke_fused_moe_kernel(**changed)
    check(given["C"], expected(given, real, "none"), "none")


def test_gaps_in_c() -> None:
    given, _, real = arguments("none")
    wide = torch.full((TOKENS, TOPK, 3 * INNER), torch.nan, dtype=torch.bfloat16)
    invoke_fused_moe_kernel(**given | {"C": wide[..., : 2 * INNER]})
    check(wide[..., : 2 * INNER].reshape(PAIRS, -1), expected(given, real, "none"), "none")
    assert bool(wide[..., 2 * INNER :].isnan().all())


BAD: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "type": ("none", {"compute_type": "fp16"}, ("compute_type is fp16", "bfloat16")),
    "C": ("none", {"C": torch.zeros(60, 191, dtype=torch.bfloat16)}, ("C is (60, 191)", "192")),
    "few C": ("none", {"C": torch.zeros(59, 192, dtype=torch.bfloat16)}, ("C has 59 rows", "60")),
    "A": ("none", {"A": torch.zeros(19, 64, dtype=torch.bfloat16)}, ("A has 19 rows", "20 needed", "top_k 3")),
    "A dtype": ("none", {"A": torch.zeros(20, 64)}, ("B is", "float32 needed")),
    "top_k": ("none", {"top_k": 0}, ("top_k (0)",)),
    "scale": ("fp8_channel", {"B_scale": torch.ones(6, 5)}, ("B_scale is (6, 5)", "(6, 192)")),
    "no scale": ("fp8_tensor", {"B_scale": None}, ("B_scale is missing",)),
    "zero": ("none", {"B_zp": torch.ones(6)}, ("B_zp is given",)),
    "static": ("fp8_tensor", {"A_scale": torch.ones(2)}, ("A_scale is (2,)",)),
    "blocks": ("none", {"expert_ids": torch.zeros(2, dtype=torch.int32)}, ("expert_ids has 2 blocks of 16",)),
    "key": ("none", {"config": {"BLOCK_SIZE_M": 16}}, ("BLOCK_SIZE_N (None)", "from 16 to 256")),
    "value": ("none", {"config": CONFIG | {"BLOCK_SIZE_K": 48}}, ("BLOCK_SIZE_K (48)", "a power of two")),
    "unknown": ("none", {"config": CONFIG | {"SPLIT_K": 1}}, ("unknown key SPLIT_K",)),
    "text": ("none", {"config": CONFIG | {"num_warps": "4"}}, ("num_warps ('4')",)),
    "add": ("none", {"fuse_add_to_output": True}, ("fuse_add_to_output is given",)),
    "mask": ("none", {"add_output_mask": torch.ones(20)}, ("add_output_mask is given",)),
    "masked": ("none", {"mask_output": True}, ("mask_output is given",)),
    "base": ("none", {"lora_preserve_base": True}, ("lora_preserve_base is given",)),
    "slices": ("none", {"a_output_slices": 2}, ("a_output_slices is given",)),
    "sum": ("none", {"fuse_sum_all_reduce": True, "router_topk": 7}, ("router_topk 7", "60 pairs")),
    "sorted sum": ("none", {"fuse_sum_all_reduce": True, "c_sorted": True}, ("c_sorted True",)),
    "swiglu": ("none", {"fuse_swiglu": True, "mul_routed_weight": True}, ("fuse_swiglu", "mul_routed_weight")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    form, changes, words = BAD[name]
    given, _, _ = arguments(form, **changes)
    assert_named(words, invoke_fused_moe_kernel, **given)


def test_compiled_into_one_graph() -> None:
    given, _, _ = arguments("fp8_block")

    def call(x: torch.Tensor) -> torch.Tensor:
        c = torch.zeros(PAIRS, 2 * INNER, dtype=torch.bfloat16)
        invoke_fused_moe_kernel(**given | {"A": x * 2, "C": c})
        return c + 1

    assert_compiles(call, given["A"])


# Configs


def test_override() -> None:
    assert get_config() is None
    with override_config(CONFIG):
        assert get_config() == CONFIG
        assert try_get_optimal_moe_config((8, 64, 32), (8, 32, 32), 2, None, 5) == CONFIG
        with override_config(None):
            assert get_config() is None
        with pytest.raises(KeyError), override_config({}):
            raise KeyError
        assert get_config() == CONFIG
    assert get_config() is None


FILE = "E=6,N=96,device_name=cpu.json"


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where SGLang has the file of a shape for another Triton than the installed one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    folder = tmp_path / "configs" / "triton_3_2_0"
    folder.mkdir(parents=True)
    get_moe_configs.cache_clear()
    yield folder / FILE
    get_moe_configs.cache_clear()


def test_files(config_file: Path) -> None:
    table = {"1": CONFIG, "64": CONFIG | {"GROUP_SIZE_M": 4}, "triton_version": "3.2.0"}
    config_file.write_text(json.dumps(table))
    assert get_moe_configs(6, 96, None) == {1: CONFIG, 64: table["64"]}
    assert get_moe_configs(6, 96, "fp8_w8a8") is None
    for tokens, wanted in ((1, "1"), (30, "1"), (40, "64"), (9999, "64")):
        assert try_get_optimal_moe_config((6, 192, 64), (6, 64, 96), 2, None, tokens) == table[wanted]
    newer = config_file.parent.parent / "triton_3_10_0"
    newer.mkdir()
    (newer / FILE).write_text(json.dumps({"2": CONFIG}))
    get_moe_configs.cache_clear()
    assert list(get_moe_configs(6, 96, None) or {}) == [2]


def test_files_of_the_second_gemm(config_file: Path) -> None:
    """By channels and of the second GEMM, whose tiles the calls take; BLOCK_SIZE_M is the first one's."""
    shapes = (6, 192, 64), (6, 64, 96), 2, "fp8_w8a8"
    find = lambda tokens, **more: try_get_optimal_moe_config(*shapes, tokens, return_down_config=True, **more)  # noqa: E731
    assert find(5)[1] == (None, None)
    stem = "E=6,N=96,device_name=cpu,dtype=fp8_w8a8,per_channel_quant=True"
    first, second = CONFIG | {"GROUP_SIZE_M": 4}, CONFIG | {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "USE_TMA": True}
    (config_file.parent / f"{stem}.json").write_text(json.dumps({"8": first}))
    get_moe_configs.cache_clear()
    assert find(5, per_channel_quant=True) == (first, (first, BLOCK))  # those of the first without a file
    assert find(5)[1] == (None, None)
    (config_file.parent / f"{stem}_down.json").write_text(json.dumps({"8": second}))
    get_moe_configs.cache_clear()
    assert find(5, per_channel_quant=True) == (first, ({**second, "BLOCK_SIZE_M": BLOCK}, 64))
    with override_config(CONFIG):
        assert find(5, per_channel_quant=True) == (CONFIG, (None, None))
    flags = Flags(use_fp8_w8a8=True, per_channel_quant=True)
    scheme, x = get_scheme("fp8_token"), torch.zeros(5, 64, dtype=torch.bfloat16)
    tiles = found_tiles(flags, torch.empty(6, 64, 96), x, scheme)
    assert (tiles.block_m, tiles.group_m, tiles.first.block_n, tiles.second.block_n) == (BLOCK, 4, 16, 128)
    assert found_tiles(Flags(use_fp8_w8a8=True), torch.empty(6, 64, 96), x, get_scheme("fp8_tensor")) is None


def test_files_of_blocks_and_our_own_folder(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "E=6,N=96,device_name=cpu,dtype=fp8_w8a8,block_shape=[128, 128].json"
    folder = config_file.parent / "ours"
    folder.mkdir()
    (folder / name).write_text(json.dumps({"8": CONFIG}))
    monkeypatch.setenv("EP_MOE_TILES_DIR", str(folder))
    assert get_moe_configs(6, 96, "fp8_w8a8", 128, 128) == {8: CONFIG}
    monkeypatch.setenv("EP_MOE_TILES_DIR", str(folder / name))
    with pytest.raises(ValueError, match="EP_MOE_TILES_DIR"):
        get_moe_configs(7, 96, None)


@pytest.mark.parametrize("text", ["[]", "{", '{"x": {}}', '{"8": 3}', "{}", '{"8": {"BLOCK_SIZE_M": 17}}'])
def test_bad_files(config_file: Path, text: str) -> None:
    config_file.write_text(text)
    with pytest.raises(ValueError, match=f"{FILE}"):
        get_moe_configs(6, 96, None)


@pytest.mark.parametrize("dtype", [None, "float32", "fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16"])
def test_default_configs_fit_the_kernels(dtype: str | None) -> None:
    schemes = {"fp8_w8a8": "fp8_tensor", "int8_w8a8": "int8_token", "int8_w8a16": "int8_w8a16"}
    scheme = get_scheme(schemes.get(dtype or "", "int4_w4a16" if dtype == "int4_w4a16" else "none"))
    sizes = set()
    for tokens in (1, 128, 8192):
        config = get_default_config(tokens, 64, 768, 2048, 8, dtype, False)
        tiles = tiles_of(config, scheme, torch.bfloat16, torch.device("cpu"), gated=True)
        assert (tiles.block_m, tiles.first.block_k) == (config["BLOCK_SIZE_M"], config["BLOCK_SIZE_K"])
        assert 2 * tiles.first.block_n == config["BLOCK_SIZE_N"]
        assert config == try_get_optimal_moe_config((64, 1536, 2048), (64, 2048, 768), 8, dtype, tokens)
        sizes.add(config["BLOCK_SIZE_M"])
    assert len(sizes) > 1
    assert get_default_config(8, 64, 768, 2048, 8, dtype, True) == get_default_config(8, 64, 768, 2048, 8, dtype, False)


def test_blocks_limit_a_config() -> None:
    config = get_default_config(64, 8, 768, 2048, 2, "fp8_w8a8", False, [64, 32])
    assert config["BLOCK_SIZE_K"] == 32
    scheme = get_scheme("fp8_block_64x32")
    tiles = tiles_of(CONFIG | {"BLOCK_SIZE_K": 128}, scheme, torch.bfloat16, torch.device("cpu"), gated=True)
    assert (tiles.first.block_k, tiles.second.block_k) == (32, 32)
    assert (tiles.first.block_n, tiles.second.block_n) == (16, 32)


def test_experts_in_torch_have_no_tiles() -> None:
    given, weights, _ = arguments("none")
    w2 = torch.randn(EXPERTS, HIDDEN, INNER).bfloat16()
    call = (given["A"], given["B"], w2, weights, given["topk_ids"])
    plain = outplace_fused_experts(*call)
    with override_config(CONFIG):
        assert torch.equal(outplace_fused_experts(*call), plain)
    for bad, words in ((1, r"BLOCK_SIZE_M \(1\)"), ([64], r"BLOCK_SIZE_M \(\[64\]\)")):
        with override_config(CONFIG | {"BLOCK_SIZE_M": bad}), pytest.raises(ValueError, match=words):
            outplace_fused_experts(*call)
