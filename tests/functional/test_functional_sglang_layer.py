"""SGLang's `FusedMoE` and its relatives: checkpoints in real layouts, flags, shares of ranks, against float64."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import fp4_oracle
from helpers.calls import assert_compiles
from helpers.experts_oracle import (
    LIMITS,
    LLAMA,
    check,
    expert_rows,
    generator,
    load,
    ranks,
    routed_rows,
    same,
    tensors_of,
)
from safetensors.torch import save_file

from ep_moe.functional.sglang import (
    BypassedTopKOutput,
    FlashInferFP4MoE,
    FlashInferFusedMoE,
    FusedMoE,
    MoeParallel,
    SharedExpertsConfig,
    StandardTopKOutput,
    TopKConfig,
    get_fused_moe_impl_class,
    outplace_fused_experts,
    routing_from_topk,
)
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.testing import assert_same_bits, worst_row_error
from ep_moe.weights import Checkpoint, ExpertWeights
from ep_moe.weights.writing import write_quantized

EXPERTS, TOPK, TOKENS, HIDDEN, INNER = 5, 2, 12, 64, 96
PREFIX = "model.layers.1.mlp.experts"


def config(family: str, directory: Path, **more: Any) -> None:
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": TOPK, "hidden_act": "silu", "dtype": "bfloat16"}
    sizes |= {"intermediate_size": INNER, "num_local_experts": EXPERTS} if family == "gpt_oss" else {}
    sizes |= {"moe_intermediate_size": INNER, "num_experts": EXPERTS} if family == "qwen3_moe" else {}
    (directory / "config.json").write_text(json.dumps({"model_type": family, **sizes, **more}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer as published checkpoints have it: a tensor for each matrix of an expert, in bfloat16."""
    directory, random, tensors = tmp_path_factory.mktemp("plain"), generator(4), {}
    for expert in range(EXPERTS):
        for name, shape in zip(LLAMA, ((INNER, HIDDEN), (HIDDEN, INNER), (INNER, HIDDEN)), strict=True):
            weight = torch.randn(shape, generator=random) * (expert + 1) / shape[1] ** 0.5
            tensors[f"{PREFIX}.{expert}.{name}.weight"] = weight.bfloat16()
    save_file(tensors, directory / "model.safetensors")
    config("qwen3_moe", directory)
    return directory


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss's layout: stacked and transposed, rows of gate and up in turns, biases."""
    directory, random = tmp_path_factory.mktemp("gpt_oss"), generator(5)
    shapes = {"gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER), "gate_up_proj_bias": (EXPERTS, 2 * INNER)}
    shapes |= {"down_proj": (EXPERTS, INNER, HIDDEN), "down_proj_bias": (EXPERTS, HIDDEN)}
    tensors = {f"{PREFIX}.{name}": torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    config("gpt_oss", directory)
    return directory


def load_fused(layer: FusedMoE, directory: Path, mapping: list[tuple[str, str, str]]) -> None:
    parameters = {f"{PREFIX}.{name}": parameter for name, parameter in layer.named_parameters()}
    tensors, used = tensors_of(directory), set()
    for parameter, part, shard in mapping:
        for name in [name for name in tensors if name.endswith(part)]:
            tensor = tensors[name]
            if tensor.dtype == torch.bfloat16 and "bias" not in name:
                tensor = tensor.transpose(-2, -1)
            own = parameters[name.replace(part, parameter)]
            own.weight_loader(own, tensor, name, shard)
            used.add(name)
    assert used == set(tensors)


SCHEMES = [
    "none",
    "fp8_block_32x32",
    "fp8_block_64x32",
    "fp8_token",
    "fp8_tensor",
    "fp8_tensor_channel",
    "fp8_w8a16",
    "int8_token",
    "int8_w8a16",
    "mxfp8",
    "mxfp4_w4a16",
    "nvfp4",
    "nvfp4_divisor",
]


def written(plain: Path, directory: Path, name: str) -> tuple[Path, Any]:
    """The checkpoint in a scheme, and its quantization_config."""
    if name == "none":
        return plain, None
    write_quantized(Checkpoint.open(plain), get_scheme(name), directory / name)
    return directory / name, json.loads((directory / name / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("name", SCHEMES)
def test_checkpoints_are_loaded_as_by_our_own_loader(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, quantized = written(plain, tmp_path, name)
    for size in (1, 2):
        for rank in range(size):
            parallel = ranks(monkeypatch, rank, ep=size)
            layer = FusedMoE(
                EXPERTS, HIDDEN, INNER, 1, params_dtype=torch.bfloat16, quant_config=quantized, parallel=parallel
            )
            assert load(layer, directory) == sum("weight_shape" not in name for name in tensors_of(directory))
            same(layer, directory, rank, size)


class SglangFp8:
    """The attributes of SGLang's Fp8Config."""

    is_checkpoint_fp8_serialized, activation_scheme, weight_block_size = True, "dynamic", [32, 32]
    ignored_layers = ("lm_head", "model.layers.3.mlp.experts")

    def get_name(self) -> str:
        return "fp8"


def test_objects_describe_formats_too(plain: Path, tmp_path: Path) -> None:
    directory, _ = written(plain, tmp_path, "fp8_block_32x32")
    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 1, params_dtype=torch.bfloat16, quant_config=SglangFp8(), prefix=PREFIX)
    load(layer, directory)
    same(layer, directory, 0, 1)
    skipped = FusedMoE(EXPERTS, HIDDEN, INNER, 3, quant_config=SglangFp8(), prefix="model.layers.3.mlp.experts")
    assert skipped.w13_weight.dtype == torch.float32
    named = lambda name: SimpleNamespace(get_name=lambda: name)  # noqa: E731
    schemes = {"w8a8_int8": "int8_token", "w8a8_fp8": "fp8_token", "mxfp4": "mxfp4_w4a16", "modelopt_fp4": "nvfp4"}
    for name, scheme in (schemes | {"modelopt": "fp8_tensor_channel"}).items():
        layer = FusedMoE(EXPERTS, HIDDEN, INNER, 1, quant_config=named(name))
        for parameter in (value for key, value in layer.named_parameters() if key.endswith("input_scale")):
            parameter.data.fill_(1)
        assert layer.expert_weights.scheme.name == scheme
        assert layer.should_fuse_routed_scaling_factor_in_topk == (scheme == "nvfp4")
    for bad in (
        named("gguf"),
        named("compressed_tensors"),  # without a config
        7,
        {"quant_method": "gptq", "bits": 3, "group_size": 32, "sym": True},
        {"quant_method": "blockwise_int8", "weight_block_size": 128},
    ):
        with pytest.raises(ValueError, match="quant_config"):
            FusedMoE(EXPERTS, HIDDEN, INNER, 1, quant_config=bad)


def test_gpt_oss(gpt_oss: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    write_quantized(Checkpoint.open(gpt_oss), get_scheme("mxfp4_w4a16"), tmp_path / "out")
    blocks = ("gate_up_proj_blocks", "down_proj_blocks", *names[2:], "gate_up_proj_scales", "down_proj_scales")
    cases = [
        (gpt_oss, None, FusedMoE.make_expert_params_mapping_fused(*names)),
        (tmp_path / "out", {"quant_method": "mxfp4"}, FusedMoE.make_expert_params_mapping_fused_mxfp4(*blocks)),
    ]
    options = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "with_bias": True, "use_weight_loader_fused": True}
    for directory, quantized, mapping in cases:
        for rank in range(2):
            layer = FusedMoE(
                EXPERTS,
                HIDDEN,
                INNER,
                1,
                params_dtype=torch.bfloat16,
                quant_config=quantized,
                parallel=ranks(monkeypatch, rank, ep=2),
                **options,
            )
            load_fused(layer, directory, mapping)
            same(layer, directory, rank, 2)


def test_static_scales_and_weights_quantized_on_load(plain: Path) -> None:
    static = {"quant_method": "fp8", "activation_scheme": "static"}
    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 1, params_dtype=torch.bfloat16, quant_config=static, inplace=False)
    for name in ("w13_input_scale", "w2_input_scale"):
        with pytest.raises(ValueError, match=f"{name} of expert 0 is not loaded"):
            layer.process_weights_after_loading()
        parameter = getattr(layer, name)
        for expert in range(EXPERTS):
            for shard in ("w1", "w3") if name.startswith("w13") else ("w2",):
                scale = torch.tensor(0.01 * (expert + 1) + (0.02 if shard == "w3" else 0.0))
                layer.weight_loader(parameter, scale, f"{name}.{shard}", shard, expert)
    assert layer.expert_weights.w13_input_scale.tolist() == pytest.approx([0.07])
    assert layer.expert_weights.w2_input_scale.tolist() == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
    online = {"quant_method": "fp8", "activation_scheme": "dynamic", "is_checkpoint_fp8_serialized": False}
    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 1, params_dtype=torch.bfloat16, quant_config=online, inplace=False)
    load(layer, plain)
    expected = ExpertWeights.from_pretrained(plain, Placement.linear(EXPERTS, 1), 0, scheme="fp8_tensor")[1]
    for _ in range(2):
        for name, tensor in expected.named_tensors.items():
            assert_same_bits(layer.expert_weights.named_tensors[name], tensor, name)
        layer.process_weights_after_loading()
    assert layer.w13_weight.dtype == torch.float8_e4m3fn


# Calls


def routed(seed: int = 1) -> tuple[torch.Tensor, StandardTopKOutput]:
    random = generator(seed)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(1)[:, :TOPK].int()
    ids[3, 1] = -1
    weights = torch.rand(TOKENS, TOPK, generator=random) + 0.1
    return torch.randn(TOKENS, HIDDEN, generator=random).bfloat16(), StandardTopKOutput(weights, ids, None)


def loaded(plain: Path, **options: Any) -> FusedMoE:
    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 1, params_dtype=torch.bfloat16, **{"inplace": False} | options)
    load(layer, plain)
    for name in ("w13_weight_bias", "w2_weight_bias"):
        if options.get("with_bias"):
            parameter = getattr(layer, name)
            values = torch.randn((EXPERTS, *parameter.shape[1:]), generator=generator(len(name))).bfloat16()
            layer.weight_loader_fused(parameter, values, name, name.partition("_")[0])
    return layer


def summed(plain: Path, x: torch.Tensor, output: StandardTopKOutput, layer: FusedMoE, **how: Any) -> torch.Tensor:
    """[T, K, H], from the checkpoint's own tensors."""
    tensors = tensors_of(plain)

    def expert(number: int, rows: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        gate, down, up = (tensors[f"{PREFIX}.{number}.{name}.weight"] for name in LLAMA)
        biases = (layer.w13_weight_bias[number], layer.w2_weight_bias[number]) if how.get("with_bias") else (None, None)
        options = {**how, "biases": biases, "factors": factors, "gate_up_interleaved": False}
        return expert_rows(rows, torch.cat([gate, up]), down, **options)

    weighted = not how.get("unweighted")
    routed, on_input = (output.topk_ids, output.topk_weights), how.get("on_input", False)
    return routed_rows(x, *routed, expert, EXPERTS, on_input=on_input, weighted=weighted)


def close(found: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    assert found.dtype == torch.bfloat16
    check(found, expected, LIMITS[torch.bfloat16] * factor)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "factor": ({"routed_scaling_factor": 2.5}, {"factor": 2.5}),
    "no factor": ({"routed_scaling_factor": 0.0}, {"factor": 0.0}),
    "gelu": ({"activation": "gelu"}, {"activation": "gelu"}),
    "on the input": ({"apply_router_weight_on_input": True}, {"on_input": True}),
    "biases": ({"with_bias": True}, {"with_bias": True}),
    "swiglu": (
        {"with_bias": True, "gemm1_alpha": 1.7, "gemm1_clamp_limit": 0.8},
        {"with_bias": True, "gemm1_alpha": 1.7, "gemm1_limit": 0.8},
    ),
    "halves": (
        {"gemm1_alpha": 1.7, "gemm1_beta": 1.0, "gemm1_clamp_limit": 0.8, "gate_up_interleaved": False},
        {"gemm1_alpha": 1.7, "gemm1_limit": 0.8},
    ),
    "limit alone": ({"gemm1_clamp_limit": 0.8}, {"gemm1_limit": 0.8}),
    "swiglu_limit": ({"swiglu_limit": 0.8}, {"swiglu_limit": 0.8}),
    "shared": ({"num_fused_shared_experts": 1, "top_k": TOPK}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_options(name: str, plain: Path) -> None:
    options, how = CASES[name]
    layer, (x, output) = loaded(plain, **options), routed()
    kept = x.clone()
    expected = summed(plain, x, output, layer, **how)
    close(layer(x, output), expected.sum(1) * how.get("factor", 1.0), 2.0 if how.get("on_input") else 1.0)
    assert torch.equal(x, kept)


def test_stacked_halves_and_rows_in_turns() -> None:
    """With an alpha, gate_up_interleaved says how rows lie in a stacked tensor."""
    stacked = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator(8)).bfloat16()
    for interleaved in (True, False):
        layer = FusedMoE(
            *(EXPERTS, HIDDEN, INNER, 1),
            params_dtype=torch.bfloat16,
            gemm1_alpha=1.7,
            gemm1_clamp_limit=0.8,
            gate_up_interleaved=interleaved,
        )
        layer.weight_loader_fused(layer.w13_weight, stacked, "gate_up_proj", "w13")
        halves = torch.cat([stacked[:, 0::2], stacked[:, 1::2]], 1) if interleaved else stacked
        assert torch.equal(layer.w13_weight.data, halves)


def test_no_combine_and_inplace(plain: Path) -> None:
    x, output = routed()
    layer = loaded(plain, no_combine=True, inplace=True, routed_scaling_factor=3.0)
    close(layer(x, output), summed(plain, x, output, layer, unweighted=True))
    layer.moe_runner_config = dataclasses.replace(layer.moe_runner_config, no_combine_keep_router_weight=True)
    close(layer(x, output), summed(plain, x, output, layer))
    with pytest.raises(ValueError, match="no_combine is set"):
        layer(x, routing_from_topk(*output[:2], EXPERTS))
    expected = loaded(plain)(x, output)
    layer = loaded(plain, inplace=True)
    assert layer(x, output) is x
    assert torch.equal(x, expected)


def test_other_outputs_of_topk(plain: Path) -> None:
    x, output = routed()
    layer = loaded(plain)
    expected = layer(x, output)
    by_expert = loaded(plain, inplace=True, top_k=TOPK)
    assert torch.equal(layer(x, (*output, output.topk_ids)), expected)  # with packed ids
    assert by_expert(x[:0], routing_from_topk(*(part[:0] for part in output[:2]), EXPERTS)).shape == (0, HIDDEN)
    kept = x.clone()
    assert by_expert(kept, routing_from_topk(*output[:2], EXPERTS)) is kept
    close(kept, summed(plain, x, output, layer).sum(1))
    logits = torch.randn(TOKENS, EXPERTS, generator=generator(2))
    for options, weights in (
        (TopKConfig(top_k=TOPK), torch.softmax(logits.topk(TOPK)[0], 1)),
        (TopKConfig(top_k=TOPK, renormalize=False), torch.softmax(logits, 1).topk(TOPK)[0]),
    ):
        chosen = StandardTopKOutput(weights, logits.topk(TOPK)[1].int(), None)
        found = layer(x, BypassedTopKOutput(x, logits, options))
        close(found, summed(plain, x, chosen, layer).sum(1))
    bias = torch.randn(EXPERTS, generator=generator(3))
    options = TopKConfig(
        top_k=TOPK,
        correction_bias=bias,
        routed_scaling_factor=3.0,
        apply_routed_scaling_factor_on_output=True,
        scoring_func="sigmoid",
    )
    scores = torch.sigmoid(logits)
    for added, one in (
        (bias, options),
        (0, dataclasses.replace(options, correction_bias=None)),
        (bias, dataclasses.replace(options, scoring_func="softmax")),
        (
            0,
            dataclasses.replace(options, correction_bias=None, use_grouped_topk=True, num_expert_group=5, topk_group=3),
        ),
        (bias, dataclasses.replace(options, use_grouped_topk=True, num_expert_group=1, scoring_func="softmax")),
    ):
        scores = torch.softmax(logits, 1) if one.scoring_func == "softmax" else torch.sigmoid(logits)
        if one.use_grouped_topk:  # of one expert each, or one of all, which is DeepSeek-V3's
            scores = torch.sigmoid(logits)
        ids = (scores + added).topk(TOPK)[1].int()
        weights = scores.gather(1, ids.long())
        ids[7:] = -1  # padding
        chosen = StandardTopKOutput(3 * weights / weights.sum(1, keepdim=True), ids, None)
        padded = BypassedTopKOutput(x, logits, one, torch.tensor([7]))
        close(layer(x, padded), summed(plain, x, chosen, layer).sum(1))
        assert bool((layer(x, padded)[7:] == 0).all())
    own = TopKConfig(
        top_k=TOPK, custom_routing_function=lambda hidden_states, gating_output, topk, renormalize: output[:2]
    )
    assert torch.equal(layer(x, BypassedTopKOutput(x, logits, own)), expected)
    by_itself = FlashInferFusedMoE(EXPERTS, HIDDEN, INNER, 1, params_dtype=torch.bfloat16, inplace=False)
    load(by_itself, plain)
    logits_alone = BypassedTopKOutput(x, logits, options)
    assert torch.equal(by_itself(x, logits_alone), layer(x, logits_alone))
    with pytest.raises(ValueError, match="has no topk_config"):
        by_itself(x, output)
    with pytest.raises(ValueError, match="renormalize is False"):
        by_itself(x, BypassedTopKOutput(x, logits, TopKConfig(top_k=TOPK, renormalize=False)))


@pytest.mark.parametrize("name", ["none", "fp8_block_32x32", "nvfp4"])
@pytest.mark.parametrize("presharded", [False, True])
def test_ranks_share_experts_and_columns(
    name: str, presharded: bool, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of 2 x 3 ranks add up to the whole, and a sharded checkpoint gives the same parts."""
    directory, quantized = written(plain, tmp_path, name)
    x, output = routed()
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "quant_config": quantized, "inplace": False}
    whole = FusedMoE(EXPERTS, HIDDEN, INNER, 1, with_bias=True, **options)
    load(whole, directory)
    biases = {
        field: torch.randn(EXPERTS, rows, generator=generator(rows)).bfloat16()
        for field, rows in (("w13", 2 * INNER), ("w2", HIDDEN))
    }

    def add_biases(layer: FusedMoE, own: dict[str, torch.Tensor]) -> None:
        for field, values in own.items():
            parameter = getattr(layer, f"{field}_weight_bias")
            layer.weight_loader_fused(parameter, values, f"{field}_bias", field)

    add_biases(whole, biases)
    total = torch.zeros(TOKENS, HIDDEN)
    for rank in range(6):
        parallel, share = ranks(monkeypatch, rank, ep=2, tp=3), rank % 3
        layer = FusedMoE(
            EXPERTS, HIDDEN, INNER, 1, with_bias=True, use_presharded_weights=presharded, parallel=parallel, **options
        )
        if not presharded:
            load(layer, directory)
            add_biases(layer, biases)
        else:
            cut = tmp_path / f"{rank}"
            cut.mkdir()
            own = {key: _cut(key, tensor, share) for key, tensor in tensors_of(directory).items()}
            save_file(own, cut / "model.safetensors")
            load(layer, cut)
            halves = [half[:, share * 32 : share * 32 + 32] for half in biases["w13"].chunk(2, 1)]
            add_biases(layer, {"w13": torch.cat(halves, 1), "w2": biases["w2"]})
        total += layer(x, output).float()
    assert float(worst_row_error(total, whole(x, output).float())) < (2e-2 if name == "none" else 8e-2)


def _cut(name: str, tensor: torch.Tensor, share: int) -> torch.Tensor:
    """A third of the intermediate size."""
    if tensor.dim() < 2:
        return tensor.clone()
    axis = 1 if "down_proj" in name else 0
    return tensor.chunk(3, axis)[share].contiguous()


def reduced(group: EPGroup, plain: str, size: dict[str, int]) -> torch.Tensor:
    """The sum of all ranks, on one of them."""
    del group
    layer = FusedMoE(
        EXPERTS, HIDDEN, INNER, 1, params_dtype=torch.bfloat16, reduce_results=True, parallel=MoeParallel(**size)
    )
    load(layer, Path(plain))
    return layer(*routed())


@pytest.mark.parametrize("size", [{"ep_size": 2}, {"tp_size": 2}], ids=str)
def test_results_are_reduced_over_real_ranks(size: dict[str, int], plain: Path) -> None:
    found = launch(reduced, str(plain), size, num_ranks=2, device="cpu")
    assert torch.equal(*found)
    close(found[0], loaded(plain)(*routed()).double(), 2.0)


def test_moved_and_restored(plain: Path, tmp_path: Path) -> None:
    directory, quantized = written(plain, tmp_path, "fp8_tensor")
    x, output = routed()
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "quant_config": quantized, "inplace": False}
    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 1, **options)
    empty = layer(x, output)
    load(layer, directory)
    expected = layer(x, output)
    assert not torch.equal(empty, expected)
    other = FusedMoE(EXPERTS, HIDDEN, INNER, 1, **options)
    other(x, output)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, output), expected)
    other = other.to(torch.float32)  # parameters keep the dtypes of their format
    assert other.w13_weight.dtype == torch.float8_e4m3fn
    assert torch.equal(other(x, output), expected)


def test_compiled_into_one_graph(plain: Path) -> None:
    x, output = routed()
    for inplace in (False, True):
        layer = loaded(plain, inplace=inplace, routed_scaling_factor=2.0)

        def call(x: torch.Tensor) -> torch.Tensor:
            return layer(x * 2, StandardTopKOutput(output.topk_weights * 1.5, output.topk_ids, None)) + 1  # noqa: B023

        assert_compiles(call, x)


def test_fp4_by_flashinfers_call(plain: Path, tmp_path: Path) -> None:
    directory, quantized = written(plain, tmp_path, "nvfp4")
    layer = FlashInferFP4MoE(
        EXPERTS,
        HIDDEN,
        INNER,
        1,
        top_k=TOPK,
        params_dtype=torch.bfloat16,
        quant_config=quantized,
        routed_scaling_factor=2.5,
    )
    load(layer, directory)
    tensors, (x, _) = tensors_of(directory), routed()
    for expert in range(EXPERTS):  # [up; gate]
        for place, name in enumerate(("up_proj", "gate_proj")):
            rows = slice(place * INNER, (place + 1) * INNER)
            for suffix in ("weight", "weight_scale"):
                part = getattr(layer, f"w13_{suffix}").data[expert, rows]
                assert_same_bits(part, tensors[f"{PREFIX}.{expert}.{name}.{suffix}"], suffix)
    logits, bias = (torch.randn(size, generator=generator(6)) for size in ((TOKENS, EXPERTS), (EXPERTS,)))
    for options in (TopKConfig(top_k=TOPK, correction_bias=bias, scoring_func="sigmoid"), TopKConfig(top_k=TOPK)):
        scores = torch.sigmoid(logits) if options.correction_bias is not None else torch.softmax(logits, 1)
        ids = (scores + (0 if options.correction_bias is None else bias)).topk(TOPK)[1]
        weights = scores.gather(1, ids)
        weights = 2.5 * weights / weights.sum(1, keepdim=True)

        def expert(number: int, rows: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
            real = []
            for name in LLAMA:
                base = f"{PREFIX}.{number}.{name}.weight"
                matrix = fp4_oracle.real(tensors[base], tensors[f"{base}_scale"].view(torch.uint8), "nvfp4")
                real.append(matrix * tensors[f"{base}_scale_2"].double())
            return expert_rows(rows, torch.cat([real[0], real[2]]), real[1], factors=factors)

        expected = routed_rows(x, ids, weights, expert, EXPERTS).sum(1)
        found = layer(x, BypassedTopKOutput(x, logits, options))
        close(found, expected)
        assert found is not x
    for more, words in (((torch.tensor([3]),), "num_token_non_padded"), ((None, 1), "expert_location_dispatch_info")):
        with pytest.raises(ValueError, match=f"topk_output.{words} is given"):
            layer(x, BypassedTopKOutput(x, logits, options, *more))
    with pytest.raises(ValueError, match="softmax with one"):
        layer(x, BypassedTopKOutput(x, logits, TopKConfig(top_k=TOPK, correction_bias=bias)))
    with pytest.raises(ValueError, match="custom_routing_function is given"):
        layer(x, BypassedTopKOutput(x, logits, TopKConfig(top_k=TOPK, custom_routing_function=print)))


def test_the_factory() -> None:
    nvfp4, fp8 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"quant_method": "fp8"}
    assert get_fused_moe_impl_class() is FusedMoE
    assert get_fused_moe_impl_class(nvfp4) is FusedMoE
    trtllm = "flashinfer_trtllm"
    assert get_fused_moe_impl_class(nvfp4, trtllm) is FlashInferFP4MoE
    assert get_fused_moe_impl_class(fp8, moe_runner_backend=trtllm) is FlashInferFusedMoE
    assert get_fused_moe_impl_class(None, trtllm) is FusedMoE


def test_mappings() -> None:
    found = FusedMoE.make_expert_params_mapping("gate", "down", "up", 2)
    assert found[:3] == [
        ("experts.w13_", "experts.0.gate.", 0, "w1"),
        ("experts.w2_", "experts.0.down.", 0, "w2"),
        ("experts.w13_", "experts.0.up.", 0, "w3"),
    ]
    assert [entry[2] for entry in found] == [0, 0, 0, 1, 1, 1]
    assert ("experts.w2_", "experts.1.w2.", 1, "w2") in FusedMoE.make_expert_input_scale_params_mapping(2)
    assert FusedMoE.make_expert_params_mapping_fused("a", "b", "c", "d") == [
        ("experts.w13_weight", "experts.a", "w13"),
        ("experts.w13_weight_bias", "experts.c", "w13"),
        ("experts.w2_weight", "experts.b", "w2"),
        ("experts.w2_weight_bias", "experts.d", "w2"),
    ]
    more = FusedMoE.make_expert_params_mapping_fused_mxfp4("a", "b", "c", "d", "e", "f")
    assert more[4:] == [
        ("experts.w13_weight_scale", "experts.e", "w13"),
        ("experts.w2_weight_scale", "experts.f", "w2"),
    ]


BAD_OPTIONS: dict[str, tuple[type[FusedMoE], dict[str, Any], str]] = {
    "activation": (FusedMoE, {"activation": "tanh"}, r"activation \('tanh'\)"),
    "alpha": (FusedMoE, {"gemm1_alpha": 1.0}, r"gemm1_alpha \(1.0\) given, gemm1_clamp_limit is missing"),
    "beta": (FusedMoE, {"gemm1_beta": 2.0}, r"gemm1_beta \(2.0\)"),
    "limits": (FusedMoE, {"swiglu_limit": 2.0, "gemm1_clamp_limit": 1.0}, "swiglu_limit goes with no other"),
    "gate": (FusedMoE, {"is_gated": False}, r"is_gated \(False\)"),
    "method": (FusedMoE, {"quant_method": 1}, r"quant_method \(1\)"),
    "shared": (FusedMoE, {"num_fused_shared_experts": 6}, r"num_fused_shared_experts \(6\) is not in \[0, 5\]"),
    "bias": (FusedMoE, {"with_bias": True, "apply_router_weight_on_input": True}, "with_bias and apply_router"),
    "blocks": (
        FusedMoE,
        {"gemm1_alpha": 1.0, "gemm1_clamp_limit": 1.0, "quant_config": SglangFp8()},
        r"gemm1_alpha \(1.0\)",
    ),
    "gelu": (FlashInferFusedMoE, {"activation": "gelu"}, "FlashInferFusedMoE"),
    "nvfp4": (FlashInferFP4MoE, {}, "scheme 'none'"),
    "clamped": (
        FlashInferFP4MoE,
        {"swiglu_limit": 9.0, "quant_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "'silu' without gemm1_alpha and limits",
    ),
    "combine": (
        FlashInferFP4MoE,
        {"no_combine": True, "quant_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "no_combine",
    ),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_named(name: str) -> None:
    kind, options, words = BAD_OPTIONS[name]
    with pytest.raises(ValueError, match=words):
        kind(EXPERTS, HIDDEN, INNER, 1, **options)


def test_bad_tensors_are_named(plain: Path) -> None:
    layer, (x, output) = loaded(plain, top_k=TOPK), routed()
    weight = torch.zeros(INNER, HIDDEN)
    for changes, words in (
        ({"shard_id": "w2"}, r"shard_id \('w2'\)"),
        ({"shard_id": "w13"}, r"shard_id \('w13'\)"),
        ({"expert_id": -1}, r"expert_id \(-1\) of x\.weight is not in \[0, 5\)"),
        ({"expert_id": 5}, r"expert_id \(5\) of x\.weight is not in \[0, 5\)"),
        ({"loaded_weight": weight[:5]}, r"x\.weight is \(5, 64\); \(96, 64\) needed"),
        ({"loaded_weight": weight.to(torch.float8_e4m3fn)}, "float8_e4m3fn; torch.bfloat16"),
        ({"param": torch.nn.Parameter(weight)}, "is not a parameter of layer 1"),
    ):
        given: dict[str, Any] = {"param": layer.w13_weight, "loaded_weight": weight, "weight_name": "x.weight"}
        with pytest.raises(ValueError, match=words):
            layer.weight_loader(**given | {"shard_id": "w1", "expert_id": 0} | changes)
    with pytest.raises(ValueError, match=r"\(5, \.\.\.\) needed"):
        layer.weight_loader_fused(layer.w2_weight, weight, "x", "w2")
    with pytest.raises(ValueError, match="topk_output has 1 experts a token"):
        layer(x, StandardTopKOutput(output.topk_weights[:, :1], output.topk_ids[:, :1], None))
    with pytest.raises(ValueError, match=r"hidden_states are \(12, 32\)"):
        layer(x[:, :32], output)
    for wrong in ((1, 2), ()):
        with pytest.raises(ValueError, match="topk_output"):
            layer(x, wrong)
    with pytest.raises(ValueError, match="scatter_indx is None"):
        layer(x, routing_from_topk(*output[:2], EXPERTS)._replace(scatter_indx=None))
    with pytest.raises(ValueError, match="pre_quant_input is given"):
        layer(x, output, (x, x))
    logits = torch.zeros(TOKENS, EXPERTS)
    for options, words in (
        ({"use_grouped_topk": True, "num_expert_group": 2}, r"num_expert_group \(2\) does not divide 5"),
        ({"scoring_func": "sqrtsoftplus"}, r"scoring_func \('sqrtsoftplus'\)"),
        ({"shared_experts": SharedExpertsConfig(num_fused_shared_experts=1)}, "shared_experts"),
    ):
        with pytest.raises(ValueError, match=words):
            layer(x, BypassedTopKOutput(x, logits, TopKConfig(top_k=TOPK, **options)))
    with pytest.raises(ValueError, match="expert_location_dispatch_info is given"):
        layer(x, BypassedTopKOutput(x, logits, TopKConfig(top_k=TOPK), None, 1))


def test_the_same_as_the_call(plain: Path, tmp_path: Path) -> None:
    directory, quantized = written(plain, tmp_path, "fp8_block_32x32")
    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 1, params_dtype=torch.bfloat16, quant_config=quantized, inplace=False)
    load(layer, directory)
    x, output = routed()
    given = (x, layer.w13_weight, layer.w2_weight, output.topk_weights, output.topk_ids)
    scales = {"w1_scale": layer.w13_weight_scale_inv, "w2_scale": layer.w2_weight_scale_inv}
    expected = outplace_fused_experts(*given, use_fp8_w8a8=True, block_shape=[32, 32], **scales)
    assert torch.equal(layer(x, output), expected)
