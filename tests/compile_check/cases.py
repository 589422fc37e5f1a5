"""The cases of ep_moe: its launchers with tensors of real sizes and arbitrary values.

Experts and formats get tensors without memory. Launchers that move rows compare addresses, so they get real memory.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import triton

from compile_check.case import CUDA_TARGETS, Case, Rule, Target
from compile_check.exchange_cases import exchange_cases
from compile_check.exchange_order import RULES as RULES_OF_ORDER  # noqa: F401 - read by the command
from ep_moe.config import ActivationConfig, ActivationKind, Layout, RoutingConfig, RoutingMethod
from ep_moe.experts.grouped_gemm import CallShape
from ep_moe.experts.hopper.gemms import HopperGemms
from ep_moe.experts.kernels import KernelExperts
from ep_moe.experts.triton import TritonGemms
from ep_moe.kernel_launch.sequence import LaunchSequence
from ep_moe.kernels.gemm.arguments import TileList
from ep_moe.layout import Batched, Compact, ExpertBatch, TokenRows
from ep_moe.layout.base import PackingSizes
from ep_moe.layout.triton import merge_repeats, pack, weighted_sum
from ep_moe.local_moe.listed_pairs import ragged_pairs, sorted_pairs
from ep_moe.local_moe.pair_lists import PairLists
from ep_moe.local_moe.pair_rows import pair_rows
from ep_moe.local_moe.routed import RoutedPacking
from ep_moe.local_moe.row_gemm import RowLists, gemm_rows
from ep_moe.local_moe.start import start_of
from ep_moe.placement import Placement
from ep_moe.quant import Quantized, QuantScheme, StoredMatrix, get_scheme
from ep_moe.quant.triton import quantize
from ep_moe.routing import Routing
from ep_moe.routing.base import Options
from ep_moe.routing.positions import PositionTable
from ep_moe.routing.triton import route, to_physical
from ep_moe.transport.collective.launchers import plan_send, read_messages, write_message, write_rows
from ep_moe.transport.collective.messages import head_rows, new_kept
from ep_moe.transport.headers import HEADER_WORDS
from ep_moe.transport.layer_tag import LayerTag
from ep_moe.transport.payload import RowFormat
from ep_moe.weights import ExpertWeights, PerExpert

SILU = ActivationConfig()
KINDS = tuple(ActivationKind[name] for name in ("GELU", "RELU2", "IDENTITY", "SWIGLU", "SITU"))  # beside silu
GPT_OSS: dict[str, Any] = {
    "experts": 16,
    "hidden": 2880,
    "intermediate": 2880,
    "activation": ActivationConfig(kind=ActivationKind.SWIGLU, alpha=1.702, beta=1.0, limit=7.0),
    "bias": True,
}
MIXTRAL: dict[str, Any] = {"experts": 1, "hidden": 4096, "intermediate": 14336}  # Triton specializes the size 1
Excuses = Mapping[tuple[str, Rule], str]
GEMMS = ("_first_gemm_kernel", "_second_gemm_kernel")


def _excuse(rule: Rule, reason: str, *kernels: str) -> dict[tuple[str, Rule], str]:
    return dict.fromkeys([(kernel, rule) for kernel in kernels], reason)


STEPS_OF_16 = _excuse(
    "tensor_core", "groups of 48 columns are summed 16 at a time, and the shortest fp8 product sums 32", *GEMMS
)
BYTES_APART = _excuse(
    "narrow",
    "the scales of a row are of one byte, and lie as far apart as there are rows",
    "_write_rows_kernel",
    "_pack_rows_kernel",
)
FEW_BYTES = "scales are a byte each, and a program has fewer than threads"
BYTE_SCALES = _excuse("narrow", FEW_BYTES, "_quantize_rows_kernel")
BYTE_ROW_SCALES = _excuse("narrow", FEW_BYTES, "_prepare_rows_kernel")
REPLAYED_IDS = _excuse("narrow", "the ids of a token are few, and may lie any number of columns apart", "_route_kernel")
FEW_SCALES = _excuse(
    "narrow",
    "the scales, and zero points, of a row of weights are few in a step over K, and lie as far apart as rows have them",
    *GEMMS,
)
WIDENED = _excuse("tensor_core", "fp8 weights, or scales, are widened to the 16 bits of the tokens", *GEMMS)
FIRST_WIDENED = {(GEMMS[0], "tensor_core"): WIDENED[GEMMS[0], "tensor_core"]}
BETWEEN_TILES = _excuse(
    "spill",
    "up to 47 words of a thread, between tiles: the loop over K, which spills none, needs the registers",
    GEMMS[0],
)
FEW_WORDS = _excuse(
    "spill", "two words of a thread on sm_100, whose tiles are those that were measured on sm_90", GEMMS[0]
)
FEW_WORDS_OF_BOTH = FEW_WORDS | _excuse("spill", "four words of a thread on sm_100, for the same reason", GEMMS[1])
TURNED_WORDS = _excuse("spill", "six words of a thread on sm_100, for which no tile is measured", GEMMS[0])
LISTED_WORDS = _excuse("spill", "eight words of a thread: lists of rows take registers beside those of tiles", GEMMS[0])
WIDE_ROWS = _excuse("spill", "two words of a thread, in tiles of 128 rows", "_requantize_kernel")
DECODED: dict[str, tuple[Excuses, Excuses]] = {  # of few rows and of many
    "int4_w4a16_g128_zp": (FEW_SCALES, {**FEW_SCALES, **BETWEEN_TILES}),
    "mxfp4_w4a16": ({}, BETWEEN_TILES),
    "nvfp4_w4a16": ({}, BETWEEN_TILES),
    "int8_w8a16": ({}, BETWEEN_TILES),
    "int8_w8a16_g128_zp": (FEW_SCALES, {**FEW_SCALES, **BETWEEN_TILES}),
    "fp8_w8a16_block": (WIDENED, WIDENED),
    "mxfp8_w8a16": ({}, FEW_SCALES),
}
NARROW_TOKENS: dict[str, tuple[Excuses, Excuses]] = {  # the same
    "int8_token": ({}, {}),
    "int8_block": (FEW_WORDS, FEW_WORDS_OF_BOTH),
    "mxfp8": ({**BYTE_ROW_SCALES, **FIRST_WIDENED}, {**FEW_SCALES, **BYTE_ROW_SCALES, **FIRST_WIDENED}),
    "mxfp4_w4a8": ({**BYTE_ROW_SCALES, **FIRST_WIDENED}, {**BYTE_ROW_SCALES, **FIRST_WIDENED, **BETWEEN_TILES}),
    "nvfp4": (BYTE_ROW_SCALES, {**BYTE_ROW_SCALES, **BETWEEN_TILES}),
    "int4_w4a8": ({}, {}),
    "int4_w4a8_g128": ({}, {}),
    "int4_w4a8_g32_zp": ({}, BETWEEN_TILES),
}
FEW_OUTSIDE = "up to 16 words of a thread, between tiles: the loop over K needs the registers"
SCALES_INSIDE = "gelu on Triton 3.7.1: 10 instructions of a step; none on 3.6.0, 3.8.0 and 3.9.0"
MORE_OUTSIDE = "20 to 24 words of a thread, between tiles: scales and biases of columns, or gelu and int8 on 3.7.1"
MORE_OF_GROUPS = "43 words of a thread, between tiles: MXFP8 numbers of the intermediate"
DECODED_APART = "scales are few bytes of each row; columns of the intermediate are stored in the order of decoded words"
# device code of some targets, and what needs NVSHMEM's device code: `test_nvshmem.py` compiles it
TARGETS_OF: dict[str, tuple[Target, ...]] = {
    "ep_moe.kernels.hopper": (90,),
    "ep_moe.kernels.device.let_dependents_start": (90,),  # of GEMMs in `hopper`
    "ep_moe.kernels.device.use": (90,),  # after its asynchronous tensor-core instructions
    "ep_moe.kernels.gemm.pairs": CUDA_TARGETS,
    "ep_moe.kernels.exchange.puts": (),
    "ep_moe.kernels.exchange.peers._outbox": (),
    "ep_moe.kernels.exchange.peers._put": (),
}
NO_EXCUSES: Mapping[tuple[str, Rule], str] = MappingProxyType({})


def _empty(*shape: int, dtype: torch.dtype, device: str = "meta") -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=device)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The experts of a rank, by default of DeepSeek-V3 on 8 ranks. own: each has its own `PerExpert`."""

    experts: int = 32
    hidden: int = 7168
    intermediate: int = 2048
    activation: ActivationConfig = SILU
    bias: bool = False
    static: bool = False
    own: bool = False
    alternating: bool = False

    def weights(self, scheme: QuantScheme, dtype: torch.dtype) -> ExpertWeights:
        """Weights without memory."""
        width = 2 * self.intermediate if self.activation.kind.gated else self.intermediate
        shapes = {"w13": (self.experts, width, self.hidden), "w2": (self.experts, self.hidden, self.intermediate)}
        parts: dict[str, Any] = {
            name: StoredMatrix.empty(shape, scheme.weight, dtype, "meta") for name, shape in shapes.items()
        }
        if self.bias:
            parts |= {f"{name}_bias": _empty(*shape[:2], dtype=dtype) for name, shape in shapes.items()}
        if self.static:
            parts["w2_input_scale"] = _empty(self.experts, dtype=torch.float32)
        names = [field.name for field in dataclasses.fields(PerExpert)] if self.own else []
        per_expert = PerExpert(**{name: _empty(self.experts, dtype=torch.float32) for name in names})
        return ExpertWeights(**parts, scheme=scheme, per_expert=per_expert, alternating=self.alternating)

    def batch(
        self, scheme: QuantScheme, dtype: torch.dtype, expected_rows: int, layout: str = "compact"
    ) -> ExpertBatch:
        """A batch of 1024 rows per expert, or in all; the launcher chooses tiles by `expected_rows`."""
        rows, groups = 1024, scheme.payload.num_groups(self.hidden)
        lead = self.experts if layout == "batched" else 1
        x = _empty(lead, rows, scheme.payload.row_values(self.hidden), dtype=scheme.payload.dtype or dtype)
        scale = _empty(lead, groups, rows, dtype=scheme.payload.scale_dtype).transpose(1, 2) if groups else None
        common: dict[str, Any] = {"scheme": scheme, "dtype": dtype, "expected_rows": expected_rows}
        common |= {n: _empty(self.experts, dtype=torch.int32) for n in ("expert_row_start", "expert_num_tokens")}
        if layout == "batched":
            return Batched(x=x, scale=scale, row_index=None, **common)
        row_index = _empty(8 * rows, dtype=torch.int32) if layout == "indexed" else None
        return Compact(x=x[0], scale=None if scale is None else scale[0], row_index=row_index, **common)


