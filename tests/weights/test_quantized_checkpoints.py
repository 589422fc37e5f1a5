"""Checkpoints of every quantization, written from the published layouts, and read back."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.quantized_layouts import (
    BF16,
    DENSE,
    EXPERTS,
    F32,
    FP4,
    FP8,
    HIDDEN,
    INTERMEDIATE,
    LAYOUTS,
    ActOrder,
    Tensors,
    base,
    layer_of,
    make,
    microscaled,
    write,
    write_config,
)
from safetensors.torch import save_file

from ep_moe.config import ActivationConfig
from ep_moe.engines.common.formats import stored_as, weights_of
from ep_moe.experts import create_experts
from ep_moe.functional.sglang import FusedMoE
from ep_moe.local_moe import local_moe
from ep_moe.placement import Placement
from ep_moe.quant import dequantize_rows, dequantize_weight, quantize, quantize_weight, round_trip
from ep_moe.routing import Routing
from ep_moe.testing import worst_row_error
from ep_moe.weights import Checkpoint, ExpertWeights, storage


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name.startswith("nvfp4")])
def test_gate_and_up_have_global_scales_of_their_own(tmp_path: Path, name: str) -> None:
    """The layer, SGLang's and an engine's compute with both, as a loop over tokens in float64 does."""
    tensors, real = map(dict, write(tmp_path, name))
    layout, random = LAYOUTS[name], torch.Generator().manual_seed(3)
    suffix, values = ("_global_scale", "_packed") if "weight_global_scale" in str(list(tensors)) else ("_scale_2", "")
    for expert in range(EXPERTS):
        factor = 2.0 ** (expert - 2)
        key = f"{base(expert, 'up')}.weight{suffix}"
        tensors[key] = tensors[key] * (1 / factor if suffix == "_global_scale" else factor)
        real[base(expert, "up")] = real[base(expert, "up")] * factor
    save_file(tensors, tmp_path / "model.safetensors")
    x = torch.randn(7, HIDDEN, generator=random).bfloat16()
    ids = torch.rand(7, EXPERTS, generator=random).argsort(1)[:, :2].int()
    routing = Routing(topk_ids=ids, topk_weights=torch.rand(7, 2, generator=random) / 100)
    weights = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0)[0]
    plain = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0, scheme="none", dtype=F32)[0]
    layer = FusedMoE(EXPERTS, HIDDEN, INTERMEDIATE, 0, params_dtype=BF16, quant_config=layout.config, inplace=False)
    parameters = {f"model.layers.0.mlp.experts.{key}": value for key, value in layer.named_parameters()}
    mapping = FusedMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", EXPERTS)
    for key, tensor in tensors.items():
        for parameter, part, expert, shard in mapping:
            if part in key:
                own = parameters[key.replace(part, parameter)]
                own.weight_loader(own, tensor, key, shard_id=shard, expert_id=expert)
    shared = getattr(layer, f"w13_weight{suffix}").data
    loaded = stored_as(weights.scheme.name, values=f".weight{values}", global_scale=f".weight{suffix}")
    assert shared.shape == (EXPERTS, 2)
    experts = create_experts("torch", ActivationConfig(kind="silu"), x.device, scheme=weights.scheme)
    found = [
        local_moe(x, routing, held, experts) for held in (weights, layer.expert_weights, weights_of(layer, loaded))
    ]
    expected = torch.zeros(7, HIDDEN, dtype=torch.float64)
    tokens = x.double()
    if weights.scheme.payload.quantized:
        tokens = dequantize_rows(*dataclasses.astuple(quantize(x, weights.scheme))[:2], weights.scheme).double()
    for token in range(7):
        for column in range(2):
            expert = int(ids[token, column])
            w13, w2 = (part.double() for part in layer_of(real, expert))
            assert torch.equal(plain.w13.values[expert], w13.float())
            gate, up = (w13 @ tokens[token]).chunk(2)
            inner = (up * gate * torch.sigmoid(gate)).float()
            if weights.scheme.activation.quantized:
                inner = round_trip(inner[None], weights.scheme)[0]
            expected[token] += routing.topk_weights[token, column].double() * (w2 @ inner.double())
    for out in found:
        assert torch.equal(out, found[0])
        assert float(worst_row_error(out, expected)) < (4e-2 if weights.scheme.activation.quantized else 4e-3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_are_held_as_they_are_on_disk(tmp_path: Path, name: str) -> None:
    """The same real numbers, bit for bit; nothing is dequantized unless the caller says so, except other tensors."""
    tensors, real = write(tmp_path, name)
    placement = Placement.round_robin(EXPERTS, 2)
    found = ExpertWeights.from_pretrained(tmp_path, placement, 0)[0]
    assert found.scheme.name == LAYOUTS[name].scheme
    none = ExpertWeights.from_pretrained(tmp_path, placement, 0, scheme="none", dtype=F32)[0]
    other = ExpertWeights.from_pretrained(tmp_path, placement, 0, scheme="fp8_block_16x16")[0]
    for position, expert in enumerate((0, 2)):
        for part, expected in zip(("w13", "w2"), layer_of(real, expert), strict=True):
            held = getattr(found, part)[position]
            assert {key: (tuple(t.shape), t.dtype) for key, t in held.tensors.items()} == found.scheme.weight.parts(
                tuple(expected.shape), BF16
            )
            assert torch.equal(dequantize_weight(held, found.scheme), expected)
            assert torch.equal(getattr(none, part).values[position], expected)
            again = quantize_weight(expected, other.scheme)
            assert torch.equal(
                dequantize_weight(getattr(other, part)[position], other.scheme), dequantize_weight(again, other.scheme)
            )
    if "static" in name or "fp8_modelopt" in name:
        inputs = {key: value for key, value in tensors.items() if key.endswith(".input_scale") and DENSE not in key}
        first = max(value for key, value in inputs.items() if "down" not in key)
        assert found.w13_input_scale is not None
        assert found.w2_input_scale is not None
        assert torch.equal(found.w13_input_scale, first)
        assert found.w2_input_scale.tolist() == [inputs[f"{base(e, 'down')}.input_scale"].item() for e in (0, 2)]
        assert other.w13_input_scale is None
    else:
        assert found.w13_input_scale is None
    dense = dict(Checkpoint.open(tmp_path).dense(F32).items())
    assert dense.keys() == {f"{DENSE}.weight", "model.norm.weight"}
    assert torch.equal(dense[f"{DENSE}.weight"], real[DENSE])


@pytest.mark.parametrize("name", ["gptq", "pack_quantized"])
def test_columns_in_another_order(tmp_path: Path, name: str) -> None:
    """Act-order: column k belongs to group g_idx[k]. The rows of w13 take the order of w2's columns, so that the
    product is the same. Columns of w13 are sorted for tokens in `w13_order`, one for the gate and the up half of an
    expert; a gate and an up half in different orders are refused, but dequantized on demand."""
    tensors, real = write(tmp_path, name)
    act_order = ActOrder(name, tensors, real, 1)
    suffix, shuffle = act_order.suffix, act_order.shuffle
    for expert in range(EXPERTS):
        shuffle(base(expert, "down"))
    save_file(tensors, tmp_path / "model.safetensors")
    found = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0)[0]
    plain_ = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0, scheme="none", dtype=F32)[0]
    for expert in range(EXPERTS):
        w13, w2 = layer_of(real, expert)
        assert torch.equal(plain_.w2.values[expert], w2)
        assert torch.equal(plain_.w13.values[expert], w13)
        held13, held2 = (dequantize_weight(m[expert], found.scheme) for m in (found.w13, found.w2))
        order = tensors[f"{base(expert, 'down')}{suffix}"].long().argsort(stable=True)
        assert torch.equal(held2, w2[:, order])
        gate, up = w13.chunk(2)
        assert torch.equal(held13, torch.cat([gate[order], up[order]]))
    assert found.w13_order is None
    orders = {expert: shuffle(base(expert, "gate")) for expert in (0, 2)}
    for expert, order in orders.items():
        shuffle(base(expert, "up"), order)
    save_file(tensors, tmp_path / "model.safetensors")
    for rank in range(2):
        placement = Placement.round_robin(EXPERTS, 2)
        found = ExpertWeights.from_pretrained(tmp_path, placement, rank)[0]
        assert found.w13_order is not None
        for position, expert in enumerate(placement.local_experts(rank)):
            held = dequantize_weight(found.w13[position], found.scheme)
            again = torch.empty_like(held)
            again[:, found.w13_order[position]] = held
            rows = tensors[f"{base(expert, 'down')}{suffix}"].long().argsort(stable=True)
            gate, up = layer_of(real, expert)[0].chunk(2)
            assert torch.equal(again, torch.cat([gate[rows], up[rows]]))
    shuffle(base(1, "up"))
    save_file(tensors, tmp_path / "model.safetensors")
    for rank in range(2):
        with pytest.raises(ValueError, match=rf"{base(1, 'up')}.*another order than the gate.*scheme=\"none\""):
            ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 2), rank)
    plain_ = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0, scheme="none", dtype=F32)[0]
    assert torch.equal(plain_.w13.values[1], layer_of(real, 1)[0])
    tensors[f"{base(1, 'down')}{suffix}"] = torch.zeros(INTERMEDIATE, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"{base(1, 'down')}.*does not have 32 columns in each group"):
        ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0, scheme="none")


def test_unpacked_columns_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dequantized in it, in portions of rows; an expert without it is an error."""
    tensors, real = write(tmp_path, "mxfp8_compressed")
    write_config(tmp_path, changed("mxfp8_compressed", (*WEIGHTS, "actorder"), "group"))
    monkeypatch.setattr(storage, "PORTION_BYTES", 16 * HIDDEN * 4)
    for module, weight in real.items():
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(len(module)))
        tensors[f"{module}.weight_g_idx"] = (order // 32).int()
        tensors[f"{module}.weight"], real[module] = tensors[f"{module}.weight"][:, order], weight[:, order]
    save_file(tensors, tmp_path / "model.safetensors")
    none = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0, scheme="none", dtype=F32)[0]
    for expert in range(EXPERTS):
        for part, expected in zip(("w13", "w2"), layer_of(real, expert), strict=True):
            assert torch.equal(getattr(none, part).values[expert], expected)
    assert torch.equal(Checkpoint.open(tmp_path).dense(F32)[f"{DENSE}.weight"], real[DENSE])
    del tensors[f"{BROKEN}.weight_g_idx"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{BROKEN}.weight_g_idx is missing"):
        Checkpoint.open(tmp_path)


BROKEN = base(2, "up")


@pytest.mark.parametrize(
    ("name", "suffix", "damage", "words"),
    [
        ("gptq", ".scales", None, (".scales is missing",)),
        ("gptq", ".scales", lambda t: t[:, :32].contiguous(), ("[3, 32]", "[3, 64]")),
        ("gptq", ".scales", lambda t: t.int(), ("int32", "float16")),
        ("gptq", ".scales", lambda t: -t, ("negative scales",)),
        ("gptq", ".qzeros", lambda t: t[:2].contiguous(), ("[2, 8]", "[3, 8]")),
        ("gptq", ".qweight", lambda t: t[:8].contiguous(), ("[2, 8]", "[64, 64]")),
        ("gptq", ".qweight", lambda t: t[:9].contiguous(), ("groups of 32", "72")),
        ("gptq_symmetric_channel", ".qzeros", lambda t: t * 0, ("zero points other than 8", "symmetric")),
        ("awq", ".qzeros", None, (".qzeros is missing",)),
        ("awq", ".qweight", lambda t: t[:, :-1].contiguous(), ("[96, 7]", "[3, 64]", "[3, 56]")),
        ("pack_quantized", ".weight_packed", lambda t: t[:, :-1].contiguous(), ("groups of 32", "88")),
        ("pack_quantized", ".weight_scale", lambda t: t.half(), ("int4_w4a16_g32_f16", "int4_w4a16_g32")),
        ("pack_quantized_zero_points", ".weight_zero_point", lambda t: t.t().contiguous(), ("[3, 8]", "[8, 3]")),
        ("blockwise_int8", ".weight_scale_inv", None, ("is missing",)),
        ("blockwise_int8", ".weight_scale_inv", lambda t: t[:1], ("[1, 3]", "[4, 3]", "float8_e8m0fnu")),
        ("blockwise_int8", ".weight_scale_inv", lambda t: t.int(), ("int32", "float8_e8m0fnu")),
        ("fp8_static", ".input_scale", lambda t: t * 0, ("input_scale", "not positive")),
        ("fp8_static", ".input_scale", None, (".input_scale is missing",)),
        ("fp8_modelopt", ".input_scale", None, (".input_scale is missing",)),
        ("gptq", ".g_idx", None, (".g_idx is missing",)),
        ("mxfp4_compressed", ".weight_g_idx", lambda _: torch.arange(HIDDEN).flip(0) // 32, ("than their groups",)),
        ("nvfp4_compressed", ".weight_g_idx", lambda _: torch.arange(HIDDEN).flip(0) // 16, ("than their groups",)),
        ("nvfp4_compressed", ".weight_scale", lambda t: t.float(), ("torch.float32", "float8_e4m3fn")),
        ("nvfp4_modelopt", ".weight_scale_2", lambda t: t * 0, ("not positive",)),
        ("mxfp4_compressed", ".weight_scale", lambda t: t[:, :2].contiguous(), ("[64, 2]", "[64, 3]")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damage_is_named(tmp_path: Path, name: str, suffix: str, damage: Any, words: tuple[str, ...]) -> None:
    tensors, _ = write(tmp_path, name)
    write_config(tmp_path, LAYOUTS[name].config | {"desc_act": True})  # GPTQ's alone
    key = f"{BROKEN}{suffix}"
    changed = tensors.pop(key, None)
    if damage is not None:
        tensors[key] = damage(changed)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0)
    assert [word for word in (BROKEN, *words) if word not in str(caught.value)] == []


IN_EXPERTS = r".*\.experts\.\d"


def write_dynamic(directory: Path, rules: dict[str, Any], *, plain_up: bool = False) -> dict[str, torch.Tensor]:
    """A dense module in 4 bits, the experts in 8, of expert 1 the up half in bfloat16; returns the real weights."""
    (four, real), (eight, of_experts) = make("gptq"), make("gptq_int8")
    tensors = {key: eight[key] if ".experts." in key else tensor for key, tensor in four.items()}
    if plain_up:
        name = base(1, "up")
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(name)}
        tensors[f"{name}.weight"] = of_experts[name].bfloat16()
    save_file(tensors, directory / "model.safetensors")
    write_config(directory, LAYOUTS["gptq"].config | {"dynamic": rules})
    return {name: of_experts[name] if ".experts." in name else weight for name, weight in real.items()}


@pytest.mark.parametrize("key", [f"+:{IN_EXPERTS}", IN_EXPERTS], ids=["+:", "plain"])
def test_gptq_rules_for_modules(tmp_path: Path, key: str) -> None:
    """The first rule that matches counts; modules without one are as the config says."""
    real = write_dynamic(tmp_path, {key: {"bits": 8, "sym": True, "desc_act": True}, ".*": {}})
    found = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0)[0]
    assert found.scheme.name == LAYOUTS["gptq_int8"].scheme
    for expert in range(EXPERTS):
        for part, expected in zip(("w13", "w2"), layer_of(real, expert), strict=True):
            assert torch.equal(dequantize_weight(getattr(found, part)[expert], found.scheme), expected)
    with Checkpoint.open(tmp_path).dense(F32) as dense:
        assert torch.equal(dense[f"{DENSE}.weight"], real[DENSE])


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({}, (".experts.0.", "gptq values")),
        ({f"+:{IN_EXPERTS}": {"bits": 3}}, ("dynamic", "bits 3")),
        ({f"+:{IN_EXPERTS}": {"pack_dtype": "int8"}}, ("dynamic", "pack_dtype")),
        ({"-:(": {}}, ("dynamic", "'-:('")),
        ([], ("dynamic []",)),
        ({f"-:{IN_EXPERTS}": {}}, (base(0, "down"), "is quantized", "a rule of the config")),
        ({r"-:.*\.1\.up_proj": {}, f"+:{IN_EXPERTS}": {"bits": 8, "sym": True}}, (base(1, "up"), "bfloat16", "int32")),
    ],
    ids=lambda value: next(iter(value), "none") if isinstance(value, dict) else "",
)
def test_gptq_rules_that_do_not_fit(tmp_path: Path, rules: Any, words: tuple[str, ...]) -> None:
    write_dynamic(tmp_path, rules, plain_up="up_proj" in str(rules))
    with pytest.raises(ValueError) as caught:
        ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0)
    assert [word for word in words if word not in str(caught.value)] == []


