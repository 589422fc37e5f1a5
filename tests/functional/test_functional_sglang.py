"""SGLang's fused experts against float64, written from the formats and SGLang's documentation alone.

Cases that take `run` are computed by torch and, marked `gpu`, by kernels: on a GPU, or in Triton's interpreter.
"""

import dataclasses
import inspect
from collections.abc import Callable
from types import SimpleNamespace
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
    expert_rows,
    generator,
    made,
    rounded,
    routed_rows,
)
from helpers.experts_oracle import check as within

from ep_moe.engines.sglang.parameters import activation_of
from ep_moe.functional import sglang
from ep_moe.functional.sglang import (
    MoeRunnerConfig,
    StandardTopKOutput,
    fused_experts,
    fused_experts_impl,
    fused_moe,
    inplace_fused_experts,
    inplace_fused_experts_fake,
    moe_align_block_size,
    outplace_fused_experts,
    outplace_fused_experts_fake,
    override_config,
)
from ep_moe.functional.sglang.experts import activation_config
from ep_moe.testing import worst_row_error

CONFIG = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of `outplace_fused_experts`, and what it should return."""

    arguments: dict[str, Any]
    w1: torch.Tensor
    w2: torch.Tensor
    rows: str
    tokens: str | None = None  # if they are rounded in another way

    def expected(self, **options: Any) -> torch.Tensor:
        """The result by SGLang's arguments, without in-place ones: the sum [T, H], or rows [T, K, H]."""
        given = self.arguments
        static = [
            None if given.get(name) is None else float(given[name].reshape(-1)[0]) for name in ("a1_scale", "a2_scale")
        ]
        on_input, apart = bool(options.get("apply_router_weight_on_input")), options.get("no_combine")

        def expert(number: int, x: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
            biases = tuple(None if given.get(name) is None else given[name][number] for name in ("b1", "b2"))
            matrices = self.w1[number], self.w2[number]
            return expert_rows(x, *matrices, self.rows, static=static[1], biases=biases, factors=factors, **options)

        x = rounded(given["hidden_states"].double(), self.tokens or self.rows, static[0])
        weighted = not apart or bool(options.get("no_combine_keep_router_weight"))
        routed = given["topk_ids"], given["topk_weights"]
        out = routed_rows(x, *routed, expert, EXPERTS, on_input=on_input, weighted=weighted)
        if apart or options.get("defer_sum"):
            return out
        return out.sum(1) * (options.get("routed_scaling_factor") or 1.0)


def make_case(
    name: str, dtype: torch.dtype = torch.bfloat16, biased: bool = False, seed: int = 1, gated: bool = True
) -> Case:
    form, random, width = FORMATS[name], generator(seed), INNER * (2 if gated else 1)
    w1, w2 = made(form, width, HIDDEN, dtype, seed + 1), made(form, HIDDEN, INNER, dtype, seed + 2)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(1)[:, :TOPK].int()
    ids[3, 1], ids[5] = -1, torch.tensor([EXPERTS, -1, EXPERTS + 90])
    arguments: dict[str, Any] = {
        "hidden_states": torch.randn(TOKENS, HIDDEN, generator=random).to(dtype),
        "w1": w1.values,
        "w2": w2.values,
        "topk_weights": torch.rand(TOKENS, TOPK, generator=random) + 0.1,
        "topk_ids": ids,
        "w1_scale": w1.scale,
        "w2_scale": w2.scale,
        "w1_zp": w1.zero,
        "w2_zp": w2.zero,
        **form.flags,
    }
    if biased:
        arguments["b1"] = torch.randn(EXPERTS, width, generator=random).to(dtype)
        arguments["b2"] = torch.randn(EXPERTS, HIDDEN, generator=random).to(dtype)
    short = str(dtype).removeprefix("torch.")
    rows = short if form.rows == "none" else form.rows
    return Case(arguments=arguments, w1=w1.real, w2=w2.real, rows=rows)


def check(found: torch.Tensor, expected: torch.Tensor, case: Case) -> None:
    dtype = case.arguments["hidden_states"].dtype
    assert found.dtype == dtype
    within(found, expected, max(ROUNDED_LIMIT, LIMITS[dtype]) if " " in case.rows else LIMITS[dtype])


@pytest.mark.parametrize("biased", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, biased: bool, run: Any) -> None:
    case = make_case(name, biased=biased)
    check(run(outplace_fused_experts, **case.arguments), case.expected(), case)


def test_a_config_is_of_its_calls_alone(run: Any) -> None:
    """Then a format is computed whose groups are narrower than its tiles."""
    case, other = make_case("fp8_channel"), make_case("fp8_block")
    with override_config(CONFIG):
        check(run(outplace_fused_experts, **case.arguments), case.expected(), case)
    check(run(outplace_fused_experts, **other.arguments), other.expected(), other)


@pytest.mark.parametrize("name", ["none", "int4_groups", "int8_groups_zp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_dtypes(name: str, dtype: torch.dtype, run: Any) -> None:
    case = make_case(name, dtype, biased=True)
    check(run(outplace_fused_experts, **case.arguments), case.expected(), case)


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_channel"])
def test_static_scales(name: str, run: Any) -> None:
    case = make_case(name)
    case.arguments.update(a1_scale=torch.tensor([0.013]), a2_scale=torch.tensor(0.02))
    case = dataclasses.replace(case, rows="fp8 tensor")
    check(run(outplace_fused_experts, **case.arguments), case.expected(), case)


def test_scales_with_trailing_ones(run: Any) -> None:
    case = make_case("fp8_channel")
    expected = run(outplace_fused_experts, **case.arguments)
    flat = {name: case.arguments[name].reshape(EXPERTS, -1) for name in ("w1_scale", "w2_scale")}
    assert torch.equal(run(outplace_fused_experts, **case.arguments | flat), expected)


GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_limit": 0.8}
ACTIVATIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # and formats
    "gelu": ({"activation": "gelu"}, ("none", "fp8_channel", "int4_groups_zp")),
    "in turns": (GPT_OSS, ("none", "fp8_tensor", "fp8_channel", "int8_groups_zp", "int4_alone")),
    "halves": ({**GPT_OSS, "gate_up_interleaved": False}, ("none", "fp8_block", "int4_groups")),
    "limit alone": ({"gemm1_limit": 0.3}, ("none", "fp8_block", "int8_channel")),
    "swiglu_limit": ({"swiglu_limit": 0.5}, ("none", "fp8_block", "int4_groups_zp")),
    "fused in turns": ({"fuse_swiglu_interleaved": True}, ("none", "fp8_channel")),
    "gelu_tanh": ({"activation": "gelu_tanh"}, ("none",)),
    "situ": ({"activation": "situ"}, ("none",)),
    "situ of numbers": ({"activation": "situ", "gemm1_alpha": 0.7, "gemm1_limit": 0.6}, ("none", "fp8_block")),
    "relu2": ({"activation": "relu2", "is_gated": False}, ("none", "fp8_block", "int4_groups_zp")),
    "silu alone": ({"activation": "silu", "is_gated": False}, ("none",)),
    "gelu alone": ({"activation": "gelu", "is_gated": False}, ("fp8_channel",)),
}


@pytest.mark.parametrize(
    ("options", "name"),
    [
        pytest.param(options, name, id=f"{key}-{name}")
        for key, (options, names) in ACTIVATIONS.items()
        for name in names
    ],
)
def test_activations(options: dict[str, Any], name: str, run: Any) -> None:
    case = make_case(name, biased=True, gated=options.get("is_gated", True))
    check(run(outplace_fused_experts, **case.arguments, **options), case.expected(**options), case)


@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize("name", ["none", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("topk", [1, TOPK])
def test_weights_on_the_input(name: str, topk: int, factor: float | None, run: Any) -> None:
    case = make_case(name)
    options = {"apply_router_weight_on_input": True, "routed_scaling_factor": factor}
    if topk == 1:
        case.arguments["topk_ids"][:, 1:] = -1
    expected = case.expected(**options)
    if topk == 1:
        case.arguments.update({key: case.arguments[key][:, :1] for key in ("topk_ids", "topk_weights")})
    found = run(outplace_fused_experts, **case.arguments, **options)
    if name == "none":  # tokens are rounded once more than SGLang's sums
        assert float(worst_row_error(found[:3], expected[:3])) < LIMITS[torch.bfloat16]
    else:
        check(found, expected, case)


APART: dict[str, dict[str, Any]] = {
    "rows": {"no_combine": True},
    "weighted": {"no_combine": True, "no_combine_keep_router_weight": True},
    "deferred": {"defer_sum": True},
    "on input": {"no_combine": True, "apply_router_weight_on_input": True},
}


@pytest.mark.parametrize("options", APART.values(), ids=APART)
@pytest.mark.parametrize("name", ["none", "fp8_block"])
def test_without_the_sum(name: str, options: dict[str, Any], run: Any) -> None:
    """Repeated experts are rows of their own; the factor is the sum's, and weights that are not applied not read."""
    case = make_case(name)
    case.arguments["topk_ids"][0] = 2
    more, expected = {**options, "routed_scaling_factor": 3.0}, case.expected(**options)
    if options == APART["rows"]:
        case.arguments["topk_weights"] = torch.full((TOKENS, TOPK), torch.nan)
    found = run(fused_experts_impl, **case.arguments, **more)
    if options.get("apply_router_weight_on_input"):  # tokens are rounded once more than SGLang's sums
        assert float(worst_row_error(found[:3].flatten(0, 1), expected[:3].flatten(0, 1))) < ROUNDED_LIMIT
        return
    check(found, expected, case)
    alone = {key: case.arguments[key][:, :1] for key in ("topk_ids", "topk_weights")}
    check(run(fused_experts_impl, **case.arguments | alone, **more), expected[:, :1], case)


@pytest.mark.parametrize("options", [{}, {"no_combine": True}, {"apply_router_weight_on_input": True}], ids=str)
def test_tokens_that_are_quantized(options: dict[str, Any], run: Any) -> None:
    """`a1_q` is what is multiplied, whatever hidden_states are; rows of padding are not, scales lie in either order."""
    case, random = make_case("fp8_block"), generator(6)
    codes = torch.randn(TOKENS + 4, HIDDEN, generator=random).mul(20).to(torch.float8_e4m3fn)
    scale = torch.rand(TOKENS + 4, HIDDEN // 16, generator=random) / 20 + 0.01
    codes.view(torch.uint8)[TOKENS:], scale[TOKENS:] = 0x7F, torch.nan
    numbers = codes[:TOKENS].double() * scale[:TOKENS].double().repeat_interleave(16, 1)
    own = dataclasses.replace(case, arguments=case.arguments | {"hidden_states": numbers}, tokens="float32")
    given = case.arguments | {"a1_q": codes, "a1_scale": scale.t().contiguous().t()}
    given["hidden_states"] = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16)
    check(run(outplace_fused_experts, **given, **options), own.expected(**options), case)
    case.arguments["hidden_states"] = given["hidden_states"]
    for changes, words in (
        ({"a1_scale": None}, "a1_q is given, which needs"),
        ({"a1_q": codes[: TOKENS - 1]}, r"a1_q is \(19, 64\)"),
        ({"a1_scale": scale[:, :2]}, r"a1_scale is \(24, 2\)"),
        ({"use_fp8_w8a8": False, "use_int8_w8a8": True}, "a1_q is given, which needs use_fp8_w8a8"),
    ):
        with pytest.raises(ValueError, match=words):
            outplace_fused_experts(**given | changes)


def test_calls_agree() -> None:
    case = make_case("fp8_channel", biased=True)
    given = case.arguments
    expected = outplace_fused_experts(**given, routed_scaling_factor=1.5)
    mine = dict(given, hidden_states=given["hidden_states"].clone())
    assert inplace_fused_experts(**mine, routed_scaling_factor=1.5) is None
    assert torch.equal(mine["hidden_states"], expected)
    assert torch.equal(fused_experts_impl(**given, routed_scaling_factor=1.5), expected)
    mine = dict(given, hidden_states=given["hidden_states"].clone())
    assert fused_experts_impl(**mine, inplace=True, routed_scaling_factor=1.5) is mine["hidden_states"]
    assert torch.equal(mine["hidden_states"], expected)
    rest = {name: value for name, value in given.items() if not name.startswith("topk_") and name != "hidden_states"}
    topk = StandardTopKOutput(given["topk_weights"], given["topk_ids"], None)
    config = MoeRunnerConfig(inplace=False, routed_scaling_factor=1.5)
    for call in (fused_experts, fused_moe):
        assert torch.equal(call(given["hidden_states"], topk_output=topk, moe_runner_config=config, **rest), expected)
    kept = given["hidden_states"].clone()
    assert fused_moe(kept, topk_output=(*topk[:2], None), **rest) is kept  # in place by default
    assert torch.equal(kept, outplace_fused_experts(**given))
    assert outplace_fused_experts_fake(**given).shape == expected.shape
    assert outplace_fused_experts_fake(**given, no_combine=True).shape == (TOKENS, TOPK, HIDDEN)
    assert inplace_fused_experts_fake(**given) is None
    for name in ("inplace_fused_experts", "outplace_fused_experts"):
        real, fake = getattr(sglang, name), getattr(sglang, f"{name}_fake")
        assert inspect.signature(real) == inspect.signature(fake)


FLAGS = (
    "use_fp8_w8a8=False use_int8_w8a8=False use_int8_w8a16=False use_int4_w4a16=False per_channel_quant=False "
    "w1_scale=None w2_scale=None w1_zp=None w2_zp=None a1_scale=None a2_scale=None block_shape=None"
)
TENSORS = "hidden_states w1 w2 topk_weights topk_ids b1=None b2=None"
COMMON = f"activation='silu' is_gated=True apply_router_weight_on_input=False {FLAGS}"
NUMBERS = "routed_scaling_factor=None gemm1_alpha=None gemm1_limit=None filter_expert=True swiglu_limit=None"
LAST = f"{NUMBERS} gate_up_interleaved=True a1_q=None fuse_swiglu_interleaved=False"
KEEP = "no_combine_keep_router_weight=False"
OBJECTS = f"b1=None b2=None {FLAGS}"
SIGNATURES = {  # of all calls, those of the releases are compared by tests/engines/signatures.py
    "inplace_fused_experts": f"{TENSORS} {COMMON} {LAST}",
    "outplace_fused_experts": f"{TENSORS} {COMMON} no_combine=False {LAST} {KEEP}",
    "fused_experts_impl": f"{TENSORS} inplace=False {COMMON} no_combine=False {LAST} defer_sum=False {KEEP}",
    "fused_moe": f"hidden_states w1 w2 topk_output moe_runner_config=MoeRunnerConfig() {OBJECTS}",
    "fused_experts": (
        f"hidden_states w1 w2 topk_output moe_runner_config {OBJECTS} a1_q=None fuse_swiglu_interleaved=False"
    ),
}


def defaulted(parameter: inspect.Parameter) -> str:
    default = "MoeRunnerConfig()" if parameter.default == MoeRunnerConfig() else repr(parameter.default)
    return parameter.name + ("" if parameter.default is inspect.Parameter.empty else f"={default}")


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(sglang, name)).parameters.values()
    assert " ".join(map(defaulted, parameters)) == SIGNATURES[name]


CALLS: dict[str, dict[str, Any]] = {  # arguments and formats whose places matter
    "relu2": {"activation": "relu2", "is_gated": False, "routed_scaling_factor": 1.5},
    "halves": {**GPT_OSS, "gate_up_interleaved": False},
    "swiglu_limit": {"swiglu_limit": 0.5, "apply_router_weight_on_input": True},
    "fused in turns": {"fuse_swiglu_interleaved": True},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_arguments_by_place_and_in_objects(options: dict[str, Any]) -> None:
    """All calls in SGLang's order, and with options in an object, of which an older release has fewer."""
    case = make_case("fp8_channel", gated=options.get("is_gated", True))
    expected = outplace_fused_experts(**case.arguments, **options)
    check(expected, case.expected(**options), case)
    for name in ("outplace_fused_experts", "fused_experts_impl", "inplace_fused_experts"):
        given = {**case.arguments, **options, "hidden_states": case.arguments["hidden_states"].clone()}
        parameters = [word.split("=")[0] for word in SIGNATURES[name].split()]
        defaults = dict(word.split("=") for word in SIGNATURES[name].split() if "=" in word)
        found = getattr(sglang, name)(*(given[p] if p in given else eval(defaults[p]) for p in parameters))
        assert torch.equal(given["hidden_states"] if name == "inplace_fused_experts" else found, expected)
        with pytest.raises(TypeError):
            getattr(sglang, name)(*range(len(parameters) + 1))
    with pytest.raises(TypeError, match="no_combine"):
        inplace_fused_experts(**case.arguments, no_combine=True)
    topk = StandardTopKOutput(case.arguments["topk_weights"], case.arguments["topk_ids"], None)
    named = {"gemm1_clamp_limit" if key == "gemm1_limit" else key: value for key, value in options.items()}
    fused = named.pop("fuse_swiglu_interleaved", False)
    older = SimpleNamespace(
        **{"activation": "silu", "apply_router_weight_on_input": False, "inplace": False, "no_combine": False}
        | {"routed_scaling_factor": None, "gemm1_alpha": None, "gemm1_clamp_limit": None, **named}
    )
    rest = {key: value for key, value in case.arguments.items() if not key.startswith("topk_")}
    for config in (MoeRunnerConfig(inplace=False, **named), older):
        found = fused_experts(**rest, topk_output=topk, moe_runner_config=config, fuse_swiglu_interleaved=fused)
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match=r"gemm1_beta \(2.0\)"):
        fused_experts(**rest, topk_output=topk, moe_runner_config=MoeRunnerConfig(gemm1_beta=2.0))


BAD: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "two flags": ("fp8_tensor", {"use_int8_w8a8": True}, ("use_fp8_w8a8 and use_int8_w8a8",)),
    "no scale": ("fp8_tensor", {"w2_scale": None}, ("w2_scale is missing", "use_fp8_w8a8")),
    "a scale": ("none", {"w1_scale": torch.ones(6)}, ("w1_scale is given", "no use_* flag")),
    "int8": ("int8_channel", {"per_channel_quant": False}, ("use_int8_w8a8 needs per_channel_quant",)),
    "scale": ("fp8_channel", {"w1_scale": torch.ones(6, 5)}, ("w1_scale is (6, 5)", "(6, 192)")),
    "bytes": ("fp8_channel", {"w2_scale": torch.ones(6, 64, dtype=torch.uint8)}, ("w2_scale is torch.uint8", "e8m0")),
    "static": ("fp8_block", {"a1_scale": torch.ones(1)}, ("a1_scale is given", "block_shape")),
    "one static": ("fp8_channel", {"a1_scale": torch.ones(1)}, ("a1_scale and a2_scale go together",)),
    "group": ("int4_groups", {"block_shape": [128, 32]}, ("block_shape ([128, 32])",)),
    "zero": (
        "int4_groups_zp",
        {"w1_zp": torch.zeros(6, 192, 4, dtype=torch.uint8)},
        ("w1_zp is (6, 192, 4)", "(6, 96, 4)"),
    ),
    "one zero": ("int4_groups_zp", {"w2_zp": None}, ("w1_zp and w2_zp go together",)),
    "w1": ("none", {"w1": torch.zeros(6, 192, 32, dtype=torch.bfloat16)}, ("w1 is (6, 192, 32)", "(6, 192, 64)")),
    "dtype": ("none", {"w1": torch.zeros(6, 192, 64)}, ("w1 is", "float32", "bfloat16")),
    "activation": ("none", {"activation": "tanh"}, ("activation ('tanh')", "silu, gelu")),
    "rounded": ("none", {"activation": "silu_rounded"}, ("activation ('silu_rounded')",)),
    "no gate": ("none", {"activation": "situ", "is_gated": False}, ("activation ('situ')", "silu, gelu, relu2")),
    "no gate, limit": ("none", {"is_gated": False, "swiglu_limit": 1.0}, ("swiglu_limit (1.0)", "is_gated False")),
    "limit": ("none", {"gemm1_alpha": 7.0}, ("gemm1_alpha (7.0)", "gemm1_limit is missing")),
    "limits": ("none", {"gemm1_limit": 7.0, "swiglu_limit": 10.0}, ("gemm1_limit (7.0)", "swiglu_limit (10.0)")),
    "gelu": ("none", {"activation": "gelu", "swiglu_limit": 10.0}, ("swiglu_limit (10.0)", "'gelu'")),
    "fused": ("none", {"fuse_swiglu_interleaved": True, "swiglu_limit": 1.0}, ("fuse_swiglu_interleaved is set",)),
    "alpha": ("fp8_block", {"gemm1_alpha": 1.7, "gemm1_limit": 7.0}, ("gemm1_alpha 1.7", "[32, 16]")),
    "ids": ("none", {"topk_ids": torch.zeros(3, 2)}, ("topk_ids are (3, 2)", "(20, K)")),
    "bias": ("none", {"b1": torch.zeros(6, 96)}, ("b1 is (6, 96)", "(6, 192)")),
    "input": (
        "none",
        {"b1": torch.zeros(6, 192), "apply_router_weight_on_input": True},
        ("b1 is given", "apply_router_weight_on_input"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    form, changes, words = BAD[name]
    assert_named(words, outplace_fused_experts, **make_case(form).arguments | changes)


@pytest.mark.parametrize(
    "options",
    [
        {"inplace": True, "no_combine": True},
        {"inplace": True, "defer_sum": True},
        {"no_combine": True, "defer_sum": True},
    ],
    ids=str,
)
def test_results_that_exclude_each_other(options: dict[str, bool]) -> None:
    assert_named(["are both set", *options], fused_experts_impl, **make_case("none").arguments, **options)


def test_compiled_into_one_graph() -> None:
    given, options = make_case("fp8_block").arguments, SimpleNamespace(inplace=False)

    def outplace(x: torch.Tensor) -> torch.Tensor:
        return outplace_fused_experts(**given | {"hidden_states": x * 2}) + 1

    def inplace(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        inplace_fused_experts(**given | {"hidden_states": doubled})
        return doubled + 1

    def in_objects(x: torch.Tensor) -> torch.Tensor:
        rest = {key: value for key, value in given.items() if not key.startswith("topk_")} | {"hidden_states": x * 2}
        topk = StandardTopKOutput(given["topk_weights"], given["topk_ids"], None)
        return fused_experts(**rest, topk_output=topk, moe_runner_config=options) + 1

    def apart(x: torch.Tensor) -> torch.Tensor:
        return outplace_fused_experts(**given | {"hidden_states": x}, no_combine=True)

    for function in (outplace, inplace, in_objects, apart):
        assert_compiles(function, given["hidden_states"])
    assert torch.equal(inplace(given["hidden_states"]), outplace(given["hidden_states"]))


def test_the_plug_in_has_the_same_activations() -> None:
    for options in ({}, {"activation": "gelu"}, {"activation": "relu2", "is_gated": False}, {"swiglu_limit": 0.5}):
        for numbers in ({}, {"gemm1_alpha": 1.7, "gemm1_clamp_limit": 7.0}, {"gemm1_clamp_limit": 7.0}):
            config = MoeRunnerConfig(**{**options, **numbers})
            given = config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit
            if options and numbers:
                with pytest.raises(ValueError):
                    activation_of(config)
            else:
                assert activation_of(config) == activation_config(config.activation, config.is_gated, *given)


# Pieces


def test_the_documented_alignment() -> None:
    """SGLang's example, whose experts begin at 1."""
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]]) - 1
    pairs, experts, count = moe_align_block_size(ids, 4, 4)
    assert pairs[:16].tolist() == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    assert experts[:4].tolist() == [0, 1, 2, 3]
    assert count.tolist() == [16]
    assert {pairs.dtype, experts.dtype, count.dtype} == {torch.int32}


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_alignment(num_tokens: int, block: int, ignored: bool) -> None:
    """Pairs of no expert come first, in blocks of expert -1, or are left out."""
    ids = torch.randint(-1, EXPERTS + 2, (num_tokens, TOPK), generator=generator(num_tokens + block))
    pairs, experts, count = moe_align_block_size(ids, block, EXPERTS, ignored)
    flat = [expert if 0 <= expert < EXPERTS else -1 for expert in ids.reshape(-1).tolist()]
    found, used = [], int(count)
    assert used % block == 0
    for start in range(0, used, block):
        own = [pair for pair in pairs[start : start + block].tolist() if pair < len(flat)]
        assert own
        assert {flat[pair] for pair in own} == {int(experts[start // block])}
        found += own
    expected = sorted((expert, pair) for pair, expert in enumerate(flat) if expert >= 0 or not ignored)
    assert found == [pair for _, pair in expected]
    assert bool((pairs[used:] == len(flat)).all())
    assert bool((experts[-(-used // block) :] == -1).all())
    assert len(experts) == -(-len(pairs) // block)
    if ignored:
        for name in ("pad_expert_ids", "return_inactive_prefix_count"):
            with pytest.raises(ValueError, match=f"{name} and ignore_invalid_expert"):
                moe_align_block_size(ids, block, EXPERTS, True, **{name: True})
    else:
        more = moe_align_block_size(ids, block, EXPERTS, return_inactive_prefix_count=True, pad_expert_ids=True)
        assert torch.equal(more[0], pairs)
        assert torch.equal(more[1], experts)
        assert more[2].tolist() == [used, -(-flat.count(-1) // block)]


@pytest.mark.parametrize(("num_pairs", "places"), [(8, 1024), (256, 32768), (257, 32896)])
def test_sizes_of_an_alignment(num_pairs: int, places: int) -> None:
    """SGLang's: at most a block for each pair, whole words of 16 bytes."""
    pairs, experts, _ = moe_align_block_size(torch.arange(num_pairs)[None] % 256, 128, 256)
    assert (len(pairs), len(experts)) == (places, places // 128)


def test_sums_and_activation() -> None:
    x, out = torch.randn(5, 3, 8).bfloat16(), torch.empty(5, 8, dtype=torch.bfloat16)
    for call in (sglang.moe_sum_reduce_triton, sglang.moe_sum_reduce_torch_compile):
        call(x, out.fill_(torch.nan), 2.5)
        torch.testing.assert_close(out, (x.double().sum(1) * 2.5).bfloat16())
    with pytest.raises(ValueError, match=r"input is \(5, 3, 8\), output \(5, 3\)"):
        sglang.moe_sum_reduce_triton(x, torch.empty(5, 3), 1.0)
    x = torch.randn(4, 10, dtype=torch.float64) * 3
    gate, up = x[:, 0::2].clamp(max=1.5), x[:, 1::2].clamp(-1.5, 1.5)
    expected = gate / (1 + torch.exp(-1.7 * gate)) * (up + 1)
    torch.testing.assert_close(sglang.swiglu_gpt_oss_sigmoid_alpha(x, 1.7, 1.5), expected)
    halves = torch.cat([x[:, 0::2], x[:, 1::2]], 1)
    torch.testing.assert_close(sglang.swiglu_no_interleaved_with_alpha_and_limit(halves, 1.7, 1.5), expected)


def test_names_of_config_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names: Callable[..., str] = sglang.get_config_file_name
    assert names(8, 1024, None) == "E=8,N=1024,device_name=NVIDIA_H200.json"
    assert names(8, 1024, "fp8_w8a8", [128, 128]) == (
        "E=8,N=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    )
    assert names(8, 1024, "fp8_w8a8", None, True, True) == (
        "E=8,N=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True_down.json"
    )
    dtypes = sglang.get_config_dtype_str
    assert [dtypes(torch.bfloat16), dtypes(torch.float32)] == [None, "float32"]
    assert dtypes(torch.bfloat16, use_int4_w4a16=True) == "int4_w4a16"
    assert dtypes(torch.bfloat16, use_fp8_w8a8=True) == "fp8_w8a8"