def _experts(
    name: str,
    scheme_name: str = "fp8_block",
    *,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "compact",
    expected_rows: int = 8,
    hopper: bool = False,
    excuses: Mapping[tuple[str, Rule], str] = NO_EXCUSES,
    **sizes: Any,
) -> Case:
    """Both GEMMs of one layer and the kernels between them; `sizes` are those of `Layer`."""
    scheme, layer = get_scheme(scheme_name), Layer(**sizes)

    def launch() -> torch.Tensor:
        batch, weights = layer.batch(scheme, dtype, expected_rows, layout), layer.weights(scheme, dtype)
        backend = HopperGemms(least_rows=1, anywhere=True) if hopper else TritonGemms()
        if backend.tiles(CallShape.of(batch, weights, layer.activation)) is None:
            raise ValueError("Hopper's kernels do not take this call")
        return KernelExperts(layer.activation, [backend])(batch, weights)

    return Case(name=name, launch=launch, targets=(90,) if hopper else None, excuses=excuses)


def _expert_cases() -> list[Case]:
    """Rows on both sides of every size at which the launcher changes its tiles, then every format and option.

    CI has 25 minutes in all: of cases with the same tiles only one is compiled.
    """
    cases = []
    for scheme, every in (
        ("fp8_block", (1, 8, 16, 32, 64, 256)),
        ("fp8_token", (8, 64, 256)),
        ("fp8_tensor", (8, 64, 256)),
    ):
        cases += [_experts(f"{scheme}, {rows} rows", scheme, expected_rows=rows) for rows in every]
    for rows in (1, 8, 16, 32, 64, 128, 256):
        cases.append(_experts(f"bf16, {rows} rows", "none", expected_rows=rows))
    for rows in (8, 256):
        size, turned = f"{rows} rows", {"alternating": True, "excuses": TURNED_WORDS if rows == 256 else NO_EXCUSES}
        cases += [
            _experts(f"fp8_tensor static, {size}", "fp8_tensor", static=True, expected_rows=rows),
            _experts(f"fp8_block batched, {size}", layout="batched", expected_rows=rows),
            _experts(f"fp8_block indexed, {size}", layout="indexed", expected_rows=rows),
            _experts(f"fp8_block 32x48, {size}", "fp8_block_32x48", excuses=STEPS_OF_16, expected_rows=rows),
            _experts(f"fp8_block gpt-oss, {size}", **GPT_OSS, expected_rows=rows),
            _experts(f"bf16 gpt-oss, {size}", "none", **GPT_OSS, expected_rows=rows, excuses=FEW_WORDS),
            _experts(f"bf16 gpt-oss in turns, {size}", "none", **GPT_OSS, **turned, expected_rows=rows),
            _experts(f"fp8_block gpt-oss per expert, {size}", **GPT_OSS, own=True, expected_rows=rows),
            _experts(f"bf16 gpt-oss per expert, {size}", "none", **GPT_OSS, own=True, expected_rows=rows),
            _experts(f"bf16 batched, {size}", "none", layout="batched", expected_rows=rows),
            _experts(f"bf16 indexed, {size}", "none", layout="indexed", expected_rows=rows),
            _experts(f"fp8_block Mixtral, {size}", **MIXTRAL, expected_rows=rows),
        ]
    cases += [  # at the sizes that need more registers, or that have the tiles of few rows
        _experts("fp8_block into float16, 8 rows", dtype=torch.float16),
        _experts("fp8_block into float32, 256 rows", dtype=torch.float32, expected_rows=256),
        _experts("fp8_block 64x32, 256 rows", "fp8_block_64x32", expected_rows=256),
        _experts("fp8_block_ue8m0, 256 rows", "fp8_block_ue8m0", expected_rows=256),
        _experts("float16, 256 rows", "none", dtype=torch.float16, expected_rows=256),
        _experts("float32, 8 rows", "none", dtype=torch.float32),
    ]
    for scheme, of_few_and_many in (DECODED | NARROW_TOKENS).items():
        for rows, excuses in zip((8, 256), of_few_and_many, strict=True):
            cases.append(_experts(f"{scheme}, {rows} rows", scheme, expected_rows=rows, excuses=excuses))
    cases.append(_experts("int4_w4a16_g32, 256 rows", "int4_w4a16_g32", expected_rows=256))
    cases.append(_experts("mxfp4_w4a16 in turns, 8 rows", "mxfp4_w4a16", alternating=True))
    for kind in KINDS:
        activation = ActivationConfig(kind=kind)
        cases += [
            _experts(f"bf16 {kind.value}, 8 rows", "none", activation=activation, expected_rows=8),
            _experts(f"fp8_block {kind.value}, 256 rows", activation=activation, expected_rows=256),
        ]
    return cases


