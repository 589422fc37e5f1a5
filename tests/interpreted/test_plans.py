"""Other libraries' calls, repeated as one sequence of launches, against the same calls in torch; in the interpreter."""

import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import fp4_oracle

from ep_moe.functional import plans
from ep_moe.functional.flashinfer import b12x_fused_moe
from ep_moe.functional.sglang import (
    experts,
    gemm,
    inplace_fused_experts,
    invoke_fused_moe_kernel,
    moe_align_block_size,
    outplace_fused_experts,
    override_config,
    pairs,
    routing_from_topk,
    triton_kernel_fused_experts,
    triton_kernel_fused_experts_with_bias,
)
from ep_moe.functional.vllm import BatchedTritonExperts, invoke_moe_batched_triton_kernel
from ep_moe.functional.vllm import gemm as batched_gemm
from ep_moe.testing import ROW_ERROR_LIMITS, worst_row_error
from interpreted.common import DEVICE, generator, use_kernels

pytestmark = pytest.mark.skipif(torch.device(DEVICE).type != "cpu", reason="memory is read by its address on a CPU")
EXPERTS, TOPK, HIDDEN, INNER, BLOCK = 4, 2, 64, 96, 16
CONFIG = {"BLOCK_SIZE_M": BLOCK, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1, "num_stages": 2}
Given = dict[str, Any]


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """A function that makes later calls use kernels."""

    def switch() -> None:
        use_kernels(monkeypatch)
        for module in (gemm, batched_gemm, pairs):
            monkeypatch.setattr(module, "by_kernels", lambda *_: True)

    plans.plan_cache.cache_clear()
    yield switch
    plans.plan_cache.cache_clear()


def matrices(seed: str) -> tuple[torch.Tensor, torch.Tensor]:
    random = generator(seed)
    w1 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random) / 8
    return w1.bfloat16(), (torch.randn(EXPERTS, HIDDEN, INNER, generator=random) / 8).bfloat16()


def fp8(seed: str) -> Given:
    random, (w1, w2) = generator(f"{seed} scales"), matrices(seed)
    given = {"w1": (8 * w1.float()).to(torch.float8_e4m3fn), "w2": (8 * w2.float()).to(torch.float8_e4m3fn)}
    return given | {f"w{n}_scale": torch.rand(EXPERTS, generator=random) / 8 + 0.1 for n in (1, 2)}


def routed(seed: str, tokens: int) -> Given:
    random = generator(seed)
    return {
        "hidden_states": torch.randn(tokens, HIDDEN, generator=random).bfloat16(),
        "topk_ids": torch.randint(-1, EXPERTS, (tokens, TOPK), generator=random).int(),
        "topk_weights": torch.rand(tokens, TOPK, generator=random) + 0.1,
    }


@dataclasses.dataclass
class Call:
    """A call, its weights by a seed, and its other arguments by a seed and a number of tokens."""

    weights: Callable[[str], Given]
    inputs: Callable[[str, int], Given]
    run: Callable[[Given], torch.Tensor]
    written: str = "w2"  # a weight that is written in place
    many: int = 9  # tokens
    sequences: int = 1  # of a call
    launches: int = 5  # of a sequence, or more
    limit: str = "bfloat16"  # of errors


def plain(seed: str) -> Given:
    return dict(zip(("w1", "w2"), matrices(seed), strict=True))


def scaled(seed: str) -> Given:
    return plain(seed) | {"routed_scaling_factor": 2.5, "b2": torch.randn(EXPERTS, HIDDEN, generator=generator(seed))}


def in_turns(seed: str) -> Given:
    """Rows of w1 alternate, gate first."""
    b1 = torch.randn(EXPERTS, 2 * INNER, generator=generator(seed))
    return plain(seed) | {"b1": b1, "gemm1_alpha": 1.702, "gemm1_limit": 3.0}


