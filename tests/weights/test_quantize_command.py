"""`ep-moe quantize`: what it writes is read back as the same bits, and by transformers where it can."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.small_models import make_model
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config
from typer.testing import CliRunner

from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.cli import app
from ep_moe.engines.transformers import from_pretrained
from ep_moe.group import EPGroup
from ep_moe.placement import Placement
from ep_moe.quant import dequantize_weight, get_scheme
from ep_moe.testing import assert_same_bits, worst_row_error
from ep_moe.weights import Checkpoint, ExpertWeights, writing
from ep_moe.weights.storage import list_tensors
from ep_moe.weights.writing import write_quantized

ONE = Placement.linear(16, 1)
HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, 2
GATE = "model.layers.1.mlp.experts.1.gate_proj."
PLAIN, PACKED, INVERSE = {"weight", "weight_scale"}, {"weight_packed", "weight_scale"}, {"weight", "weight_scale_inv"}
INTEGERS = PACKED | {"weight_shape"}
POINTS = INTEGERS | {"weight_zero_point"}
WRITTEN = [  # scheme, the tensors of a gate, and what is read back if it is another one
    ("fp8_block", INVERSE, "fp8_block"),
    ("fp8_block_64x32", INVERSE, "fp8_block_64x32"),
    ("fp8_token", PLAIN, "fp8_token"),
    ("fp8_tensor", PLAIN, "fp8_tensor_channel"),
    ("fp8_tensor_channel", PLAIN, "fp8_tensor_channel"),
    ("fp8_w8a16", PLAIN, "fp8_w8a16"),
    ("fp8_w8a16_block", PLAIN, "fp8_w8a16_block"),
    ("int8_token", PLAIN, "int8_token"),
    ("int8_block", PLAIN, "int8_block"),
    ("int8_w8a16", PLAIN, "int8_w8a16"),
    ("int8_w8a16_g64", INTEGERS, "int8_w8a16_g64"),
    ("int8_w8a16_g32_zp", POINTS, "int8_w8a16_g32_zp"),
    ("int8_w8a16_zp", POINTS, "int8_w8a16_zp"),
    ("int4_w4a16", INTEGERS, "int4_w4a16"),
    ("int4_w4a16_g32_zp_f16", POINTS, "int4_w4a16_g32_zp_f16"),
    ("int4_w4a8_g128", INTEGERS, "int4_w4a8_g128"),
    ("fp8_w8a16_tensor", PLAIN, "fp8_w8a16"),
    ("mxfp8", PLAIN, "mxfp8"),
    ("mxfp8_w8a16", PLAIN, "mxfp8_w8a16"),
    ("mxfp4_w4a16", PACKED, "mxfp4_w4a16"),
    ("mxfp4_w4a8", PACKED, "mxfp4_w4a8"),
    ("nvfp4", PLAIN | {"weight_scale_2"}, "nvfp4"),
    ("nvfp4_w4a16", PLAIN | {"weight_scale_2"}, "nvfp4_w4a16"),
    ("nvfp4_divisor", PACKED | {"weight_global_scale"}, "nvfp4_divisor"),
    ("nvfp4_w4a16_divisor", PACKED | {"weight_global_scale"}, "nvfp4_w4a16_divisor"),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer with two experts, in bfloat16."""
    directory, random = tmp_path_factory.mktemp("small"), torch.Generator().manual_seed(4)
    shapes = {"model.norm.weight": (HIDDEN,), "model.layers.1.self_attn.q_proj.weight": (64, HIDDEN)}
    for expert in range(EXPERTS):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        shapes |= {f"{prefix}.{part}_proj.weight": (INTERMEDIATE, HIDDEN) for part in ("gate", "up")}
        shapes[f"{prefix}.down_proj.weight"] = HIDDEN, INTERMEDIATE
    tensors = {name: torch.randn(*shape, generator=random).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    config = {"model_type": "qwen3_moe", "hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE}
    config |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "hidden_act": "silu", "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(("name", "parts", "read_as"), WRITTEN, ids=lambda value: value if type(value) is str else "")
def test_what_is_written_is_what_quantizing_on_load_gives(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, parts: set[str], read_as: str
) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 1)  # each of the two other tensors in a file
    source, placement = Checkpoint.open(small), Placement.linear(EXPERTS, 1)
    written = write_quantized(source, get_scheme(name), tmp_path / "out")
    assert written.layers == 1
    assert written.bytes_after < 0.7 * written.bytes_before
    expected = ExpertWeights.from_pretrained(source, placement, 0, scheme=name)[1]
    found = ExpertWeights.from_pretrained(tmp_path / "out", placement, 0)[1]
    assert found.scheme.name == read_as
    if name not in ("fp8_tensor", "fp8_w8a16_tensor"):  # gate and up have scales of their own on disk
        for part in ("w13", "w2"):
            for key, tensor in getattr(expected, part).tensors.items():
                assert_same_bits(getattr(found, part).tensors[key], tensor, f"{part}.{key}")
    tensors = list_tensors(tmp_path / "out")
    assert {stored.file.name for stored in tensors.values()} == {f"model-0000{n}-of-00003.safetensors" for n in "123"}
    assert {key.removeprefix(GATE) for key in tensors if key.startswith(GATE)} == parts
    before, after = (dict(Checkpoint.open(path).dense().items()) for path in (small, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4_w4a16"])
def test_exponents_are_declared(small: Path, tmp_path: Path, name: str) -> None:
    """compressed-tensors tells mxfp8 from fp8 in groups of 32 by the dtype of the scales."""
    write_quantized(Checkpoint.open(small), get_scheme(name), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    declared = {part: (group[part] or {}).get("scale_dtype") for part in ("weights", "input_activations")}
    assert declared == {"weights": "torch.uint8", "input_activations": "torch.uint8" if name == "mxfp8" else None}


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["quantize", "--scheme", "int4_w4a16_g32", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["layers"], report["scheme"]) == (4, "int4_w4a16_g32")
    assert report["expert_bytes_after"] < 0.29 * report["expert_bytes_before"]  # 4.5 bits of 16, and the shapes
    assert {path.name for path in SHIPPED_MODEL.iterdir()} - {path.name for path in out.iterdir()} == {
        "model.safetensors"
    }
    assert {path.stat().st_mode & 0o777 for path in out.glob("*.safetensors")} == {out.stat().st_mode & 0o666}
    again = CliRunner().invoke(app, ["quantize", "--scheme", "int4_w4a16_g32", "--out", str(out)])
    assert again.exit_code == 2
    assert "exists and is not empty" in again.stderr
    twice = CliRunner().invoke(
        app, ["quantize", "--model", str(out), "--scheme", "fp8_block", "--out", str(tmp_path / "b")]
    )
    assert "is quantized already (compressed-tensors)" in twice.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none", "does not quantize weights"),
        ("fp8_block_ue8m0", "has no layout on disk"),
        ("int4_w4a16_g48", "groups of 48 do not divide a row of 256"),
        ("int3", "is not one of none"),
        ("fp8_token", "has no experts of layer 0"),
    ],
)
def test_what_cannot_be_written(small: Path, tmp_path: Path, name: str, words: str) -> None:
    source = Checkpoint.open(small)
    source = dataclasses.replace(source, raw={**source.raw, "num_hidden_layers": 2})
    with pytest.raises(ValueError, match=re.escape(words)):
        write_quantized(source, get_scheme(name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def gpt_oss(directory: Path) -> Any:
    """A small random gpt-oss, with biases and rows of several magnitudes."""
    model = make_model("gpt_oss", seed=3, hidden_size=96, num_local_experts=4)
    for value in model.state_dict().values():
        if torch.equal(value, torch.zeros_like(value)):
            value += 0.3 * torch.randn_like(value)
    model.save_pretrained(directory)
    return model


def test_mxfp4_as_transformers_reads_it(tmp_path: Path) -> None:
    """transformers dequantizes gpt-oss' blocks on a CPU: the same weights bit for bit, and the same logits."""
    gpt_oss(tmp_path / "plain")
    checkpoint = Checkpoint.open(tmp_path / "plain")
    write_quantized(checkpoint, get_scheme("mxfp4_w4a16"), tmp_path / "out")
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        quantization_config=Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        experts_implementation="eager",
    )
    held = ExpertWeights.from_pretrained(tmp_path / "out", Placement.linear(4, 1), 0)
    for layer, weights in held.items():
        experts = theirs.model.layers[layer].mlp.experts
        assert weights.scheme.name == "mxfp4_w4a16"
        w13, w2 = (dequantize_weight(matrix, weights.scheme) for matrix in (weights.w13, weights.w2))
        their_w13 = torch.cat([experts.gate_up_proj[..., 0::2], experts.gate_up_proj[..., 1::2]], dim=-1).mT
        assert torch.equal(w13, their_w13)
        assert torch.equal(w2, experts.down_proj.mT)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    ours = from_pretrained(tmp_path / "out", EPGroup.single("cpu"), dtype=torch.float32)
    with torch.no_grad():
        assert worst_row_error(ours(ids).logits, theirs.eval()(ids).logits) < 1e-5
    with pytest.raises(ValueError, match="gpt-oss is written in mxfp4_w4a16"):
        write_quantized(checkpoint, get_scheme("fp8_token"), tmp_path / "other")
    make_model("gpt_oss", hidden_size=48).save_pretrained(tmp_path / "narrow")
    with pytest.raises(ValueError, match="blocks of 32 do not divide a row of 48"):
        write_quantized(Checkpoint.open(tmp_path / "narrow"), get_scheme("mxfp4_w4a16"), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_fp8_as_transformers_reads_it(tmp_path: Path) -> None:
    write_quantized(Checkpoint.open(SHIPPED_MODEL), get_scheme("fp8_block_64x64"), tmp_path / "out")
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(64, 64)),
        dtype=torch.float32,
        experts_implementation="eager",
    )
    held = ExpertWeights.from_pretrained(tmp_path / "out", ONE, 0)
    for layer, weights in held.items():
        experts = theirs.model.layers[layer].mlp.experts
        assert torch.equal(dequantize_weight(weights.w13, weights.scheme), experts.gate_up_proj.float())
        assert torch.equal(dequantize_weight(weights.w2, weights.scheme), experts.down_proj.float())


@pytest.mark.parametrize("name", ["int4_w4a16_g32", "int4_w4a16_g32_zp", "int8_token", "fp8_token", "nvfp4_divisor"])
def test_compressed_tensors_reads_it(small: Path, tmp_path: Path, name: str) -> None:
    """The package's own decompressor, one weight at a time."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationConfig

    write_quantized(Checkpoint.open(small), get_scheme(name), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    [scheme] = QuantizationConfig.model_validate(config).config_groups.values()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    state = {}
    for key, file in index.items():
        if key.startswith(GATE):
            with safe_open(tmp_path / "out" / file, framework="pt") as opened:
                state[key.removeprefix(GATE)] = opened.get_tensor(key)
    found = compressors.BaseCompressor.get_value_from_registry(config["format"]).decompress(state, scheme)["weight"]
    held = ExpertWeights.from_pretrained(tmp_path / "out", Placement.linear(EXPERTS, 1), 0)[1]
    ours = dequantize_weight(held.w13, held.scheme)[1, :INTERMEDIATE]
    torch.testing.assert_close(found.float(), ours, rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", ["int4_w4a16_g32", "fp8_token"])
def test_compressed_tensors_as_transformers_reads_them(tmp_path: Path, name: str) -> None:
    """With dequantize=True, which needs the package; integers are dequantized in the dtype of their scales.

    transformers 5.23 does not hand zero points of experts to the package, so those it cannot read.
    """
    pytest.importorskip("compressed_tensors")
    write_quantized(Checkpoint.open(SHIPPED_MODEL), get_scheme(name), tmp_path / "out")
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        quantization_config=CompressedTensorsConfig(dequantize=True),
        dtype=torch.float32,
        experts_implementation="eager",
    )
    for layer, weights in ExpertWeights.from_pretrained(tmp_path / "out", ONE, 0).items():
        experts = theirs.model.layers[layer].mlp.experts
        for matrix, parameter in ((weights.w13, experts.gate_up_proj), (weights.w2, experts.down_proj)):
            ours = dequantize_weight(matrix, weights.scheme)
            torch.testing.assert_close(parameter.detach().float(), ours, rtol=2**-8, atol=0)