def _listed(name: str, scheme_name: str, *, expected_rows: int, excuses: Mapping[tuple[str, Rule], str]) -> Case:
    """One GEMM over lists of rows, with all of its optional tensors."""
    scheme, layer, columns, listed = get_scheme(scheme_name), Layer(), 4096, 8192

    def launch() -> None:
        batch = layer.batch(scheme, torch.bfloat16, expected_rows)
        x = batch.x if batch.scale is None else Quantized(values=batch.x, scale=batch.scale, scheme=scheme)
        dtypes = {"source": torch.int32, "target": torch.int32, "factor": torch.float32, "zeros": torch.bool}
        lists = {name: _empty(listed, dtype=dtype) for name, dtype in dtypes.items()}
        lists |= {name: getattr(batch, name) for name in ("expert_row_start", "expert_num_tokens")}
        gemm_rows(
            x,
            RowLists(**lists, expected_rows=expected_rows),
            StoredMatrix.empty((layer.experts, columns, layer.hidden), scheme.weight, torch.bfloat16, "meta"),
            scheme,
            bias=_empty(layer.experts, columns, dtype=torch.bfloat16),
            out=_empty(listed, columns, dtype=torch.bfloat16),
            kernels=True,
        )

    return Case(name=name, launch=launch, excuses=excuses)