def integers(seed: str) -> Given:
    """4 bits in groups of 32 around zero points, those of two rows in a byte."""
    random, given = generator(f"{seed} integers"), dict[str, Any]()
    for n, (rows, columns) in ((1, (2 * INNER, HIDDEN)), (2, (HIDDEN, INNER))):
        given[f"w{n}"] = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=random, dtype=torch.uint8)
        given[f"w{n}_scale"] = torch.rand(EXPERTS, rows, columns // 32, generator=random) / 50 + 0.01
        zeros = torch.randint(0, 256, (EXPERTS, rows // 2, columns // 32), generator=random, dtype=torch.uint8)
        given[f"w{n}_zp"] = zeros
    return given | {"use_int4_w4a16": True, "block_shape": [0, 32]}


def overridden(given: Given) -> torch.Tensor:
    """Tiles of two overrides and of none."""
    with override_config(CONFIG):
        first = outplace_fused_experts(**given)
    with override_config(CONFIG | {"BLOCK_SIZE_M": 32}):
        second = outplace_fused_experts(**given)
    return torch.cat([first, second, outplace_fused_experts(**given)])


def own_rows(given: Given) -> torch.Tensor:
    """Every expert's own row, weighted."""
    keep = {"no_combine": True, "no_combine_keep_router_weight": True}
    return outplace_fused_experts(**given, **keep).flatten(0, 1)


def rows_apart(given: Given) -> torch.Tensor:
    """Every expert's own row, tokens weighted or not; and their sum."""
    weighted = outplace_fused_experts(**given, no_combine=True, apply_router_weight_on_input=True)
    total = outplace_fused_experts(**given, apply_router_weight_on_input=True, routed_scaling_factor=0.5)
    return torch.cat([own_rows(given), weighted.flatten(0, 1), total])


def one_expert(given: Given) -> torch.Tensor:
    """Weights on the input of tokens with one expert, in place."""
    x = given["hidden_states"].clone()
    first = {name: given[name][:, :1] for name in ("topk_ids", "topk_weights")}
    inplace_fused_experts(**given | first | {"hidden_states": x}, apply_router_weight_on_input=True)
    return x


def static(seed: str) -> Given:
    return fp8(seed) | {"use_fp8_w8a8": True, "a1_scale": torch.tensor([0.01]), "a2_scale": torch.tensor([0.02])}


def in_place(given: Given) -> torch.Tensor:
    x = given["hidden_states"].clone()
    inplace_fused_experts(**given | {"hidden_states": x})
    return x


def nvfp4(seed: str) -> Given:
    random = generator(seed)
    layer = fp4_oracle.random_layer("nvfp4", True, EXPERTS, HIDDEN, INNER, random)
    given = {"w1_weight": layer.w1, "w1_weight_sf": layer.w1_scale, "w2_weight": layer.w2, "quant_mode": "nvfp4"}
    given |= {"w2_weight_sf": layer.w2_scale, "num_experts": EXPERTS, "top_k": TOPK}
    given |= {f"w{n}_alpha": torch.rand(EXPERTS, generator=random) + 0.5 for n in (1, 2)}
    return given | {"fc2_input_scale": torch.tensor([0.5])}


def b12x_inputs(seed: str, tokens: int) -> Given:
    given = routed(seed, tokens)
    return {
        "x": given["hidden_states"],
        "token_selected_experts": given["topk_ids"],
        "token_final_scales": given["topk_weights"],
    }


def turned(seed: str) -> Given:
    return {name: w.transpose(1, 2) for name, w in plain(seed).items()}


def by_expert(seed: str, tokens: int) -> Given:
    given = routed(seed, tokens)
    routing = routing_from_topk(given["topk_weights"], given["topk_ids"], EXPERTS)
    return {"hidden_states": given["hidden_states"], **routing._asdict()}


def in_order(given: Given) -> torch.Tensor:
    """Rows in the order of experts, of tokens that are weighted."""
    return triton_kernel_fused_experts(**given | {"scatter_indx": None}, apply_router_weight_on_input=True)


def turned_mxfp4(seed: str) -> Given:
    """Rows of gate and up in turns, transposed views of ours, and biases."""
    random = generator(f"{seed} mxfp4")
    layer = fp4_oracle.random_layer("mxfp4", True, EXPERTS, HIDDEN, INNER, random)
    given = {"w1": layer.w1, "w1_scale": layer.w1_scale, "w2": layer.w2, "w2_scale": layer.w2_scale}
    given = {name: tensor.view(torch.uint8).transpose(1, 2) for name, tensor in given.items()}
    widths = {"b1": 2 * INNER, "b2": HIDDEN}
    return given | {name: torch.randn(EXPERTS, n, generator=random) for name, n in widths.items()}


def by_expert_with_bias(given: Given) -> torch.Tensor:
    scales = {f"w{n}_pcg": SimpleNamespace(b_mx_scale=given[f"w{n}_scale"]) for n in (1, 2)}
    rest = {name: given[name] for name in given if not name.endswith("_scale")}
    return triton_kernel_fused_experts_with_bias(**rest, **scales, gemm1_alpha=1.702, gemm1_clamp_limit=3.0)


def one_gemm(form: str) -> Callable[[str], Given]:
    def make(seed: str) -> Given:
        flags = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant")
        given: Given = dict.fromkeys(flags, False) | {"config": CONFIG, "compute_type": torch.bfloat16, "B_zp": None}
        b = fp8(seed) if form == "fp8" else plain(seed)
        given |= {"B": b["w1"], "B_scale": b.get("w1_scale"), "use_fp8_w8a8": form == "fp8"}
        given |= {"A_scale": torch.tensor([0.02]) if form == "fp8" else None, "mul_routed_weight": form == "fp8"}
        return given | {"bias": torch.randn(EXPERTS, 2 * INNER, generator=generator(seed)) if form == "fp8" else None}

    return make


def one_gemm_of_integers(seed: str) -> Given:
    given, weights = one_gemm("none")(seed), integers(seed)
    weights = {"B": weights["w1"], "B_scale": weights["w1_scale"], "B_zp": weights["w1_zp"]}
    return given | weights | {"use_int4_w4a16": True, "block_shape": [0, 32]}


def sorted_pairs(seed: str, tokens: int) -> Given:
    """Blocks in another order than that of experts; the rows of one block are of no expert."""
    given = routed(seed, tokens)
    pairs, experts, count = moe_align_block_size(given["topk_ids"], BLOCK, EXPERTS)
    blocks = int(count) // BLOCK
    pairs[: int(count)] = pairs[: int(count)].view(blocks, BLOCK).flip(0).reshape(-1)
    experts[:blocks] = experts[:blocks].flip(0)
    experts[0], experts[blocks:], pairs[int(count) :] = -1, 1, 0  # behind the last one that counts lies anything
    lists = {"sorted_token_ids": pairs, "expert_ids": experts, "num_tokens_post_padded": count, "top_k": TOPK}
    return {"A": given["hidden_states"], "topk_ids": given["topk_ids"], "topk_weights": given["topk_weights"], **lists}


def one(given: Given) -> torch.Tensor:
    c = torch.full((*given["topk_ids"].shape, 2 * INNER), torch.nan, dtype=torch.bfloat16)
    invoke_fused_moe_kernel(C=c, **given)
    return c.view(-1, 2 * INNER).float().nan_to_num(77.0)


def rows(seed: str, tokens: int) -> Given:
    random = generator(seed)
    counts = torch.tensor([tokens, 0, 1, 2])
    return {"x": torch.randn(EXPERTS, tokens + 1, HIDDEN, generator=random).bfloat16(), "counts": counts.int()}


def batched(given: Given) -> torch.Tensor:
    x, ids = given["x"], torch.zeros(5, TOPK)
    out = torch.full_like(x, torch.nan)
    none = dict.fromkeys(("expert_map", "w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1q_scale", "a2_scale"))
    none |= dict.fromkeys(("workspace13", "workspace2"))
    more = {"topk_ids": ids, "activation": "silu", "global_num_experts": EXPERTS, **none}
    weights = {"w1": given["w1"], "w2": given["w2"]}
    BatchedTritonExperts(x.shape[1], 1).apply(
        output=out, hidden_states=x, expert_num_tokens=given["counts"], **weights, **more
    )
    return out.view(-1, HIDDEN).float().nan_to_num(77.0)


def batched_integers(given: Given) -> torch.Tensor:
    x, out = given["x"], torch.full_like(given["x"], torch.nan)
    weights = {name: given[name] for name in given if name.startswith("w")}
    more = dict.fromkeys(("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"))
    more |= {"topk_ids": torch.zeros(5, TOPK), "activation": "silu", "global_num_experts": EXPERTS}
    BatchedTritonExperts(x.shape[1], 1, use_int4_w4a16=True, block_shape=[0, 32]).apply(
        output=out, hidden_states=x, expert_num_tokens=given["counts"], **weights, **more
    )
    return out.view(-1, HIDDEN).float().nan_to_num(77.0)


def batched_one(given: Given) -> torch.Tensor:
    x = given["x"]
    c = torch.full((*x.shape[:2], 2 * INNER), torch.nan, dtype=torch.bfloat16)
    rest = (given["counts"], torch.bfloat16, None, None, None, False, False, False, CONFIG, False)
    invoke_moe_batched_triton_kernel(x, given["w1"], c, *rest)
    return c.view(-1, 2 * INNER).float().nan_to_num(77.0)


CALLS = {
    "fused": Call(plain, routed, lambda given: outplace_fused_experts(**given), launches=4),
    "in turns": Call(in_turns, routed, lambda given: outplace_fused_experts(**given), written="w1", launches=4),
    "zero points": Call(integers, routed, lambda given: outplace_fused_experts(**given), written="w2_zp"),
    "rows apart": Call(plain, routed, rows_apart, sequences=3, launches=5),
    "rows apart, static": Call(static, routed, own_rows, launches=5, written="a2_scale", limit="fp8"),
    "one expert": Call(plain, routed, one_expert, launches=5),
    "in place": Call(scaled, routed, in_place, written="b2", launches=4),
    "static": Call(
        *(static, routed, lambda given: outplace_fused_experts(**given)),
        written="a2_scale",
        launches=4,
        limit="fp8",
    ),
    "b12x": Call(nvfp4, b12x_inputs, lambda given: b12x_fused_moe(**given), written="fc2_input_scale", limit="fp8"),
    "by expert, in order": Call(turned, by_expert, in_order, launches=7),
    "by expert in MXFP4": Call(turned_mxfp4, by_expert, by_expert_with_bias, written="b2", launches=7),
    "overridden": Call(plain, routed, overridden, sequences=3, launches=4),
    "one gemm": Call(one_gemm("none"), sorted_pairs, one, written="B", many=34),
    "one gemm fp8": Call(one_gemm("fp8"), sorted_pairs, one, written="B_scale", limit="fp8"),
    "one gemm zero points": Call(one_gemm_of_integers, sorted_pairs, one, written="B_zp", sequences=0),
    "batched": Call(plain, rows, batched, launches=3),
    "batched zero points": Call(integers, rows, batched_integers, written="w2_zp", sequences=0),
    "batched gemm": Call(plain, rows, batched_one, written="w1", launches=2),
}

ALIKE = ("batched zero points", "rows apart, static")  # combinations of what other calls have


def compare(found: torch.Tensor, expected: torch.Tensor, exact: Any = None, limit: str = "bfloat16") -> None:
    idle = (expected == 0).all(1) | (expected == 77).all(1)
    assert torch.equal(found[idle], expected[idle])
    assert float(worst_row_error(found[~idle], expected[~idle])) < ROW_ERROR_LIMITS[limit]
    assert exact is None or torch.equal(found, exact)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.matrix if name in ALIKE else ()) for name in CALLS]
)
def test_later_calls(name: str, repeats: list[int], by_kernels: Callable[[], None]) -> None:
    """Kinds take turns: other tokens, numbers of tokens and weights; weights are written, moved and freed."""
    call = CALLS[name]
    check = functools.partial(compare, limit=call.limit)
    mine, other = call.weights("mine"), call.weights("other")
    few, more = call.inputs("few", 5), call.inputs("more", 5)
    many = call.inputs("many", call.many)
    kinds = [mine | few, mine | more, other | few, mine | many]
    expected = [call.run(given) for given in kinds]
    floats = mine[call.written].dtype.is_floating_point and mine[call.written].dtype.itemsize > 1
    scale = 2.0 if floats else 3 if mine[call.written].dtype == torch.uint8 else 1
    before = mine[call.written].clone()
    mine[call.written].mul_(scale)
    expected.append(call.run(mine | more))
    mine[call.written].copy_(before)
    by_kernels()
    del repeats[:]
    first = [call.run(given) for given in kinds]
    for found, wanted in zip(first, expected, strict=False):
        check(found, wanted)
    start = len(repeats)
    for place in (1, 0, 2, 3):
        check(call.run(kinds[place]), expected[place], first[place])
    whole = [number for number in repeats[start:] if number >= call.launches]  # and not the first part of a call
    assert len(whole) == 4 * call.sequences
    assert call.sequences == 0 or len(repeats) == start + len(whole)
    mine[call.written].mul_(scale)
    check(call.run(mine | more), expected[4])
    moved = mine[call.written]
    moved.data, kept = before.clone(), moved.data  # other memory, by the same tensor
    check(call.run(mine | more), expected[1], first[1])
    moved.data = kept
    freed = [weakref.ref(tensor) for tensor in mine.values() if isinstance(tensor, torch.Tensor)]
    del kinds, mine, moved, kept
    gc.collect()
    assert [tensor() for tensor in freed if tensor() is not None] == []


