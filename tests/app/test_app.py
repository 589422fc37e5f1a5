"""The shipped model, its text, its tokenizer and the script that trains it; and the same model in fp8."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.threads import one_thread  # noqa: F401
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from ep_moe.app.start import SHIPPED_MODEL, SHIPPED_TEXT
from ep_moe.cli import app
from ep_moe.engines.transformers import from_pretrained
from ep_moe.group import EPGroup
from ep_moe.quant import SCHEMES, quantize_weight


@pytest.fixture(scope="module")
def training() -> Any:
    """The script `docs/model/train.py` as a module."""
    spec = importlib.util.spec_from_file_location("train", SHIPPED_MODEL.parents[2] / "docs" / "model" / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "train", module)  # where dataclasses look for it
        spec.loader.exec_module(module)
        yield module


def test_a_listing_becomes_chapters_of_which_every_twentieth_is_held_out(training: Any) -> None:
    listing = "Ge1:1 In the  beginning\nGe1:2 And the earth\nGe2:1 Thus the heavens\n1John3:16 Hereby perceive we"
    assert training.parse(listing) == [
        "In the beginning\nAnd the earth\n",
        "Thus the heavens\n",
        "Hereby perceive we\n",
    ]
    for line in ("In the beginning", "Ge1 In the beginning", "Ge1:1", "", "4John1:1 That which"):
        with pytest.raises(ValueError, match=re.escape(f"line 2 ({line!r}) is not a verse")):
            training.parse(f"Ge1:1 In the beginning\n{line}\nGe1:3 And God said")
    texts = training.split([f"psalm {number}\n" for number in range(1, 46)])
    assert texts.heldout == b"psalm 20\n\npsalm 40\n"
    kept = [*range(1, 20), *range(21, 40), *range(41, 46)]
    assert texts.train == "\n".join(f"psalm {number}\n" for number in kept).encode()


def test_windows_do_not_overlap_and_leave_the_rest_out(training: Any) -> None:
    cut = training.windows(b"\x00ab\xff\x80xyz9", 4)
    assert cut.dtype == torch.int64
    assert cut.tolist() == [[0, 97, 98, 255], [128, 120, 121, 122]]
    with pytest.raises(ValueError, match="text of 3 bytes does not fill one window of 4"):
        training.windows(b"abc", 4)
    assert training.windows(SHIPPED_TEXT.read_bytes(), 512).shape == (128, 512)
    assert SHIPPED_TEXT.stat().st_size == training.SHIPPED_HELDOUT_BYTES


def test_the_shipped_tokenizer_reads_bytes(training: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    every = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 61), *range(0xE000, 0x110000, 997)]))
    ids = tokenizer(every, verbose=False)["input_ids"]
    assert ids == list(every.encode())
    assert tokenizer.decode(ids) == every
    never = sorted(set(range(256)) - set(ids))
    assert never == [0xC0, 0xC1, *range(0xF5, 0x100)]  # in no UTF-8 text, so that only their names can be asked for
    assert tokenizer.convert_tokens_to_ids([chr(byte) for byte in never]) == never
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))
    made = training.byte_tokenizer(1024)
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.model_max_length == tokenizer.model_max_length == 1024


def test_training_makes_a_model_that_loads(training: Any, tmp_path: Path) -> None:
    config = training.TrainConfig(steps=2, device="cpu", batch_size=2, window=32, warmup_steps=1)
    shipped = SHIPPED_TEXT.read_bytes()
    texts = training.Split(train=shipped[:4096], heldout=shipped[4096:4160])
    trained = training.train(config, texts, Console(quiet=True))
    assert (trained.steps, trained.best_step) == (2, 2)
    torch.manual_seed(config.seed)
    start = training.Qwen3MoeForCausalLM(training.model_config(config)).state_dict()
    assert [name for name, weight in trained.model.state_dict().items() if torch.equal(weight, start[name])] == []
    training.save(trained.model, tmp_path)
    ids = torch.tensor([AutoTokenizer.from_pretrained(tmp_path)("Blessed are")["input_ids"]])
    assert bytes(ids[0].tolist()) == b"Blessed are"
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, experts_implementation="eager")
    for name, weight in trained.model.state_dict().items():
        assert torch.equal(whole.state_dict()[name].bfloat16(), weight), name
    ours = from_pretrained(tmp_path, EPGroup.single("cpu"), dtype=torch.float32)
    with torch.inference_mode():
        expected, logits = whole(ids).logits, ours(ids).logits
    assert expected.isfinite().all()
    assert torch.linalg.vector_norm(logits - expected) < 1e-5 * torch.linalg.vector_norm(expected)
    for changes, message in (({"steps": 0}, "steps (0) is less than 1"), ({"dropout": 1.0}, "dropout (1.0) is not in")):
        with pytest.raises(ValueError, match=re.escape(message)):
            training.TrainConfig(**changes)


# The shipped model in fp8.


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped model as DeepSeek-V3 is published: attention and experts fp8 in blocks of 128x128, k and v in one
    that is short."""
    directory = tmp_path_factory.mktemp("fp8") / "model"
    shutil.copytree(SHIPPED_MODEL, directory)
    stored = {}
    for name, value in load_file(SHIPPED_MODEL / "model.safetensors").items():
        stored[name] = value
        if name.endswith("_proj.weight"):
            matrix = quantize_weight(value, SCHEMES["fp8_block"])
            stored[name], stored[f"{name}_scale_inv"] = matrix.values, matrix.scale
    assert stored["model.layers.0.self_attn.k_proj.weight"].shape == (64, 256)
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    return str(directory)


@pytest.fixture
def small(tmp_path: Path) -> str:
    """A config of a short run, with the shipped one's bound."""
    path = tmp_path / "small.toml"
    sizes = "new_tokens = [6, 4]\nteacher_tokens = 64\nwindow = 32"
    path.write_text(f'[run]\nprompts = ["In the beginning", "Blessed"]\n{sizes}\n')
    return str(path)


def call(*arguments: str) -> dict[str, Any]:
    """The report of a job of one rank on the CPU."""
    done = CliRunner().invoke(app, [*arguments, "--json", "--nproc", "1", "--device", "cpu"])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_run_on_fp8_equals_the_whole_model(fp8_model: str, small: str) -> None:
    report = call("run", "--model", fp8_model, "--quant", "none", "--config", small)
    assert (report["ok"], report["tokens_equal"], report["scheme"]) == (True, True, "none")
    assert report["max_logit_diff"] <= report["max_logit_diff_allowed"] == 1e-4


def test_run_on_fp8_as_it_is_stored_is_refused(fp8_model: str, small: str) -> None:
    done = CliRunner().invoke(app, ["run", "--model", fp8_model, "--config", small])
    assert done.exit_code == 2
    assert f"error: scheme 'fp8_block' (of the experts in {fp8_model}) rounds the tokens" in done.stderr
    assert "use --quant none, which dequantizes, or ep-moe eval, which compares losses" in done.stderr


def test_eval_on_fp8_has_both_losses(training: Any, fp8_model: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32, experts_implementation="eager")
    report = call("eval", "--model", fp8_model, "--quant", "auto", "--max-bytes", "2048")
    loss = training.evaluate(plain, training.windows(SHIPPED_TEXT.read_bytes()[:2048], 512), batch_size=4).loss
    assert report["scheme"] == "fp8_block"
    assert 0 < abs(report["whole_nats_per_byte"] - loss) < 0.003 * loss
    assert 0 < abs(report["difference"]) < 0.003 * loss