def _listed_cases() -> list[Case]:
    return [
        _listed(f"{name} by lists, {rows} rows", name, expected_rows=rows, excuses=excuses)
        for name, excuses in (
            ("none", NO_EXCUSES),
            ("fp8_block", NO_EXCUSES),
            ("int8_token", NO_EXCUSES),
            ("int4_w4a16_g128", LISTED_WORDS),
        )
        for rows in (8, 256)
    ]


def _hopper_cases() -> list[Case]:
    """What the kernels in Gluon compute: every format, layout and activation."""
    few: dict[tuple[str, Rule], str] = {("_hopper_gemm_kernel", "spill"): FEW_OUTSIDE}
    more: dict[tuple[str, Rule], str] = {("_hopper_gemm_kernel", "many_spills"): MORE_OUTSIDE}
    inside: dict[tuple[str, Rule], str] = {}
    converted: dict[tuple[str, Rule], str] = {}
    if triton.__version__.startswith("3.7."):
        inside, converted = {("_hopper_gemm_kernel", "loop_spill"): SCALES_INSIDE}, more

    def case(name: str, *args: Any, rows: int = 128, **options: Any) -> Case:
        return _experts(f"hopper {name}", *args, expected_rows=rows, hopper=True, **options)

    cases = [
        case("fp8_block, few rows", rows=16),
        case("fp8_block, 32 few rows", rows=32),
        case("bf16, 32 few rows", "none", rows=32),
        case("fp8_block, few rows batched", rows=16, layout="batched"),
        case("fp8_block, few rows indexed", rows=16, layout="indexed"),
        case("fp8_block_ue8m0, few rows gpt-oss", "fp8_block_ue8m0", rows=16, **(GPT_OSS | {"intermediate": 3072})),
        case("fp8_token, few rows", "fp8_token", rows=16),
        case("fp8_tensor static, few rows", "fp8_tensor", rows=16, static=True),
        case("int8_block, few rows", "int8_block", rows=16),
        case("int8_token, few rows", "int8_token", rows=16),
        case("bf16, few rows", "none", rows=16),
        case("bf16 gpt-oss in turns, few rows", "none", rows=16, **GPT_OSS, alternating=True),
        case("fp8_block", excuses=few),
        case("fp8_block batched", layout="batched", excuses=few),
        case("fp8_block indexed", layout="indexed", excuses=few),
        case("fp8_block, one expert", experts=1, excuses=few),
        case("fp8_block, few columns", experts=1, hidden=256, excuses=few),
        case("fp8_token, few columns", "fp8_token", experts=1, hidden=256),
        case("bf16, few columns", "none", experts=1, hidden=256),
        case("fp8_block gpt-oss", **(GPT_OSS | {"intermediate": 3072}), excuses=few),
        case("fp8_tensor static", "fp8_tensor", static=True),
        case("fp8_token gpt-oss", "fp8_token", **GPT_OSS, excuses={**few, **more, **WIDE_ROWS}),
        case("fp8_block_ue8m0", "fp8_block_ue8m0", excuses=few),
        case("int8_block", "int8_block", excuses={**few, **converted}),
        case("int8_token", "int8_token"),
        case("bf16 batched", "none", layout="batched"),
        case("bf16 indexed", "none", layout="indexed"),
        case("bf16 gpt-oss", "none", **GPT_OSS),
        case("bf16 gpt-oss per expert", "none", **GPT_OSS, own=True),
        case("float16", "none", dtype=torch.float16),
        case("bf16 gpt-oss in turns", "none", **GPT_OSS, alternating=True),
        case("fp8_tensor in turns", "fp8_tensor", alternating=True),
    ]
    cases += [case(scheme, scheme) for scheme in ("fp8_token", "fp8_tensor")]
    for kind in KINDS:
        activation = ActivationConfig(kind=kind)
        cases += [
            case(f"bf16 {kind.value}", "none", activation=activation),
            case(
                f"fp8_block {kind.value}",
                activation=activation,
                excuses={**few, **more, **(inside if kind is ActivationKind.GELU else {})},
            ),
        ]
    return cases


