"""SGLang's `FusedMoE` with weights in int32, of checkpoints that are written here from the published layouts."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.experts_oracle import expert_rows, load, ranks, routed_rows, same
from helpers.quantized_layouts import EXPERTS, GROUP, HIDDEN, INTERMEDIATE, LAYOUTS, ActOrder, base, layer_of, write
from safetensors.torch import load_file, save_file

from ep_moe.functional.sglang import FusedMoE, StandardTopKOutput
from ep_moe.testing import assert_same_bits, worst_row_error

PREFIX, TOKENS, TOPK = "model.layers.0.mlp.experts", 9, 2
PACKED = [name for name in LAYOUTS if name.startswith(("gptq", "awq", "pack_quantized"))]
LIMIT = 2e-2  # sums in bfloat16 weights' dtype, and an intermediate in bfloat16


def made(name: str, **options: Any) -> FusedMoE:
    given = {"params_dtype": torch.bfloat16, "quant_config": LAYOUTS[name].config, "inplace": False} | options
    return FusedMoE(EXPERTS, HIDDEN, INTERMEDIATE, 0, **given)


def routed() -> tuple[torch.Tensor, StandardTopKOutput]:
    random = torch.Generator().manual_seed(7)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(1)[:, :TOPK].int()
    return torch.randn(TOKENS, HIDDEN, generator=random).bfloat16(), StandardTopKOutput(
        torch.rand(TOKENS, TOPK, generator=random) / 100, ids, None
    )


def summed(real: dict[str, torch.Tensor], x: torch.Tensor, output: StandardTopKOutput) -> torch.Tensor:
    """The weighted sums, of the real numbers that were written."""

    def expert(number: int, rows: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        return expert_rows(rows, *layer_of(real, number), factors=factors)

    return routed_rows(x, output.topk_ids, output.topk_weights, expert, EXPERTS).sum(1)


@pytest.mark.parametrize("name", PACKED)
def test_checkpoints_are_loaded_as_by_our_own_loader(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, real = write(tmp_path, name)
    experts = sum(PREFIX in key for key in tensors)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        layer = made(name, parallel=ranks(monkeypatch, rank, ep=size))
        assert load(layer, tensors) == experts
        same(layer, tmp_path, rank, size)
    whole = made(name)
    load(whole, tensors)
    x, output = routed()
    found = whole(x, output)
    if "fp8" not in name:  # whose tokens are rounded too
        assert float(worst_row_error(found, summed(real, x, output))) < LIMIT
    total = torch.zeros(TOKENS, HIDDEN)
    for rank in range(2):
        share = made(name, parallel=ranks(monkeypatch, rank, tp=2))
        load(share, tensors)
        total += share(x, output).float()
    assert float(worst_row_error(total, found.float())) < (5e-2 if "fp8" in name else LIMIT)
    before = found.clone()
    doubled = {key: tensor * 2 for key, tensor in tensors.items() if "down" in key and key.endswith("scale")}
    doubled |= {key: tensor * 2 for key, tensor in tensors.items() if "down" in key and key.endswith("scales")}
    load(whole, doubled)  # a loader is called again
    assert torch.equal(whole(x, output), before * 2)
    restored = made(name)
    restored.load_state_dict(whole.state_dict())
    assert torch.equal(restored(x, output), before * 2)


def assigned(layer: FusedMoE) -> FusedMoE:
    twin = copy.deepcopy(layer)
    twin.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict().items()}, assign=True)
    return twin


COPIES: dict[str, Callable[[FusedMoE], FusedMoE]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "to_empty": lambda layer: copy.deepcopy(layer).to("meta").to_empty(device="cpu"),
    "assigned": assigned,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_load_and_compute_on_their_own(how: str, tmp_path: Path) -> None:
    tensors, _ = write(tmp_path, "awq")
    layer, (x, output) = made("awq"), routed()
    load(layer, tensors)
    before = layer(x, output)  # after it the layer keeps weights that were made of its parameters
    twin = COPIES[how](layer)
    load(twin, tensors)
    assert torch.equal(twin(x, output), before)
    with pytest.raises(ValueError, match="loaded before are torch.float16"):
        load(twin, {key: tensor.bfloat16() for key, tensor in tensors.items() if key.endswith("scales")})
    scaled = {key: tensor / 2 if "scale" in key else tensor for key, tensor in layer.state_dict().items()}
    twin.load_state_dict(scaled)
    halved = twin(x, output)
    assert not torch.equal(halved, before)
    assert torch.equal(layer(x, output), halved if how == "copy" else before)  # a shallow copy shares the parameters
    torch._dynamo.reset()
    assert torch.equal(torch.compile(lambda x: twin(x, output), backend="aot_eager", fullgraph=True)(x), halved)


@pytest.mark.parametrize("name", ["gptq_v2", "awq", "pack_quantized"])
def test_objects_describe_formats_too(name: str, tmp_path: Path) -> None:
    """With the attributes of SGLang 0.5.17's GPTQConfig, AWQConfig and CompressedTensorsConfig."""
    config = LAYOUTS[name].config
    bits, group = 4, GROUP
    attributes: dict[str, Any] = {
        "gptq_v2": {"weight_bits": bits, "group_size": group, "desc_act": False, "checkpoint_format": "gptq_v2"},
        "awq": {"weight_bits": bits, "group_size": group, "zero_point": True, "modules_to_not_convert": ["lm_head"]},
        "pack_quantized": {"config": config, "ignore": ["re:.*layers.1.mlp"], "quant_format": "pack-quantized"},
    }[name]
    said = {"gptq_v2": "gptq", "pack_quantized": "compressed_tensors"}.get(name, name)
    quantized = SimpleNamespace(get_name=lambda: said, **attributes)
    tensors, _ = write(tmp_path, name)
    layer = made(name, quant_config=quantized, prefix=PREFIX)
    assert load(layer, tensors) == sum(PREFIX in key for key in tensors)
    same(layer, tmp_path)
    other = made(name, quant_config=quantized, prefix="model.layers.1.mlp.experts")
    assert hasattr(other, "w13_weight") == (name == "pack_quantized")  # not quantized there