def test_other_arguments_are_other_calls(repeats: list[int], by_kernels: Callable[[], None]) -> None:
    """Flags, strides and dtypes are part of a kind, and bad arguments are refused as in a first call."""
    by_kernels()
    given = plain("flags") | routed("flags", 5)
    plain_result = outplace_fused_experts(**given)
    assert torch.equal(outplace_fused_experts(**given), plain_result)
    wide = torch.full((5, 2 * HIDDEN), torch.nan, dtype=torch.bfloat16)
    wide[:, ::2] = given["hidden_states"]
    for changes, factor in (
        ({"routed_scaling_factor": 2.0}, 2.0),
        ({"topk_ids": given["topk_ids"].long()}, 1.0),
        ({"hidden_states": wide[:, ::2]}, 1.0),
        ({"topk_weights": given["topk_weights"].double()}, 1.0),
    ):
        for _ in range(2):
            assert torch.equal(outplace_fused_experts(**given | changes), factor * plain_result)
    for changes, words in (
        ({"w1_scale": torch.ones(EXPERTS)}, "w1_scale is given"),
        ({"use_int4_w4a16": True}, "w1_scale is missing"),
        ({"topk_weights": given["topk_weights"][:4]}, r"topk_weights \(4, 2\)"),
        ({"hidden_states": given["hidden_states"].double()}, "float64"),
        ({"activation": "tanh"}, "tanh"),
    ):
        with pytest.raises(ValueError, match=words):
            outplace_fused_experts(**given | changes)
    with override_config(CONFIG):
        compare(outplace_fused_experts(**given), plain_result)
    transposed = given["w2"]
    expected = plain_result.clone()
    given["w2"] = transposed.transpose(1, 2).contiguous().transpose(1, 2)  # the same numbers in other strides
    assert torch.equal(outplace_fused_experts(**given), expected)
    given["w2"].data = transposed.data
    assert torch.equal(outplace_fused_experts(**given), expected)
    square = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator("square")).bfloat16() / 8
    given |= {"w1": torch.cat([square, square.flip(0)], 1), "w2": square}
    first = outplace_fused_experts(**given)
    square.data = square.data.transpose(1, 2)  # the same memory in other strides
    second = outplace_fused_experts(**given)
    assert torch.equal(second, outplace_fused_experts(**given | {"w2": square.contiguous()}))
    assert not torch.equal(second, first)