def _hopper_decoded_cases() -> list[Case]:
    """Weights that the kernels in Gluon decode: every format, sizes of row tiles, the options of an epilogue."""
    few: Excuses = {("_decoded_gemm_kernel", "spill"): FEW_OUTSIDE}
    more: Excuses = {**few, ("_decoded_gemm_kernel", "many_spills"): MORE_OF_GROUPS}

    def case(name: str, scheme: str, rows: int = 512, excuses: Excuses = NO_EXCUSES, **options: Any) -> Case:
        excuses = {("_decoded_gemm_kernel", "narrow"): DECODED_APART, **excuses}
        return _experts(f"hopper decodes {name}", scheme, expected_rows=rows, hopper=True, excuses=excuses, **options)

    return [
        case("int4_w4a16_g128_zp", "int4_w4a16_g128_zp", excuses=few),
        case("int4_w4a16_g32", "int4_w4a16_g32", excuses=few),
        case("int4_w4a8_g32_zp", "int4_w4a8_g32_zp", excuses=few),
        case("mxfp4_w4a8", "mxfp4_w4a8", excuses=BYTE_ROW_SCALES),
        case("nvfp4", "nvfp4", excuses={**few, **BYTE_ROW_SCALES}),
        case("int8_w8a16", "int8_w8a16"),
        case("mxfp8", "mxfp8", excuses={**more, **BYTE_ROW_SCALES}),
        case("mxfp4_w4a16, 16 rows", "mxfp4_w4a16", 16),
        case("mxfp4_w4a16, 64 rows", "mxfp4_w4a16", 64, few),
        case("gpt-oss in turns, per expert", "mxfp4_w4a16", excuses=few, **GPT_OSS, alternating=True, own=True),
        case("without gate", "int4_w4a16_g128", excuses=few, activation=ActivationConfig(kind=ActivationKind.RELU2)),
        case("float16, batched", "int4_w4a16_g128", excuses=few, dtype=torch.float16, layout="batched"),
    ]


def _quantize_cases() -> list[Case]:
    def case(scheme: str, dtype: torch.dtype, hidden: int, *, static: bool = False) -> Case:
        def launch() -> None:
            scale = _empty(1, dtype=torch.float32) if static else None
            quantize(_empty(128, hidden, dtype=dtype), get_scheme(scheme).payload, scale)

        name = f"quantize {dtype}, {scheme}{' static' if static else ''}, hidden {hidden}"
        excuses = BYTE_SCALES if get_scheme(scheme).payload.family == "micro" else NO_EXCUSES
        return Case(name=name, launch=launch, payload_width_bytes={"_quantize_rows_kernel": 16}, excuses=excuses)

    schemes = ("fp8_block", "fp8_block_64x32", "fp8_block_32x48", "fp8_token", "fp8_tensor")
    schemes += ("fp8_block_ue8m0", "int8_token", "int8_block", "mxfp8", "nvfp4")
    cases = [case(scheme, torch.bfloat16, hidden) for scheme in schemes for hidden in (7168, 2880)]
    cases += [
        case(scheme, dtype, 7168) for scheme in ("fp8_block", "fp8_token") for dtype in (torch.float16, torch.float32)
    ]
    return [*cases, case("fp8_tensor", torch.bfloat16, 7168, static=True)]


