"""Reading one rank's experts: bit for bit as written, for any layout of files, and no other bytes."""

import json
import math
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.placement import Placement, create_placement
from ep_moe.quant import SCHEMES, dequantize_weight, get_scheme, quantize_weight
from ep_moe.testing import assert_same_bits
from ep_moe.weights import Checkpoint, ExpertWeights, storage
from ep_moe.weights.families import moe_layers

HIDDEN, INTERMEDIATE = 48, 32
LAYERS = (0, 2, 11)  # layer 1 is dense; 11 sorts after 2 as a number only
QUANTIZED = [name for name, scheme in SCHEMES.items() if scheme.weight.quantized]

CONFIGS = {
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 5, "intermediate_size": INTERMEDIATE},
}
NAMES = {  # prefix of an expert; gate, up, down; the router
    "qwen3_moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj"), "mlp.gate.weight"),
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2"), "block_sparse_moe.gate.weight"),
}


def expert_names(family: str, layer: int, expert: int) -> list[str]:
    prefix, parts, _ = NAMES[family]
    return [f"model.layers.{layer}.{prefix}.{expert}.{part}.weight" for part in parts]


def make_tensors(family: str, dtype: torch.dtype, num_experts: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {
        "model.embed_tokens.weight": values(11, HIDDEN),
        "model.layers.1.mlp.gate_proj.weight": values(INTERMEDIATE, HIDDEN),
        "lm_head.weight": values(11, HIDDEN),
    }
    for layer in LAYERS:
        tensors[f"model.layers.{layer}.{NAMES[family][2]}"] = values(num_experts, HIDDEN)
        for expert in range(num_experts):
            gate, up, down = expert_names(family, layer, expert)
            tensors[gate] = values(INTERMEDIATE, HIDDEN)
            tensors[up] = values(INTERMEDIATE, HIDDEN)
            tensors[down] = values(HIDDEN, INTERMEDIATE)
    return tensors


def write_config(directory: Path, family: str, **changes: object) -> None:
    config = {"model_type": family, "hidden_size": HIDDEN, "num_experts_per_tok": 2, "hidden_act": "silu"}
    (directory / "config.json").write_text(json.dumps(config | CONFIGS[family] | changes))


def write_checkpoint(
    directory: Path, family: str, *, num_files: int = 3, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Write a checkpoint with its tensors in random order in the files."""
    tensors = make_tensors(family, dtype)
    write_config(directory, family)
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors")
        return tensors
    names = list(tensors)
    random.Random(3).shuffle(names)
    weight_map = {}
    for number in range(num_files):
        file_name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        chosen = names[number::num_files]
        save_file({name: tensors[name] for name in chosen}, directory / file_name)
        weight_map |= dict.fromkeys(chosen, file_name)
    index = {"metadata": {}, "weight_map": dict(random.Random(4).sample(sorted(weight_map.items()), len(weight_map)))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def expected_layer(tensors: dict, family: str, layer: int, experts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up, down = [], []
    for expert in experts:
        gate, up, down_name = (tensors[name] for name in expert_names(family, layer, expert))
        gate_up.append(torch.cat([gate, up]))
        down.append(down_name)
    return torch.stack(gate_up), torch.stack(down)


def assert_layer(found: ExpertWeights, tensors: dict, family: str, layer: int, experts: list[int]) -> None:
    w13, w2 = expected_layer(tensors, family, layer, experts)
    assert torch.equal(found.w13.values, w13.to(found.w13.values.dtype))
    assert torch.equal(found.w2.values, w2.to(found.w2.values.dtype))


@pytest.mark.parametrize("name", ["linear", "round_robin"])
@pytest.mark.parametrize(("family", "num_files"), [("qwen3_moe", 1), ("qwen3_moe", 3), ("mixtral", 3)])
def test_every_rank_reads_its_experts_bit_for_bit(tmp_path: Path, family: str, num_files: int, name: str) -> None:
    tensors = write_checkpoint(tmp_path, family, num_files=num_files)
    owned = {"linear": [[0, 1, 2], [3, 4]], "round_robin": [[0, 2, 4], [1, 3]]}[name]
    for rank, experts in enumerate(owned):
        weights = ExpertWeights.from_pretrained(tmp_path, create_placement(name, 5, 2), rank)
        assert list(weights) == list(LAYERS)
        for layer, found in weights.items():
            assert found.w13.values.dtype == torch.bfloat16
            assert_layer(found, tensors, family, layer, experts)
            assert found.w13.scale is None
            assert found.scheme is SCHEMES["none"]


def test_redundant_copies_layers_and_dtype(tmp_path: Path) -> None:
    tensors = write_checkpoint(tmp_path, "qwen3_moe")
    placement = Placement((0, 1, 2, 4, 3, 4, 4, 0), (0, 4, 4, 8))
    weights = ExpertWeights.from_pretrained(tmp_path, placement, 2, layers=[11], dtype=torch.float32)
    assert list(weights) == [11]
    assert weights[11].w13.values.dtype == weights[11].w2.values.dtype == torch.float32
    assert_layer(weights[11], tensors, "qwen3_moe", 11, [3, 4, 4, 0])
    nothing = ExpertWeights.from_pretrained(tmp_path, placement, 1, layers=[0])[0]
    assert nothing.w13.values.shape == (0, 2 * INTERMEDIATE, HIDDEN)
    assert nothing.w2.values.shape == (0, HIDDEN, INTERMEDIATE)


STACKED = ("gate_up_proj", "down_proj")


def write_stacked(directory: Path, family: str) -> dict[str, torch.Tensor]:
    """Write a checkpoint in one file, each layer's experts stacked; returns the tensors of each expert."""
    tensors = make_tensors(family, torch.float16)
    stacked = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in LAYERS:
        for part, value in zip(STACKED, expected_layer(tensors, family, layer, list(range(5))), strict=True):
            stacked[f"model.layers.{layer}.mlp.experts.{part}"] = value
    save_file(stacked, directory / "model.safetensors")
    write_config(directory, family)
    return tensors


@pytest.mark.parametrize("scheme", ["none", QUANTIZED[0]])
@pytest.mark.parametrize("form", ["per_expert", "stacked"])
def test_a_rank_reads_its_experts_once_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, scheme: str
) -> None:
    (write_checkpoint if form == "per_expert" else write_stacked)(tmp_path, "mixtral")
    read_into, fill = storage.TensorReader.read_into, storage._fill
    asked: list[tuple[str, int]] = []
    num_bytes: list[int] = []

    def recording_read_into(self, stored, out):
        asked.append((stored.name, stored.offset))
        read_into(self, stored, out)

    def recording_fill(file, tensor, stored):
        num_bytes.append(tensor.numel() * tensor.element_size())
        fill(file, tensor, stored)

    monkeypatch.setattr(storage.TensorReader, "read_into", recording_read_into)
    monkeypatch.setattr(storage, "_fill", recording_fill)
    placement, stored = Placement.round_robin(5, 2), Checkpoint.open(tmp_path).tensors
    for rank in range(2):
        asked.clear()
        num_bytes.clear()
        ExpertWeights.from_pretrained(tmp_path, placement, rank, layers=[2, 11], scheme=scheme)
        owned = [(layer, expert) for layer in (2, 11) for expert in placement.local_experts(rank)]
        expected = {
            "per_expert": [(name, 0) for pair in owned for name in expert_names("mixtral", *pair)],
            "stacked": [(f"model.layers.{layer}.mlp.experts.{part}", e) for layer, e in owned for part in STACKED],
        }[form]
        expert_bytes = {name: math.prod(tensor.shape[-2:]) * 2 for name, tensor in stored.items()}
        starts = [(name, stored[name].offset + expert * expert_bytes[name]) for name, expert in expected]
        assert sorted(asked) == sorted(starts)
        assert sum(num_bytes) == len(owned) * 3 * HIDDEN * INTERMEDIATE * 2


def test_an_opened_checkpoint_is_a_source_and_config_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    read_bytes, reads = Path.read_bytes, []

    def recording(self):
        reads.append(self.name)
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", recording)
    checkpoint = Checkpoint.open(tmp_path)
    assert sorted(reads) == ["config.json", "model.safetensors.index.json"]
    placement = Placement.linear(5, 2)
    opened = ExpertWeights.from_pretrained(checkpoint, placement, 1)
    assert len(reads) == 2
    for layer, weights in ExpertWeights.from_pretrained(tmp_path, placement, 1).items():
        assert torch.equal(opened[layer].w13.values, weights.w13.values)
        assert torch.equal(opened[layer].w2.values, weights.w2.values)


def test_a_file_cut_short_while_it_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_moe", num_files=1)
    checkpoint, path = Checkpoint.open(tmp_path), tmp_path / "model.safetensors"
    last = max(checkpoint.tensors.values(), key=lambda stored: stored.offset)
    path.write_bytes(path.read_bytes()[:-10])
    with storage.TensorReader() as reader, pytest.raises(ValueError, match=rf"safetensors ends within {last.name}"):
        reader.read_into(last, torch.empty(last.shape, dtype=last.dtype))


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_quantizing_on_load_is_quantizing_the_whole(tmp_path: Path, scheme: str) -> None:
    tensors = write_checkpoint(tmp_path, "mixtral")
    weights = ExpertWeights.from_pretrained(tmp_path, Placement.linear(5, 2), 1, scheme=scheme)[2]
    w13, w2 = expected_layer(tensors, "mixtral", 2, [3, 4])
    for field, matrices in (("w13", w13), ("w2", w2)):
        found = getattr(weights, field)
        assert (found.global_scale is not None) == scheme.startswith("nvfp4")
        for position, matrix in enumerate(matrices):
            alone = quantize_weight(matrix, SCHEMES[scheme]).tensors
            assert alone.keys() == found.tensors.keys()
            for part, tensor in found[position].tensors.items():
                assert_same_bits(tensor, alone[part], f"{field}.{part}")
    nothing = ExpertWeights.from_pretrained(tmp_path, Placement.linear(5, 6), 5, scheme=scheme)[2]
    assert nothing.w13.scale.shape == (0, *weights.w13.scale.shape[1:])
    assert nothing.w13.global_scale is None or nothing.w13.global_scale.shape == (0,)


# fp8 on disk: per expert, or stacked as transformers keeps it.

DENSE = "model.layers.0.self_attn.o_proj.weight"
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def real(values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Dequantized fp8 values, [..., N, K] float32."""
    spread = scale.float().repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return values.float() * spread[..., : values.shape[-2], : values.shape[-1]]


def write_fp8(
    directory: Path,
    block: tuple[int, int],
    intermediate: int,
    *,
    scale_dtype: torch.dtype = torch.float32,
    form: str = "per_expert",
) -> dict[str, torch.Tensor]:
    """A checkpoint of layers 0 and 2 with values and scales at random, powers of two so that every dtype has them."""
    generator = torch.Generator().manual_seed(9)
    tensors: dict[str, torch.Tensor] = {"model.norm.weight": torch.randn(HIDDEN, generator=generator).bfloat16()}

    def add(name: str, *shape: int) -> None:
        tensors[name] = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        tiles = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
        tensors[f"{name}_scale_inv"] = (2.0 ** torch.randint(-6, 3, tiles, generator=generator)).to(scale_dtype)

    add(DENSE, 40, HIDDEN)
    for layer in (0, 2):
        if form == "stacked":
            add(f"model.layers.{layer}.mlp.experts.gate_up_proj", 5, 2 * intermediate, HIDDEN)
            add(f"model.layers.{layer}.mlp.experts.down_proj", 5, HIDDEN, intermediate)
            continue
        for expert in range(5):
            gate, up, down = expert_names("qwen3_moe", layer, expert)
            add(gate, intermediate, HIDDEN)
            add(up, intermediate, HIDDEN)
            add(down, HIDDEN, intermediate)
    save_file(tensors, directory / "model.safetensors")
    quantized = QUANTIZATION | {"weight_block_size": block}
    changes = {"moe_intermediate_size": intermediate, "quantization_config": quantized, "torch_dtype": "bfloat16"}
    write_config(directory, "qwen3_moe", **changes)
    return tensors


def fp8_layer(tensors: dict[str, torch.Tensor], layer: int, expert: int, suffix: str = "") -> list[torch.Tensor]:
    """Values, or with a suffix scales, of gate, up and down."""
    return [tensors[f"{name}{suffix}"] for name in expert_names("qwen3_moe", layer, expert)]


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("block", "intermediate", "scheme"),
    [
        ((16, 32), 32, "fp8_block_16x32"),
        ((128, 128), 128, "fp8_block"),
        ((32, 16), 48, "fp8_block_16x16"),  # the gate ends within a block of 32 rows
        ((128, 64), 192, "fp8_block_64x64"),
        ((128, 128), 80, "fp8_block_16x128"),
    ],
    ids=["even", "deepseek", "odd_48", "odd_192", "odd_80"],
)
def test_fp8_is_kept_bit_for_bit(
    tmp_path: Path, block: tuple[int, int], intermediate: int, scheme: str, scale_dtype: torch.dtype
) -> None:
    tensors = write_fp8(tmp_path, block, intermediate, scale_dtype=scale_dtype)
    placement = Placement.round_robin(5, 2)
    for layer, found in ExpertWeights.from_pretrained(tmp_path, placement, 1).items():
        assert found.scheme == get_scheme(scheme)
        for index, expert in enumerate((1, 3)):
            gate, up, down = fp8_layer(tensors, layer, expert)
            scales = fp8_layer(tensors, layer, expert, "_scale_inv")
            assert_same_bits(found.w13.values[index], torch.cat([gate, up]), "w13")
            assert_same_bits(found.w2.values[index], down, "w2")
            expected = [real(values, scale, block) for values, scale in zip((gate, up, down), scales, strict=True)]
            w13 = dequantize_weight(found.w13[index], found.scheme)
            assert torch.equal(w13, torch.cat(expected[:2]))
            assert torch.equal(dequantize_weight(found.w2[index], found.scheme), expected[2])
            if scheme == "fp8_block_16x32":
                assert torch.equal(found.w13.scale[index], torch.cat(scales[:2]).float())
                assert torch.equal(found.w2.scale[index], scales[2].float())


@pytest.mark.parametrize("form", ["per_expert", "stacked"])
def test_fp8_becomes_another_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    block, placement = (16, 32), Placement.linear(5, 2)
    tensors = write_fp8(tmp_path, block, 48, form=form)
    kept = ExpertWeights.from_pretrained(tmp_path, placement, 1)[2]
    assert kept.scheme == get_scheme("fp8_block_16x32")
    for field, part in (("w13", "gate_up_proj"), ("w2", "down_proj")) if form == "stacked" else ():
        name, held = f"model.layers.2.mlp.experts.{part}", getattr(kept, field)
        assert_same_bits(held.values, tensors[name][3:], field)
        assert torch.equal(held.scale, tensors[f"{name}_scale_inv"][3:])
    monkeypatch.setattr(storage, "PORTION_BYTES", 40 * HIDDEN * 4)  # two rows of blocks
    w13, w2 = (real(matrix.values, matrix.scale, block) for matrix in (kept.w13, kept.w2))
    for dtype in (None, torch.float32):
        found = ExpertWeights.from_pretrained(tmp_path, placement, 1, scheme="none", dtype=dtype)[2]
        assert torch.equal(found.w13.values, w13.to(dtype or torch.bfloat16))
        assert torch.equal(found.w2.values, w2.to(dtype or torch.bfloat16))
        assert found.w13.scale is None
    for scheme in (SCHEMES["fp8_token"], get_scheme("fp8_block_32x32")):
        found = ExpertWeights.from_pretrained(tmp_path, placement, 1, scheme=scheme.name)[2]
        alone = quantize_weight(w13, scheme)
        assert_same_bits(found.w13.values, alone.values, scheme.name)
        assert torch.equal(found.w13.scale, alone.scale)
        assert found.w2.values.dtype == torch.float8_e4m3fn


def test_fp8_with_scales_that_are_powers_of_two_is_held_as_it_is(tmp_path: Path) -> None:
    """Asked for in `fp8_block_ue8m0`: the bits on disk, but experts of other scales are quantized again."""
    tensors = write_fp8(tmp_path, (128, 128), 128)
    gate, _, down = expert_names("qwen3_moe", 0, 3)
    tensors[f"{gate}_scale_inv"] *= 1.5
    save_file(tensors, tmp_path / "model.safetensors")
    placement = Placement.linear(5, 1)
    plain, held = (
        ExpertWeights.from_pretrained(tmp_path, placement, 0, layers=[0], scheme=scheme)[0]
        for scheme in (None, "fp8_block_ue8m0")
    )
    assert (plain.scheme.name, held.scheme.name) == ("fp8_block", "fp8_block_ue8m0")
    for expert in range(5):
        for field in ("w13", "w2"):
            there, found = getattr(plain, field)[expert], getattr(held, field)[expert]
            if (expert, field) == (3, "w13"):
                found_again = quantize_weight(dequantize_weight(there, plain.scheme), held.scheme)
                assert not torch.equal(found.scale, there.scale)
                there = found_again
            assert_same_bits(found.values, there.values, f"{field} of {expert}")
            assert torch.equal(found.scale, there.scale)
    assert torch.equal(plain.w2.values[3].view(torch.uint8), tensors[down].view(torch.uint8))


def test_fp8_without_a_word_in_the_config(tmp_path: Path) -> None:
    write_fp8(tmp_path, (16, 32), 32)
    write_config(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match=rf"{DENSE} .*float8_e4m3fn"):
        Checkpoint.open(tmp_path).dense()


BROKEN = expert_names("qwen3_moe", 2, 4)[1]


def _file_of(directory: Path, name: str) -> Path:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][name]


def _replace(directory: Path, name: str, value: torch.Tensor | None) -> None:
    path = _file_of(directory, name)
    tensors = load_file(path)
    tensors.pop(name)
    if value is not None:
        tensors[name] = value
    save_file(tensors, path)


def _edit_index(directory: Path, edit: object) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def _zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _add(path: Path, name: str, value: torch.Tensor) -> None:
    save_file(load_file(path) | {name: value}, path)


def _twice(directory: Path) -> None:
    other = next(path for path in sorted(directory.glob("*.safetensors")) if path != _file_of(directory, BROKEN))
    _add(other, BROKEN, _zeros(INTERMEDIATE, HIDDEN))


def _two_forms(directory: Path) -> None:
    path, name = _file_of(directory, BROKEN), "model.layers.2.mlp.experts.gate_up_proj"
    _add(path, name, _zeros(5, 2 * INTERMEDIATE, HIDDEN))
    _edit_index(directory, lambda weight_map: weight_map.update({name: path.name}))


def _missing(directory: Path) -> None:
    _replace(directory, BROKEN, None)
    _edit_index(directory, lambda weight_map: weight_map.pop(BROKEN))


def _cut_short(directory: Path) -> None:
    path = directory / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _no_safetensors(directory: Path) -> None:
    for path in directory.glob("model*"):
        path.unlink()


def replaced(value: torch.Tensor | None) -> Callable[[Path], None]:
    return lambda directory: _replace(directory, BROKEN, value)


def configured(**changes: object) -> Callable[[Path], None]:
    return lambda directory: write_config(directory, "qwen3_moe", **changes)


INDEX, SECOND = "model.safetensors.index.json", "model-00002-of-00003.safetensors"
DAMAGE: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing": (_missing, (BROKEN, "missing")),
    "not_where_the_index_says": (replaced(None), (BROKEN, "is not in", "safetensors")),
    "misshapen": (
        replaced(_zeros(HIDDEN, INTERMEDIATE)),
        (BROKEN, "safetensors", f"[{HIDDEN}, {INTERMEDIATE}]", f"[{INTERMEDIATE}, {HIDDEN}]"),
    ),
    "other_dtype": (replaced(_zeros(INTERMEDIATE, HIDDEN, dtype=torch.float16)), (BROKEN, "float16", "bfloat16")),
    "no_float": (
        replaced(_zeros(INTERMEDIATE, HIDDEN, dtype=torch.float8_e4m3fn)),
        (BROKEN, "float8_e4m3fn", "bfloat16"),
    ),
    "twice": (_twice, (BROKEN, "two files")),
    "two_forms": (_two_forms, ("layer 2 ", "two forms", "experts.gate_up_proj in ", "_proj.weight in ")),
    "absent_file": (lambda directory: (directory / SECOND).unlink(), (INDEX, SECOND, "not there")),
    "cut_short": (_cut_short, ("model-00003-of-00003.safetensors", "cut short")),
    "empty_index": (lambda directory: _edit_index(directory, dict.clear), (INDEX, "weight_map is empty")),
    "absent_layer": (configured(num_hidden_layers=9, mlp_only_layers=[1, 3]), ("no experts of layer 4", "[0, 2, 11]")),
    "no_layer": (
        configured(model_type="gpt_oss", num_local_experts=5, intermediate_size=32),
        ("no experts of layer 0",),
    ),
    "too_many_experts": (configured(num_experts=4), (".experts.4.", "num_experts is 4")),
    "unknown_family": (configured(model_type="dbrx"), ("dbrx", "qwen3_moe", "mixtral")),
    "unknown_activation": (configured(hidden_act="relu6"), ("relu6", "silu")),
    "quantized_on_disk": (configured(quantization_config={"quant_method": "hqq"}), ("hqq", "gptq", "bfloat16")),
    "no_safetensors": (_no_safetensors, ("neither model.safetensors nor",)),
    "no_config": (lambda directory: (directory / "config.json").unlink(), ("no config.json",)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_on_every_rank(tmp_path: Path, name: str) -> None:
    damage, fragments = DAMAGE[name]
    write_checkpoint(tmp_path, "qwen3_moe")
    damage(tmp_path)
    placement = Placement.linear(4 if name == "too_many_experts" else 5, 2)
    for rank in range(2):
        with pytest.raises(ValueError) as caught:
            ExpertWeights.from_pretrained(tmp_path, placement, rank)
        assert [fragment for fragment in fragments if fragment not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "qwen3_moe", "num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1, 5]),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 5, "first_k_dense_replace": 3}, [3, 4]),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 5}, []),
        ({"model_type": "mixtral", "num_hidden_layers": 2}, [0, 1]),
        ({"model_type": "mixtral"}, []),
    ],
)
def test_layers_that_a_config_names(config: dict[str, Any], layers: list[int]) -> None:
    assert list(moe_layers(config, "config.json")) == layers


MALFORMED = {
    "empty": b"",
    "cut_short": b'{"model_type": "qwen3_moe"',
    "list": b"[]",
    "null": b"null",
    "number": b"3",
    "text": b'"model"',
    "deep": b'{"a": ' + b"[" * 100_000,
    "not_utf8": b'{"model_type": "\xff"}',
    "utf16": json.dumps({"model_type": "qwen3_moe"}).encode("utf-16"),
    "digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize(
    "file_name", ["config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors"]
)
def test_a_file_without_a_json_object_is_named(tmp_path: Path, file_name: str, content: bytes) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    header = struct.pack("<Q", len(content)) if file_name.endswith("safetensors") else b""
    (tmp_path / file_name).write_bytes(header + content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / file_name))}") as caught:
        Checkpoint.open(tmp_path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda index: index.pop("weight_map"), "weight_map (None) is not a JSON object"),
        (lambda index: index.update(weight_map=["a"]), "weight_map (['a']) is not a JSON object"),
        (lambda index: index["weight_map"].update({BROKEN: 3}), f"weight_map: {BROKEN} (3) is not a text"),
        (lambda index: index["weight_map"].update({BROKEN: None}), f"weight_map: {BROKEN} (None) is not a text"),
        (lambda index: index["weight_map"].update({BROKEN: "a\0b"}), "names 'a\\x00b', which is not there"),
        (lambda index: index["weight_map"].update({BROKEN: "a" * 5000}), "aaa..., which is not there"),
        (lambda index: index["weight_map"].update({BROKEN: ""}), "names '', which is not there"),
    ],
    ids=["missing", "list", "number", "null", "no_name", "long_name", "empty"],
)
def test_an_index_of_other_types_is_told(tmp_path: Path, edit: object, words: str) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index)
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + re.escape(words)):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("form", ["parent", "within", "absolute"])
def test_an_index_names_no_file_of_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """Even if the file exists and holds the tensor."""
    folder, outside = tmp_path / "model", tmp_path / "secret.safetensors"
    folder.mkdir()
    tensors = write_checkpoint(folder, "qwen3_moe")
    _replace(folder, BROKEN, None)
    save_file({BROKEN: tensors[BROKEN]}, outside)
    names = {"parent": "../secret.safetensors", "within": "a/../../secret.safetensors", "absolute": str(outside)}
    _edit_index(folder, lambda weight_map: weight_map.update({BROKEN: names[form]}))
    monkeypatch.setattr(storage, "read_header", lambda path: pytest.fail(f"{path} is read"))
    words = f"{folder}/model.safetensors.index.json: weight_map: {BROKEN} ('{names[form]}') is not in the checkpoint's"
    with pytest.raises(ValueError, match=re.escape(words)):
        Checkpoint.open(folder)


def test_links_and_folders_within_a_checkpoint(tmp_path: Path) -> None:
    """Hugging Face's cache keeps links in a snapshot's folder, and the files in another."""
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    tensors = write_checkpoint(snapshot, "mixtral")
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..", "..", "blobs", str(number)))
    (snapshot / "part").mkdir()
    first = "model-00001-of-00003.safetensors"
    (snapshot / first).rename(snapshot / "part" / first)
    target = (snapshot / "part" / first).readlink()
    (snapshot / "part" / first).unlink()
    (snapshot / "part" / first).symlink_to(Path("..") / target)
    _edit_index(
        snapshot,
        lambda weight_map: weight_map.update({k: f"part/{first}" for k, v in weight_map.items() if v == first}),
    )
    weights = ExpertWeights.from_pretrained(snapshot, Placement.linear(5, 1), 0)
    for layer, found in weights.items():
        assert_layer(found, tensors, "mixtral", layer, list(range(5)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"layers": [0, 1]}, r"layer 1 .*\[0, 2, 11\]"),
        ({"placement": Placement.linear(6, 2)}, r"placement has 6 experts, .* has 5"),
        ({"rank": 2}, r"rank \(2\)"),
        ({"dtype": torch.int8}, r"torch.int8.*bfloat16"),
        ({"scheme": "fp3"}, "fp3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    write_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(ValueError, match=words):
        ExpertWeights.from_pretrained(tmp_path, **{"placement": Placement.linear(5, 2), "rank": 0} | arguments)


def measured(group: EPGroup, directory: Path, num_ranks: int, dtype: torch.dtype, scheme: str) -> tuple[int, int]:
    """The bytes of the largest rank's experts, and those that the process takes at most while it reads them."""

    def bytes_of(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))

    def read(ranks: int) -> dict[int, ExpertWeights]:
        placement = Placement.round_robin(EXPERTS_LARGE, ranks)
        return ExpertWeights.from_pretrained(directory, placement, ranks - 1, dtype=dtype, scheme=scheme)

    torch.set_num_threads(1)
    storage.PORTION_BYTES = 2 << 20
    read(EXPERTS_LARGE)  # one expert: what code takes of memory
    resident, weights = bytes_of("VmRSS"), read(num_ranks)
    return sum(layer.num_bytes for layer in weights.values()), bytes_of("VmHWM") - resident


HIDDEN_LARGE, INTERMEDIATE_LARGE, EXPERTS_LARGE = 512, 384, 80


def large_tensors(kind: str, layer: int) -> dict[str, tuple[str, list[int]]]:
    """The expert tensors of a layer: dtype and shape."""
    hidden, intermediate = HIDDEN_LARGE, INTERMEDIATE_LARGE
    prefix = f"model.layers.{layer}.mlp.experts"
    if kind == "gpt_oss":
        return {
            f"{prefix}.gate_up_proj": ("BF16", [EXPERTS_LARGE, hidden, 2 * intermediate]),
            f"{prefix}.gate_up_proj_bias": ("BF16", [EXPERTS_LARGE, 2 * intermediate]),
            f"{prefix}.down_proj": ("BF16", [EXPERTS_LARGE, intermediate, hidden]),
            f"{prefix}.down_proj_bias": ("BF16", [EXPERTS_LARGE, hidden]),
        }
    found: dict[str, tuple[str, list[int]]] = {}
    for expert in range(EXPERTS_LARGE):
        for part in ("gate_proj", "up_proj", "down_proj"):
            shape = [hidden, intermediate] if part == "down_proj" else [intermediate, hidden]
            name = f"{prefix}.{expert}.{part}.weight"
            found[name] = ("F8_E4M3" if kind == "fp8" else "BF16", shape)
            if kind == "fp8":
                found[f"{name}_scale_inv"] = ("F32", [size // 128 for size in shape])
    return found


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    """A checkpoint of 0.19 GB: layers of 80 experts, a file for each layer, written a tensor at a time."""
    directory, kind = tmp_path_factory.mktemp("large"), request.param
    if shutil.disk_usage(directory).free < 1 << 30:
        pytest.skip("needs 1 GB of disk")
    config = {"model_type": "gpt_oss" if kind == "gpt_oss" else "qwen3_moe", "hidden_size": HIDDEN_LARGE}
    config |= {"moe_intermediate_size": INTERMEDIATE_LARGE, "intermediate_size": INTERMEDIATE_LARGE}
    config |= {"num_experts": EXPERTS_LARGE, "num_experts_per_tok": 2, "hidden_act": "silu", "dtype": "bfloat16"}
    if kind == "fp8":
        config |= {"quantization_config": QUANTIZATION | {"weight_block_size": [128, 128]}}
    (directory / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for layer in range(4 if kind == "fp8" else 2):
        entries, end = {}, 0
        for name, (dtype, shape) in large_tensors(kind, layer).items():
            start, end = end, end + math.prod(shape) * storage.SAFETENSORS_DTYPES[dtype].itemsize
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        header = json.dumps(entries).encode()
        data = torch.rand(1 << 20).bfloat16().view(torch.uint8).numpy().tobytes()
        with open(directory / f"model-{layer}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for start in range(0, end, len(data)):
                file.write(data[: end - start])
        weight_map |= dict.fromkeys(entries, f"model-{layer}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    yield directory
    shutil.rmtree(directory)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' accounts of memory")
@pytest.mark.parametrize(
    ("large", "num_ranks", "dtype", "scheme"),
    [
        pytest.param("bfloat16", 2, "bfloat16", "none", marks=pytest.mark.matrix),
        pytest.param("bfloat16", 4, "float32", "none", marks=pytest.mark.matrix),
        ("bfloat16", 2, "bfloat16", QUANTIZED[0]),
        pytest.param("fp8", 2, "bfloat16", "fp8_block", marks=pytest.mark.matrix),
        ("fp8", 4, "bfloat16", "none"),
        ("gpt_oss", 2, "bfloat16", "none"),
    ],
    ids=["as_it_is", "converted", "quantized", "fp8_as_it_is", "dequantized", "transposed"],
    indirect=["large"],
)
def test_a_large_checkpoint_takes_the_shard_and_little_more(
    large: Path, num_ranks: int, dtype: str, scheme: str
) -> None:
    assert sum(path.stat().st_size for path in large.glob("*.safetensors")) > 180_000_000
    [(shard, peak)] = launch(measured, large, num_ranks, getattr(torch, dtype), scheme, num_ranks=1, device="cpu")
    assert shard > 30_000_000
    assert 0.9 * shard < peak < 1.3 * shard
