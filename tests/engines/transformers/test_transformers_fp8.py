"""Experts that transformers has loaded in fp8, computed here: by its registry of fp8 experts, sharded, and by its own
expert parallelism. The reference is a loop over tokens with dequantized weights and rounded tokens.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.fp8_oracle import loop, quantized, spread
from helpers.small_models import logits_of, make_config, token_ids
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, replace_with_fp8_linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils import is_accelerate_available
from transformers.utils.quantization_config import FineGrainedFP8Config

from ep_moe.config import GroupConfig
from ep_moe.engines.transformers import distributed_config, register, shard_experts
from ep_moe.engines.transformers.experts import weights_of
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.testing import worst_row_error

VERSION = tuple(int(number) for number in re.findall(r"\d+", transformers.__version__)[:2])
HAS_HOOK = (VERSION >= (5, 23) or VERSION < (5, 19)) and is_accelerate_available()
LIMIT = 1e-2  # the worst row's relative error, as elsewhere for fp8: a rounding may fall to the other side
HIDDEN, INTERMEDIATE, EXPERTS = 64, 32, 6
BLOCK = (16, 32)


def config_of(intermediate: int = INTERMEDIATE) -> Any:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": intermediate, "num_hidden_layers": 2, "head_dim": 16}
    return make_config("qwen3_moe", **sizes, num_experts=EXPERTS, norm_topk_prob=True, initializer_range=0.3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model as float32, and with its experts in fp8 blocks; every expert is another."""
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("fp8")
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config_of()).eval()
    model.save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantized(tensors[name], BLOCK)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ignored = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    ignored += [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = settings | {"modules_to_not_convert": ignored}
    (folder / "config.json").write_text(json.dumps(config))
    return plain, folder


@pytest.fixture(scope="module", autouse=True)
def _on_a_cpu():
    """transformers dequantizes on a machine without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
        register()
        yield


def expected(plain: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits of the oracle: the float32 model with its experts replaced."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager").eval()
    for module in model.modules():
        if not hasattr(module, "gate_up_proj") or module.gate_up_proj.dim() != 3:
            continue
        weights = []
        for gate_up, down in zip(module.gate_up_proj.data, module.down_proj.data, strict=True):
            parts = [(part, *quantized(part, BLOCK)) for part in (*gate_up.chunk(2), down)]
            gate, up, second = (values.float() * spread(scale, part.shape, BLOCK) for part, values, scale in parts)
            weights.append((torch.cat([gate, up]), second))
        module.forward = lambda *arguments, weights=weights: loop(weights, BLOCK[1], (None, None), arguments)
    return logits_of(model, ids)


def loaded(folder: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def test_registry_of_fp8_experts(checkpoint: tuple[Path, Path]) -> None:
    plain, folder = checkpoint
    assert "ep_moe" in ALL_FP8_EXPERTS_FUNCTIONS
    model = loaded(folder, experts_implementation="ep_moe")
    experts = model.model.layers[0].mlp.experts
    assert weights_of(experts).scheme.name == f"fp8_block_{BLOCK[0]}x{BLOCK[1]}"
    wanted = expected(plain, token_ids(1))
    assert worst_row_error(logits_of(model, token_ids(1)), wanted) < LIMIT
    for key in ("gate_up_proj", "down_proj_scale_inv"):  # parameters are read in place
        data = getattr(experts, key).data
        data = data.view(torch.uint8) if data.element_size() == 1 else data
        data.copy_(data[[1, 0, *range(2, EXPERTS)]])
        assert worst_row_error(logits_of(model, token_ids(1)), wanted) > LIMIT
        data.copy_(data[[1, 0, *range(2, EXPERTS)]])
    assert worst_row_error(logits_of(model, token_ids(1)), wanted) < LIMIT


FORMS = {  # block, activation scheme, dtype of the scales, our scheme
    "blocks": (BLOCK, "dynamic", "float", "fp8_block_16x32"),
    "large blocks": ((128, 128), "dynamic", "float", "fp8_block_32x128"),
    "powers of two": ((128, 128), "dynamic", "ue8m0", "fp8_block_ue8m0"),
    "tokens": (None, "dynamic", "float", "fp8_token"),
    "static": (None, "static", "float", "fp8_tensor_channel"),
}


def experts_module(block: tuple[int, int] | None, activation: str, form: str, intermediate: int = INTERMEDIATE) -> Any:
    """An experts module of transformers without values, on the CPU."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(intermediate), experts_implementation="ep_moe")
    settings = FineGrainedFP8Config(activation_scheme=activation, weight_block_size=block and list(block))
    settings.scale_fmt = form
    replace_with_fp8_linear(model, [], quantization_config=settings)
    return model.model.layers[0].mlp.experts.to_empty(device="cpu")


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_scales(form: str) -> None:
    """Blocks that are larger than an expert's rows, scales per tensor, static scales of activations."""
    block, activation, scales, scheme = FORMS[form]
    powers = scales == "ue8m0"
    intermediate = 128 if powers else INTERMEDIATE  # such blocks are not cut
    module = experts_module(block, activation, scales, intermediate)
    random = torch.Generator().manual_seed(3)
    weights = []
    for expert in range(EXPERTS):
        shapes = ((intermediate, HIDDEN), (intermediate, HIDDEN), (HIDDEN, intermediate))
        parts = [0.2 * (1 + expert) * torch.randn(shape, generator=random) for shape in shapes]
        made = [(part, *quantized(part, block or (1000, 1000), powers)) for part in parts]
        real = [values.float() * spread(scale, part.shape, block or (1000, 1000)) for part, values, scale in made]
        weights.append((torch.cat(real[:2]), real[2]))
        module.gate_up_proj.data[expert] = torch.cat([made[0][1].float(), made[1][1].float()]).to(torch.float8_e4m3fn)
        module.gate_up_proj_scale_inv.data[expert] = torch.cat([made[0][2], made[1][2]])
        module.down_proj.data[expert], module.down_proj_scale_inv.data[expert] = made[2][1], made[2][2]
    static = (None, None)
    if activation == "static":
        static = (0.02, 0.5)
        module.gate_up_proj_activation_scale.data.fill_(static[0] / 2)[1] = static[0]
        module.down_proj_activation_scale.data.fill_(static[1] / 2)[2] = static[1]
    assert weights_of(module).scheme.name == scheme
    x = torch.randn(9, HIDDEN, generator=random)
    shares, ids = torch.rand(9, EXPERTS, generator=random).topk(2)
    with torch.no_grad():
        found = module(x, ids, shares)
    assert worst_row_error(found, loop(weights, block[1] if block else 1000, static, (x, ids, shares), powers)) < LIMIT


def test_what_is_not_computed_is_named(checkpoint: tuple[Path, Path]) -> None:
    module = experts_module(BLOCK, "dynamic", "ue8m0")
    with pytest.raises(ValueError, match="scheme 'fp8_block_ue8m0' has no form with blocks of 16x32"):
        weights_of(module)
    module = experts_module(BLOCK, "static", "float")
    with pytest.raises(ValueError, match="static scales of activations"):
        weights_of(module)
    module.activation_scheme = "dynamic"
    module.gate_up_proj_scale_inv.data = module.gate_up_proj_scale_inv.data[:, :3]
    with pytest.raises(ValueError, match=r"gate_up_proj_scale_inv of FP8Experts is \(6, 3, 2\).*needs \(6, 4, 2\)"):
        weights_of(module)
    module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.view(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"gate_up_proj of FP8Experts is torch.int8"):
        weights_of(module)
    with pytest.raises(ValueError, match=r"scheme is 'int8_token', but .* is loaded in 'fp8_block_16x32'"):
        shard_experts(loaded(checkpoint[1]), EPGroup.single("cpu"), scheme="int8_token")


def on_rank(group: EPGroup, plain: Path, folder: Path) -> dict[str, Any]:
    """On two ranks: sharded here with a batch each, and by transformers' own expert parallelism."""
    torch.set_num_threads(1)
    FineGrainedFP8HfQuantizer.validate_environment = lambda *_, **__: None
    register()
    wanted = [expected(plain, token_ids(seed)) for seed in (1, 2)]
    sharded = shard_experts(loaded(folder), group)
    found = {
        "sharded": worst_row_error(logits_of(sharded, token_ids(1 + group.rank)), wanted[group.rank]),
        "experts": sharded.ep_moe.layers[0].weights.num_local_experts,
        "scheme": sharded.ep_moe.scheme,
    }
    if HAS_HOOK:
        config = distributed_config(AutoConfig.from_pretrained(folder), group.num_ranks)
        found["tp x ep"] = worst_row_error(
            logits_of(loaded(folder, distributed_config=config), token_ids(1)), wanted[0]
        )
    return found


def test_two_ranks(checkpoint: tuple[Path, Path]) -> None:
    env, config = {"CUDA_VISIBLE_DEVICES": ""}, GroupConfig(timeout_secs=120)
    ranks = launch(on_rank, *checkpoint, num_ranks=2, config=config, device="cpu", env=env)
    for found in ranks:
        assert (found.pop("experts"), found.pop("scheme")) == (EXPERTS // 2, "fp8_block_16x32")
        assert len(found) == 1 + HAS_HOOK
        assert all(error < LIMIT for error in found.values()), found