def _rows(
    name: str,
    scheme_name: str,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.bfloat16,
    hidden: int = 7168,
    topk: int = 8,
    ranks: int = 8,
    experts: int = 32,
    ids_dtype: torch.dtype = torch.int64,
    shared: bool = False,
    in_graph: bool = False,
    excuses: Mapping[tuple[str, Rule], str] = NO_EXCUSES,
) -> Case:
    """A round from the router's ids to the combined output: 128 tokens per rank, by default of DeepSeek-V3."""
    scheme, num_tokens = get_scheme(scheme_name), 128

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return _empty(*shape, dtype=dtype, device="cpu")

    def launch() -> None:
        row_format = RowFormat.of(scheme, dtype, hidden, topk)
        routing = Routing(
            topk_ids=empty(num_tokens, topk, dtype=ids_dtype),
            topk_weights=empty(num_tokens, topk, dtype=torch.float32),
        )
        owner, header = empty(ranks * experts, dtype=torch.int32), empty(ranks, HEADER_WORDS, dtype=torch.int64)
        plan = plan_send(
            routing.topk_ids,
            owner,
            fingerprint=row_format.fingerprint(num_tokens),
            layer=LayerTag().words,
            header=header,
        )
        x, scale = empty(num_tokens, scheme.payload.row_values(hidden), dtype=scheme.payload.dtype or dtype), None
        if scheme.payload.quantized:
            scale = empty(scheme.payload.num_groups(hidden), num_tokens, dtype=scheme.payload.scale_dtype).t()
        tokens = x if scale is None else Quantized(values=x, scale=scale, scheme=scheme)
        buffer = empty(ranks * num_tokens, row_format.row_bytes, dtype=torch.uint8)
        token_to_row = write_rows(tokens, routing, plan, buffer=buffer)
        if in_graph:
            head = head_rows(row_format)
            messages = empty(ranks, head + num_tokens, row_format.row_bytes, dtype=torch.uint8)
            options = {"fingerprint": 1, "layer": LayerTag().words, "num_physical": ranks * experts}
            write_message(tokens, routing, messages[0], head=head, num_tokens=empty(1, dtype=torch.int32), **options)
            kept, nan_row = new_kept(ranks, torch.device("cpu")), empty(hidden, dtype=dtype)
            for tokens_of_rank in (num_tokens, 16):
                columns = empty(tokens_of_rank, ranks + 1, dtype=torch.int32)
                own = {"rank": 1, "head": head, "own": (experts, 2 * experts), "columns": columns, "owner": owner}
                gathered = messages[:, : head + tokens_of_rank].contiguous()
                ids, weights, place = read_messages(gathered, row_format, kept=kept, nan_row=nan_row, **own)
                values, scale, _ = row_format.read(gathered.view(-1, row_format.row_bytes))
                pack(
                    TokenRows(x=values, scale=scale, local_topk_ids=ids, topk_weights=weights),
                    layout,
                    scheme=scheme,
                    dtype=dtype,
                    num_local_experts=experts,
                    capacity=ranks * (head + tokens_of_rank),
                    alignment=16,
                    place=place,
                )
        values, scale, received = row_format.read(buffer)
        ids, weights = merge_repeats(received.topk_ids, received.topk_weights, first=experts, last=2 * experts)
        packed = pack(
            TokenRows(x=values, scale=scale, local_topk_ids=ids, topk_weights=weights),
            layout,
            scheme=scheme,
            dtype=dtype,
            num_local_experts=experts,
            capacity=ranks * num_tokens,
            alignment=16,
            max_rows=2 * ranks * num_tokens,
        )
        y = empty(packed.batch.x.shape[:-1].numel(), hidden, dtype=dtype)
        weighted_sum(y, packed.token_to_row, weights)
        home = empty(ranks * num_tokens, hidden, dtype=dtype)
        weighted_sum(home, token_to_row, None, shared=empty(num_tokens, hidden, dtype=dtype) if shared else None)

    copying = ("_write_rows_kernel", "_pack_rows_kernel", "_weighted_sum_kernel")
    return Case(name=name, launch=launch, payload_width_bytes=dict.fromkeys(copying, 16), excuses=excuses)


def _packing(
    scheme_name: str, num_tokens: int, layout: Layout, experts: int, topk: int
) -> tuple[RoutedPacking, tuple[torch.Tensor, ...]]:
    """The packing of one rank's tokens for its experts, and its tensors."""
    scheme, dtype, hidden = get_scheme(scheme_name), torch.bfloat16, 7168
    sizes = PackingSizes(
        layout=layout,
        scheme=scheme,
        dtype=dtype,
        first=0,
        num_local_experts=experts,
        capacity=num_tokens,
        static=False,
        expected_rows=4,
    )
    x, weights = (_empty(num_tokens, n, dtype=t, device="cpu") for n, t in ((hidden, dtype), (topk, torch.float32)))
    ids = _empty(num_tokens, topk, dtype=torch.int32, device="cpu")
    return RoutedPacking(x, ids, weights, sizes), (x, ids, weights)


def _routed(scheme_name: str, num_tokens: int, layout: Layout, *, experts: int = 256, topk: int = 8) -> Case:
    """Tokens of one rank packed for its experts, quantized before, and their weighted sum."""

    def launch() -> None:
        packing, tensors = _packing(scheme_name, num_tokens, layout, experts, topk)
        batch = packing.pack(*tensors)
        assert batch is not None
        packing.weighted_sum(_empty(*batch.output_shape, dtype=torch.bfloat16, device="cpu"), batch)

    copying = dict.fromkeys(("_pack_rows_kernel", "_weighted_sum_kernel"), 16)
    apart = {key: why for key, why in BYTES_APART.items() if key[0] == "_pack_rows_kernel"}
    excuses = apart | BYTE_SCALES if get_scheme(scheme_name).payload.family == "micro" else NO_EXCUSES
    name = f"packing {scheme_name}, {num_tokens} tokens, {experts} experts"
    return Case(name=name, launch=launch, payload_width_bytes=copying, excuses=excuses)


def _start(scheme_name: str, num_tokens: int, *, experts: int = 256, topk: int = 8, hopper: bool = False) -> Case:
    """The first launch of a call of one rank's own tokens: lists, quantization, few rows; Hopper's have counters."""

    def launch() -> None:
        packing, tensors = _packing(scheme_name, num_tokens, Layout.COMPACT, experts, topk)
        most, like = num_tokens * topk // 16 + experts, packing.sequence
        start, names = start_of(packing, (most, 16), TileList._fields[: None if hopper else 3])
        pieces = like.pieces | {name: ((most,), torch.int32) for name in names[1] if name is not None}
        whole = LaunchSequence([(start, names)], like.given, pieces, packing.device, aliases=like.aliases)
        whole.run(dict(zip(like.given, packing.inputs(*tensors), strict=True)))

    micro = get_scheme(scheme_name).payload.family == "micro"
    excuses = _excuse("narrow", FEW_BYTES, "_start_call_kernel") if micro else NO_EXCUSES
    name = f"start of a call, {scheme_name}, {num_tokens} tokens, {experts} experts"
    return Case(name=name, launch=launch, excuses=excuses)