def changed(name: str, path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    config = copy.deepcopy(LAYOUTS[name].config)
    inner = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


WEIGHTS = ("config_groups", "group_0", "weights")
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("int8", ("'int8'",)),
        ({"quant_method": "bitnet"}, ("'bitnet'", "mxfp4")),
        ({"quant_method": ["fp8"]}, ("['fp8']",)),
        ({"quant_method": "awq", "bits": 3}, ("'awq'", "bits 3")),
        ({"quant_method": "awq", "bits": 4}, ("'awq'", "group_size None")),
        (changed("awq", ("group_size",), 24), ("(24)", "multiple of 16")),
        (changed("gptq", ("sym",), 1), ("'gptq'", "sym 1")),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, ("'modelopt'", "quant_algo 'W4A8_AWQ'")),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, ("config_groups None",)),
        (BLOCKS | {"is_checkpoint_fp8_serialized": False}, ("'fp8'", "is_checkpoint_fp8_serialized False")),
        (BLOCKS | {"activation_scheme": "token"}, ("'fp8'", "activation_scheme 'token'")),
        (BLOCKS | {"activation_scheme": "static"}, ("'fp8'", "scheme 'static'")),
        (BLOCKS | {"fmt": "e5m2"}, ("'fp8'", "fmt 'e5m2'")),
        (BLOCKS | {"weight_block_size": [128]}, ("'fp8'", "weight_block_size [128]")),
        (BLOCKS | {"weight_block_size": [100, 128]}, ("weight_block_size [100, 128]", "multiple of 16")),
        (changed("gptq", ("bits",), 3), ("'gptq'", "bits 3")),
        (changed("gptq", ("group_size",), "32"), ("group_size '32'",)),
        (changed("gptq", ("checkpoint_format",), "marlin"), ("checkpoint_format 'marlin'",)),
        (changed("awq", ("version",), "gemv"), ("version 'gemv'",)),
        (changed("pack_quantized", ("config_groups",), {}), ("config_groups {}",)),
        (changed("pack_quantized", ("config_groups", "group_1"), {"weights": FP8}), ("2 formats",)),
        (changed("pack_quantized", ("format",), "marlin-24"), ("format 'marlin-24'",)),
        (changed("pack_quantized", ("format",), ["dense"]), ("format ['dense']",)),
        (changed("pack_quantized", (*WEIGHTS, "num_bits"), 3), ("num_bits 3",)),
        (changed("pack_quantized", (*WEIGHTS, "strategy"), "attn_head"), ("strategy 'attn_head'",)),
        (changed("pack_quantized", (*WEIGHTS[:2], "input_activations"), FP4), ("input_activations",)),
        (changed("pack_quantized", (*WEIGHTS[:2], "weights"), 3), ("config_groups",)),
        (changed("int8_token", (*WEIGHTS, "symmetric"), False), ("symmetric False",)),
        (changed("nvfp4_compressed", (*WEIGHTS, "group_size"), 32), ("group_size 32",)),
        (changed("fp8_blocks", (*WEIGHTS[:2], "input_activations", "group_size"), 64), ("group_size 64",)),
        (changed("mxfp4_compressed", (*WEIGHTS[:2], "input_activations"), FP4), ("input_activations", "'num_bits': 4")),
        (changed("nvfp4_compressed", ("transform_config",), {"config_groups": {"u": {}}}), ("transform_config",)),
        (changed("pack_quantized", ("sparsity_config",), {"format": "sparse-24-bitmask"}), ("sparse-24-bitmask",)),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, config: Any, words: tuple[str, ...]) -> None:
    write(tmp_path, "gptq")
    write_config(tmp_path, config)
    with pytest.raises(ValueError) as caught:
        Checkpoint.open(tmp_path)
    read = () if "multiple of 16" in words else ("bfloat16", "fp8 e4m3 with weight_block_size [n, k]")
    assert [word for word in ("config.json", *words, *read) if word not in str(caught.value)] == []