@pytest.mark.parametrize("name", ["gptq", "pack_quantized"])
def test_columns_in_another_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Act-order: any columns of a group's size belong to a group, in gate and up the same."""
    tensors, real = write(tmp_path, name)
    act_order = ActOrder(name, tensors, real, 3)
    suffix, (x, output) = act_order.suffix, routed()

    def check() -> FusedMoE:
        save_file(tensors, tmp_path / "model.safetensors")
        layer = made(name)
        load(layer, load_file(tmp_path / "model.safetensors"))
        same(layer, tmp_path)
        assert float(worst_row_error(layer(x, output), summed(real, x, output))) < LIMIT
        return layer

    for expert in range(EXPERTS):
        act_order.shuffle(base(expert, "down"))
    assert check().expert_weights.w13_order is None
    for expert in range(EXPERTS - 1):  # the last one has its columns in order
        act_order.shuffle(base(expert, "up"), act_order.shuffle(base(expert, "gate")))
    layer = check()
    restored = made(name)
    restored.load_state_dict(layer.state_dict())
    assert_same_bits(restored(x, output), layer(x, output), "of a state")
    share = made(name, parallel=ranks(monkeypatch, 0, tp=2))
    with pytest.raises(ValueError, match=f"{base(0, 'down')}.*another order.*shares of ranks"):
        load(share, tensors)
    key = f"{base(1, 'up')}{suffix}"
    load(layer, {key: tensors[key].flip(0)})
    with pytest.raises(ValueError, match=f"w13{suffix} of local expert 1 differs between the gate and the up half"):
        _ = layer.expert_weights
    load(layer, {key: tensors[key], f"{base(1, 'down')}{suffix}": torch.zeros(INTERMEDIATE, dtype=torch.int32)})
    with pytest.raises(ValueError, match=f"w2{suffix} of local expert 1 does not have 32 columns in each group"):
        _ = layer.expert_weights