def kept_of(operator: str) -> list[Any]:
    """The keys of the plans and weights that calls of an operator have kept."""
    return [key for key in plans.plan_cache(threading.get_ident())._entries if operator in key[:2]]


def test_weights_in_the_place_of_others(repeats: list[int], by_kernels: Callable[[], None]) -> None:
    """Tensors that get the memory, and maybe the ids, of tensors that were freed."""
    inputs, seeds, memory = routed("places", 5), ("one", "two", "one"), plain("memory")
    expected = [outplace_fused_experts(**plain(seed) | inputs) for seed in seeds]
    by_kernels()
    for seed, wanted in zip(seeds, expected, strict=True):
        weights = {name: memory[name].copy_(tensor).detach() for name, tensor in plain(seed).items()}
        for _ in range(2):
            compare(outplace_fused_experts(**weights | inputs), wanted)
        del weights
        assert kept_of("outplace_fused_experts") == []


def test_no_pairs(by_kernels: Callable[[], None]) -> None:
    given = one_gemm("none")("nothing") | sorted_pairs("nothing", 5)
    given |= {name: given[name][:0] for name in ("topk_ids", "topk_weights")}
    c = torch.full((10, 2 * INNER), 7.0, dtype=torch.bfloat16)
    by_kernels()
    for _ in range(2):
        invoke_fused_moe_kernel(C=c, **given)
        assert bool((c == 7).all())


KEPT_AS = {
    "static": "outplace_fused_experts",
    "zero points": "outplace_fused_experts",
    "one gemm": "invoke_fused_moe_kernel",
    "batched": "batched_experts",
}


@pytest.mark.parametrize("name", KEPT_AS)
def test_captured_calls_keep_nothing(
    name: str, repeats: list[int], by_kernels: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph's memory is in no plan and no table, and a graph writes no memory of a plan."""
    call, tables = CALLS[name], plans._tables()
    given = call.weights("captured") | call.inputs("captured", 5)
    by_kernels()
    kept = call.run(given)
    copied: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *_: copied.append(self) or self)
    for module in (plans, experts):
        monkeypatch.setattr(module, "capturing", lambda device: True)
    monkeypatch.setattr(plans, "_tables", dict)
    assert torch.equal(call.run(given), kept)  # by the plan, or as a first call
    plans.plan_cache.cache_clear()
    known = dict(tables)
    for _ in range(2):
        assert torch.equal(call.run(given), kept)
    assert kept_of(KEPT_AS[name]) == []
    assert (tables, copied) == (known, [])