@pytest.mark.parametrize("name", ["nvfp4_modelopt", "nvfp4_compressed"])
def test_other_names_of_the_quantization(name: str, tmp_path: Path) -> None:
    """ModelOpt's own file, and compressed-tensors' older key; without arithmetic of transforms and sparsity."""
    _, real = write(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = config.pop("quantization_config")
    if name == "nvfp4_modelopt":
        own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    else:
        config["compression_config"] = quantized | {"transform_config": {}, "sparsity_config": {"format": "dense"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 1), 0)[0]
    assert found.scheme.name == LAYOUTS[name].scheme
    assert torch.equal(dequantize_weight(found.w2, found.scheme)[0], real[base(0, "down")])


@pytest.mark.parametrize("name", ["gptq", "fp8_static"])
def test_biases_without_a_place(name: str, tmp_path: Path) -> None:
    """Zeros, as AutoGPTQ writes them, are left out everywhere; others are an error on every rank."""
    tensors, real = write(tmp_path, name)
    biases = {f"{base(e, part)}.bias": torch.zeros(1) for e in range(EXPERTS) for part in ("gate", "up", "down")}
    save_file(tensors | biases, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    found = ExpertWeights.from_pretrained(checkpoint, Placement.linear(EXPERTS, 3), 0)[0]
    assert torch.equal(dequantize_weight(found.w2, found.scheme)[0], real[base(0, "down")])
    assert not [key for key in checkpoint.dense() if "bias" in key]
    biases[f"{base(2, 'up')}.bias"] = torch.tensor([float("nan")])
    save_file(tensors | biases, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{base(2, 'up')}.bias in .* is not zero"):
        ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 3), 0)


@pytest.mark.parametrize(("hidden", "intermediate"), [(96, 64), (2880, 32)])
def test_gpt_oss_as_published(tmp_path: Path, hidden: int, intermediate: int) -> None:
    """Blocks [E, rows, G, 16], the rows of w13 gate and up in turn, biases likewise."""
    random, name = torch.Generator().manual_seed(3), "model.layers.0.mlp.experts"
    tensors: Tensors = {"model.norm.weight": torch.ones(hidden).bfloat16()}
    real: dict[str, torch.Tensor] = {}
    for part, rows, columns in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
        written = [microscaled("", four_bits=True)(rows, columns, random) for _ in range(EXPERTS)]
        tensors[f"{name}.{part}_blocks"] = torch.stack([w[0][""] for w in written]).reshape(EXPERTS, rows, -1, 16)
        tensors[f"{name}.{part}_scales"] = torch.stack([w[0][".weight_scale"] for w in written])
        tensors[f"{name}.{part}_bias"] = torch.randn(EXPERTS, rows, generator=random).bfloat16()
        real[part] = torch.stack([w[1] for w in written])
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "gpt_oss", "hidden_size": hidden, "intermediate_size": intermediate}
    config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "torch_dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 2), 1)[0]
    none = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 2), 1, scheme="none", dtype=F32)[0]
    a8 = ExpertWeights.from_pretrained(tmp_path, Placement.linear(EXPERTS, 2), 1, scheme="mxfp4_w4a8")[0]
    w13 = torch.cat([real["gate_up_proj"][2, 0::2], real["gate_up_proj"][2, 1::2]])
    bias = tensors[f"{name}.gate_up_proj_bias"][2]
    assert found.scheme.name == "mxfp4_w4a16"
    assert torch.equal(dequantize_weight(found.w13, found.scheme)[0], w13)
    assert torch.equal(dequantize_weight(found.w2, found.scheme)[0], real["down_proj"][2])
    assert torch.equal(dequantize_weight(a8.w13, a8.scheme)[0], w13)
    assert torch.equal(none.w13.values[0], w13)
    assert torch.equal(none.w2.values[0], real["down_proj"][2])
    assert found.w13_bias is not None
    assert found.w2_bias is not None
    assert torch.equal(found.w13_bias[0], torch.cat([bias[0::2], bias[1::2]]))
    assert torch.equal(found.w2_bias[0], tensors[f"{name}.down_proj_bias"][2])