def _pairs(num_pairs: int, experts: int) -> Case:
    """Pairs as lists by expert, copied as words of 4 bytes."""

    def launch() -> None:
        given = {"ids": torch.int32, "weights": torch.float32, "numbers": torch.int32}
        lists = PairLists(num_pairs, experts, torch.int32, 1024, torch.device("cpu")).sequence
        shapes = {"numbers": (2, 1024)}
        lists.run({name: _empty(*shapes.get(name, (num_pairs,)), dtype=t, device="cpu") for name, t in given.items()})

    return Case(name=f"pairs as lists, {num_pairs} pairs, {experts} experts", launch=launch)


def _pair_rows(
    num_tokens: int, hidden: int, topk: int, dtype: torch.dtype, ids_dtype: torch.dtype, *, on_input: bool
) -> Case:
    """Each pair as a row of its own."""

    def launch() -> None:
        sizes, strides = (num_tokens, topk, hidden), (hidden, topk, topk)
        rows = pair_rows(*sizes, strides, (dtype, ids_dtype), torch.device("cpu"), on_input=on_input, factor=2.5)
        widths = {"x": (hidden, dtype), "topk_ids": (topk, ids_dtype), "topk_weights": (topk, torch.float32)}
        rows.run({name: _empty(num_tokens, width, dtype=t, device="cpu") for name, (width, t) in widths.items()})

    name = f"rows of pairs, {num_tokens} tokens of {hidden} {str(dtype).removeprefix('torch.')}, top {topk}"
    return Case(name=name, launch=launch)


def _listed_pairs(num_pairs: int, experts: int, *, mapped: bool) -> Case:
    """The expert of each pair, from lists of blocks and from lists without gaps."""

    def launch() -> None:
        device, places = torch.device("cpu"), num_pairs + 16 * experts
        blocks = {"pairs": (places,), "experts": (experts,), "end": (1,)}
        sort = sorted_pairs(num_pairs, places, 16, device)
        sort.run({name: _empty(*shape, dtype=torch.int32, device="cpu") for name, shape in blocks.items()})
        x = _empty(num_pairs, 2048, dtype=torch.bfloat16, device="cpu")
        lists = ragged_pairs(x, num_pairs, experts, placed=mapped, mapped=mapped, on_input=mapped)
        shapes = {"counts": (experts,), "map": (experts,), "x": x.shape}
        dtypes = {"factors": torch.bfloat16, "x": torch.bfloat16}
        named = {n: (shapes.get(n, (num_pairs,)), dtypes.get(n, torch.int32)) for n in lists.given}
        lists.run({n: _empty(*shape, dtype=dtype, device="cpu") for n, (shape, dtype) in named.items()})

    flags = {("_fill_pairs_kernel", "narrow"): "flags of rows are a byte each"}
    flags["_sorted_pairs_kernel", "narrow"] = "the flag of a pair is a byte, and pairs lie apart"
    name = f"pairs from lists, {num_pairs} pairs, {experts} experts"
    return Case(name=name, launch=launch, excuses=flags)


def _row_cases() -> list[Case]:
    cases = [
        _routed("none", 16, Layout.COMPACT),
        _start("none", 256, hopper=True),
        _start("none", 1),
        _start("none", 128),
        _start("fp8_block", 16, hopper=True),
        _start("fp8_block", 128, experts=32, topk=6),
        _start("fp8_token", 16, experts=8),
        _start("nvfp4", 16),
        _start("mxfp8", 64, experts=128, topk=4),
        _routed("fp8_block", 64, Layout.BATCHED, experts=32, topk=6),
        _routed("nvfp4", 1, Layout.COMPACT, experts=8, topk=4),
        _pairs(8, 128),
        _pairs(1000, 256),
        _pair_rows(16, 2048, 8, torch.bfloat16, torch.int32, on_input=True),
        _pair_rows(1, 2880, 4, torch.float16, torch.int64, on_input=True),
        _pair_rows(128, 7168, 6, torch.float32, torch.int64, on_input=False),
        _listed_pairs(8, 128, mapped=False),
        _listed_pairs(1000, 256, mapped=True),
    ]
    for layout in Layout:
        cases += [
            _rows(f"rows fp8_block {layout.value}", "fp8_block", layout, shared=True),
            _rows(f"rows bf16 {layout.value}", "none", layout, ids_dtype=torch.int32),
        ]
    gpt_oss: dict[str, Any] = {"hidden": 2880, "topk": 4, "experts": 16}
    return [
        *cases,
        _rows("rows float32", "none", Layout.COMPACT, dtype=torch.float32, shared=True),
        _rows("rows float16 top 1", "none", Layout.COMPACT, dtype=torch.float16, topk=1, shared=True),
        _rows("rows int8_token", "int8_token", Layout.COMPACT),
        _rows("rows mxfp8", "mxfp8", Layout.BATCHED, excuses=BYTES_APART),
        _rows("rows nvfp4", "nvfp4", Layout.COMPACT, excuses=BYTES_APART),
        _rows("rows mxfp8 gpt-oss", "mxfp8", Layout.COMPACT, **gpt_oss, excuses=BYTES_APART),
        _rows("rows nvfp4 gpt-oss", "nvfp4", Layout.BATCHED, **gpt_oss, excuses=BYTES_APART),
        _rows("rows fp8_token top 6", "fp8_token", Layout.COMPACT, topk=6, in_graph=True),
        _rows("rows bf16 gpt-oss", "none", Layout.FLAT, **gpt_oss, in_graph=True),
        _rows("rows fp8_block gpt-oss", "fp8_block", Layout.BATCHED, **gpt_oss),
        _rows("rows fp8_block of 3 ranks with 5 experts", "fp8_block", Layout.COMPACT, ranks=3, experts=5),
    ]