BAD = [
    ("gptq", ".qweight", lambda t: t[:-1], r"qweight is \(64, 88\); \(64, 96\) needed"),
    ("gptq", ".qweight", lambda t: t.float(), r"qweight is \(12, 64\) torch.float32; a matrix of int32"),
    ("gptq", ".scales", lambda t: t[:2], r"scales is \(64, 2\); \(64, 3\) needed"),
    ("gptq", ".scales", lambda t: -t, "scales has negative scales"),
    ("gptq", ".scales", lambda t: t.int(), "scales is torch.int32; one of float32"),
    ("gptq", ".scales", lambda t: t.float(), "scales is torch.float32, scales of w13_scales .* torch.float16"),
    ("gptq", ".qzeros", lambda t: t[:1], r"qzeros is \(64, 1\); \(64, 3\) needed"),
    ("gptq", ".g_idx", lambda t: t[:5], r"g_idx is \(5,\) torch.int32; \(96,\) of integers"),
    ("gptq_symmetric_channel", ".qzeros", lambda t: t * 0, "zero points other than 8.*symmetric"),
    ("awq", ".qweight", lambda t: t[:, :-1], r"qweight is \(56, 96\); \(64, 96\) needed"),
    ("pack_quantized", ".weight_packed", lambda t: t[:, :-1], r"weight_packed is \(64, 88\); \(64, 96\) needed"),
]


@pytest.mark.parametrize(("name", "suffix", "damage", "words"), BAD)
def test_bad_tensors_are_named(name: str, suffix: str, damage: Any, words: str, tmp_path: Path) -> None:
    tensors, _ = write(tmp_path, name)
    layer = made(name)
    load(layer, tensors)
    key = f"{base(0, 'up')}{suffix}"
    with pytest.raises(ValueError, match=words):
        load(layer, {key: damage(tensors[key])})


def test_bad_sizes_and_shards(tmp_path: Path) -> None:
    tensors, _ = write(tmp_path, "gptq")
    with pytest.raises(ValueError, match="w2 has 48 columns, groups of 32"):
        FusedMoE(EXPERTS, HIDDEN, 48, 0, quant_config=LAYOUTS["gptq"].config)
    layer = made("gptq")
    with pytest.raises(ValueError, match=r"shard_id \('w13'\).*w1 and w3 are loaded apart"):
        layer.weight_loader(layer.w13_qweight, torch.zeros(EXPERTS, 12, 128), "all", "w13", None)
    stacked = torch.stack([tensors[f"{base(expert, 'down')}.qweight"] for expert in range(EXPERTS)])
    layer.weight_loader(layer.w2_qweight, stacked, "all", "w2", None)
    own = made("gptq")
    load(own, tensors, only="down_proj.qweight")
    assert torch.equal(layer.w2_qweight, own.w2_qweight)


def test_gptq_rules_for_modules(tmp_path: Path) -> None:
    """Rules are matched with the names of experts in `prefix`; the whole layer has one."""
    tensors, _ = write(tmp_path, "gptq_int8")
    config = LAYOUTS["gptq"].config | {
        "dynamic": {r"+:.*layers\.0\..*_proj": {"bits": 8, "sym": True}, "-:.*layers.1": {}}
    }
    layer = made("gptq", quant_config=config, prefix=PREFIX)
    assert load(layer, tensors) == sum(PREFIX in key for key in tensors)
    same(layer, tmp_path)
    assert hasattr(made("gptq", quant_config=config, prefix="model.layers.1.mlp.experts"), "w13_weight")
    assert made("gptq", quant_config=config, prefix="model.layers.2.mlp.experts").w13_qweight.dtype == torch.uint8
    attributes = {"weight_bits": 4, "group_size": GROUP, "checkpoint_format": "gptq", "dynamic": config["dynamic"]}
    quantized = SimpleNamespace(get_name=lambda: "gptq", **attributes)
    assert hasattr(made("gptq", quant_config=quantized, prefix="model.layers.1.mlp.experts"), "w13_weight")
    for rules, prefix, words in (
        ({r"-:.*\.1\.up_proj": {}}, PREFIX, rf"different rules for {PREFIX}.0.gate_proj and {PREFIX}.1.up_proj"),
        ({r"+:.*\.w2": {"group_size": 16}}, PREFIX, rf"different rules for {PREFIX}.0.w1 and {PREFIX}.0.w2"),
        ({"-:.*layers.1": {}}, "", "rules for names of modules, and prefix is empty"),
    ):
        with pytest.raises(ValueError, match=words):
            made("gptq", quant_config=LAYOUTS["gptq"].config | {"dynamic": rules}, prefix=prefix)