def _routing(
    name: str,
    num_experts: int,
    method: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    biased: bool = False,
    mapped: bool = False,
    copies: bool = False,
    counted: bool = False,
    replay: bool = False,
    weights_dtype: torch.dtype = torch.float32,
    excuses: Mapping[tuple[str, Rule], str] = NO_EXCUSES,
    **numbers: Any,
) -> Case:
    """The routing of 128 tokens."""

    def launch() -> None:
        placement: Any = Placement.round_robin(num_experts, 8) if mapped else None
        if copies or counted:
            placement = _table(num_experts, copies=copies, counted=counted)
        config = RoutingConfig(method=RoutingMethod(method), **numbers)
        bias = _empty(num_experts, dtype=torch.float32, device="cpu") if biased else None
        replay_out = _empty(128, config.num_topk, dtype=torch.int16, device="cpu") if replay else None
        num_tokens = _empty(1, dtype=torch.int32, device="cpu") if counted else None
        options = Options(config, bias, replay_out, placement, weights_dtype, num_tokens)
        route(_empty(128, num_experts, dtype=dtype, device="cpu"), options)

    return Case(name=f"routing {name}", launch=launch, excuses=excuses)


def _table(num_experts: int, *, copies: bool, counted: bool) -> PositionTable:
    """Of 8 ranks, with two copies of every eighth expert if there are copies."""
    placement = Placement.round_robin(num_experts, 8)
    if copies:
        experts = (*range(num_experts), *range(0, num_experts, 8))
        placement = Placement(experts, tuple(range(0, len(experts) + 1, len(experts) // 8)))
    return PositionTable(placement, 3, counted=counted)


def _routing_cases() -> list[Case]:
    deepseek: dict[str, Any] = {"num_topk": 8, "num_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}
    return [
        _routing("DeepSeek-V3", 256, 2, biased=True, mapped=True, **deepseek),
        _routing("DeepSeek-V3 float32", 256, 2, dtype=torch.float32, biased=True, **deepseek),
        _routing("DeepSeek-V3, copies", 256, 2, biased=True, copies=True, counted=True, **deepseek),
        _routing("Mixtral, counted", 8, 1, counted=True, num_topk=2),
        _routing("Qwen3", 128, 4, weights_dtype=torch.bfloat16, num_topk=8),
        _routing("Default", 64, 0, dtype=torch.float16, weights_dtype=torch.float16, num_topk=8),
        _routing("Mixtral", 8, 1, num_topk=2),
        _routing("DeepSeek-V2", 160, 2, num_topk=6, num_group=8, topk_group=3, group_best=1, scoring="softmax"),
        _routing("SigmoidRenorm of 60", 60, 6, num_topk=4),
        _routing("MiniMax2", 256, 7, biased=True, num_topk=8),
        _routing("Sigmoid of 384", 384, 8, num_topk=8),
        _routing("DeepSeek-V3 of 1024", 1024, 2, dtype=torch.float32, biased=True, **{**deepseek, "num_topk": 22}),
        _routing("TopK of 1024, replay", 1024, 5, num_topk=22, mapped=True, replay=True, excuses=REPLAYED_IDS),
        *(
            Case(name=f"routing ids, {name}", launch=functools.partial(to_physical, ids, placement))
            for name, ids, placement in (
                ("int32 round robin", _empty(128, 8, dtype=torch.int32, device="cpu"), Placement.round_robin(256, 8)),
                ("int64 linear", _empty(128, 8, dtype=torch.int64, device="cpu"), Placement.linear(256, 8)),
                (
                    "int32 copies, counted",
                    _empty(128, 8, dtype=torch.int32, device="cpu"),
                    _table(256, copies=True, counted=True),
                ),
            )
        ),
    ]


def cases() -> list[Case]:
    """All cases."""
    experts = [*_expert_cases(), *_hopper_cases(), *_hopper_decoded_cases(), *_listed_cases()]
    return [*experts, *_quantize_cases(), *_row_cases(), *_routing_cases(), *exchange_cases()]
