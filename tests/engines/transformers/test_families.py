"""Every model family: checkpoints as published and as transformers writes them give transformers' logits."""

import copy
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import small_models
from helpers.fp8_oracle import loop, quantized, spread
from helpers.small_models import logits_of
from safetensors.torch import save_file
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ep_moe.config import ActivationConfig, GroupConfig, MoEConfig, RoutingConfig
from ep_moe.engines.transformers import from_pretrained, register, shard_experts
from ep_moe.engines.transformers.loading import build_skeleton, load_whole
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme, quantize_weight
from ep_moe.routing import route
from ep_moe.testing import ROW_ERROR_LIMITS, assert_same_bits, worst_row_error
from ep_moe.weights import FAMILIES, Checkpoint, ExpertWeights, find_family, moe_config, storage

NUM_LAYERS = 3
COMMON = {
    "hidden_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # at the default of 0.02 the experts would hardly move a logit
}
GROUPED = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 32, "intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 32, "norm_topk_prob": True, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "intermediate_size": 32, "num_experts_per_tok": 3},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 32, "num_experts_per_tok": 2},
    "deepseek_v3": GROUPED
    | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4}
    | {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    "glm4_moe": GROUPED
    | {"routed_scaling_factor": 1.5, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "use_qk_norm": True},
    "minimax_m2": {"num_local_experts": 7, "intermediate_size": 32, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 32, "num_experts_per_tok": 2, "sliding_window": 4}
    | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}},
}
FORMATS = ("published", "saved", "in_memory")
EXTRA = {"deepseek_v3", "glm4_moe"}  # published with a layer that predicts a further token
LIMIT = ROW_ERROR_LIMITS["float32"]


def make_config(family: str, **changes: Any) -> Any:
    defaults = {} if family in ("deepseek_v3", "olmoe") else {"num_key_value_heads": 2, "head_dim": 16}
    return type(AutoConfig.for_model(family))(**COMMON | defaults | MODELS[family] | changes)


def make_model(family: str, **changes: Any) -> PreTrainedModel:
    """A random model without constant parameters, such as router biases, attention sinks and norms."""
    torch.manual_seed(13)
    model = AutoModelForCausalLM.from_config(make_config(family, **changes), experts_implementation="eager").eval()
    for name, value in model.state_dict().items():
        if torch.equal(value, torch.zeros_like(value)) or torch.equal(value, torch.ones_like(value)):
            value += 0.3 * torch.randn_like(value)
        if name.endswith("gate_up_proj_bias"):
            value.mul_(30)  # beyond the limit of the activation
    return model


whole_model = functools.cache(make_model)  # of a family, for tests that do not change it


def published(family: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors of a model by the names and in the shapes of its published checkpoint."""
    inner = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "minimax_m2": ("block_sparse_moe", "w1", "w3", "w2")}
    block, gate, up, down = inner.get(family, ("mlp", "gate_proj", "up_proj", "down_proj"))
    tensors = {}
    for name, value in model.state_dict().items():
        name = name.replace(".mlp.", f".{block}.")
        if family == "gpt_oss" or ".experts." not in name:
            tensors[name] = value.clone()
            continue
        prefix, part = name.rsplit(".", 1)
        for expert, matrix in enumerate(value):
            if part == "down_proj":
                tensors[f"{prefix}.{expert}.{down}.weight"] = matrix.clone()
            else:
                half = matrix.shape[0] // 2
                tensors[f"{prefix}.{expert}.{gate}.weight"] = matrix[:half].clone()
                tensors[f"{prefix}.{expert}.{up}.weight"] = matrix[half:].clone()
    if family in EXTRA:
        last = f"model.layers.{NUM_LAYERS - 1}."
        extra = [name.removeprefix(last) for name in tensors if name.startswith(last)]
        for name in (*extra, "eh_proj.weight", "enorm.weight", "embed_tokens.weight", "shared_head.head.weight"):
            tensors[f"model.layers.{NUM_LAYERS}.{name}"] = torch.full((3, 5), float("nan"))
    return tensors


def write_config(directory: Path, model: PreTrainedModel, **changes: Any) -> None:
    config = model.config.to_dict() | changes
    config["torch_dtype"] = (config.pop("dtype") or "float32").removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config))


@functools.cache
def root() -> Path:
    return Path(tempfile.mkdtemp(prefix="ep_moe_test_"))


def new_directory() -> Path:
    return Path(tempfile.mkdtemp(dir=root()))


@functools.cache
def directory_of(family: str, form: str) -> Path:
    directory, model = new_directory(), whole_model(family)
    if form == "published":
        save_file(published(family, model), directory / "model.safetensors")
        write_config(directory, model)
    else:
        model.save_pretrained(directory, max_shard_size="40KB", save_original_format=form == "saved")
    return directory


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    register()
    yield
    shutil.rmtree(root())
    for cached in (root, directory_of, fp8_directory, fp8_model, whole_model):
        cached.cache_clear()


token_ids = functools.partial(small_models.token_ids, length=9)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", MODELS)
def test_logits_on_one_rank(family: str, form: str) -> None:
    whole, ids = whole_model(family), token_ids(1)
    model = from_pretrained(directory_of(family, form), EPGroup.single("cpu"))
    expected = logits_of(whole, ids)
    assert worst_row_error(logits_of(model, ids), expected) < LIMIT
    dense = {name: value for name, value in whole.state_dict().items() if ".experts." not in name}
    assert model.state_dict().keys() == dense.keys()
    for name, value in dense.items():
        assert torch.equal(model.state_dict()[name], value), name
    for layer in model.ep_moe.layers:  # the experts matter
        layer.weights.w2.values.zero_()
    assert worst_row_error(logits_of(model, ids), expected) > 1000 * LIMIT


@pytest.mark.parametrize("family", MODELS)
def test_dtypes_are_those_of_transformers(family: str) -> None:
    """Router biases above all: some stay float32 in a model of another dtype."""
    directory = directory_of(family, "saved")
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model = from_pretrained(directory, EPGroup.single("cpu"), dtype=torch.bfloat16)
    for name, value in model.state_dict().items():
        assert value.dtype == whole.state_dict()[name].dtype, name
        assert torch.equal(value, whole.state_dict()[name]), name


def check_whole(directory: Path, expected: PreTrainedModel) -> None:
    """Every tensor bit for bit, and transformers' own code on them."""
    whole, ids = load_whole(Checkpoint.open(directory), torch.float32, torch.device("cpu")), token_ids(6)
    assert whole.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert_same_bits(whole.state_dict()[name], value, name)
    assert whole.config._experts_implementation == "eager"
    assert not any(parameter.requires_grad for parameter in whole.parameters())
    assert torch.equal(logits_of(whole, ids), logits_of(expected, ids))


@pytest.mark.parametrize("family", MODELS)
def test_a_whole_model_is_that_of_transformers(family: str) -> None:
    check_whole(directory_of(family, "published"), whole_model(family))


@pytest.mark.parametrize("family", MODELS)
def test_a_rank_reads_its_experts_in_portions(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, with portions of five rows, which divide no tensor."""
    monkeypatch.setattr(storage, "PORTION_BYTES", 5 * 32 * 4)
    model, num_experts = whole_model(family), moe_config(make_config(family)).num_experts
    source = directory_of(family, "published"), Placement.round_robin(num_experts, 2), 1
    weights = ExpertWeights.from_pretrained(*source)
    quantized = ExpertWeights.from_pretrained(*source, scheme="fp8_token")
    assert len(weights) == NUM_LAYERS - (family in EXTRA)
    for layer, found in weights.items():
        theirs = {name: value[1::2] for name, value in model.model.layers[layer].mlp.experts.named_parameters()}
        if family == "gpt_oss":
            theirs = {name: value.mT if value.dim() == 3 else value for name, value in theirs.items()}
            theirs |= {
                name: torch.cat([value[:, 0::2], value[:, 1::2]], 1) for name, value in theirs.items() if "up" in name
            }
            assert torch.equal(found.w13_bias, theirs["gate_up_proj_bias"])
            assert torch.equal(found.w2_bias, theirs["down_proj_bias"])
        assert torch.equal(found.w13.values, theirs["gate_up_proj"])
        assert torch.equal(found.w2.values, theirs["down_proj"])
        assert (found.w13_bias is None) == (family != "gpt_oss")
        alone = quantize_weight(found.w13.values, get_scheme("fp8_token"))
        assert_same_bits(quantized[layer].w13.values, alone.values, "w13")


# Two ranks, each with a batch of its own.

SHARDED = ("deepseek_v3", "gpt_oss")
ON_TWO_RANKS = [(family, "published") for family in MODELS]
ON_TWO_RANKS += [(family, form) for family in SHARDED for form in ("saved", "sharded")]


def rank_ids(rank: int) -> torch.Tensor:
    return token_ids(20 + rank, rows=1 + rank, length=9 - 4 * rank)


def on_rank(group: EPGroup, directories: dict[str, Path]) -> dict[str, torch.Tensor]:
    """All checks on two ranks, so that ranks start only once."""
    torch.set_num_threads(1)
    ids, found = rank_ids(group.rank), {}
    for key, directory in directories.items():
        options = {"placement": "round_robin", "layout": "batched"} if key.startswith("saved") else {}
        found[key] = logits_of(from_pretrained(directory, group, max_tokens_per_rank=16, **options), ids)
    for family in SCHEMES_ON_DISK:
        model = from_pretrained(directories[f"fp8-{family}"], group, scheme="none", max_tokens_per_rank=16)
        found[f"dequantized-{family}"] = logits_of(model, ids)
    for family in SHARDED:
        found[f"sharded-{family}"] = logits_of(shard_experts(make_model(family), group, max_tokens_per_rank=16), ids)
    return found


@functools.cache
def two_ranks() -> list[dict[str, torch.Tensor]]:
    directories = {f"{form}-{family}": directory_of(family, form) for family, form in ON_TWO_RANKS if form in FORMATS}
    directories |= {f"fp8-{family}": fp8_directory(family) for family in SCHEMES_ON_DISK}
    return launch(on_rank, directories, num_ranks=2, config=GroupConfig(timeout_secs=120), device="cpu")


@pytest.mark.parametrize(("family", "form"), ON_TWO_RANKS)
def test_logits_on_two_ranks(family: str, form: str) -> None:
    whole = whole_model(family)
    for rank, found in enumerate(two_ranks()):
        assert worst_row_error(found[f"{form}-{family}"], logits_of(whole, rank_ids(rank))) < LIMIT


# Routing and sizes.


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in MODELS),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("olmoe", {"norm_topk_prob": True}),
        ("glm4_moe", {"n_group": 2, "topk_group": 1}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("glm4_moe", {"norm_topk_prob": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "_".join(value) or "plain",
)
def test_routing_is_the_models_own(family: str, changes: dict[str, Any]) -> None:
    model = make_model(family, **changes)
    config, kind, state = moe_config(model.config), find_family(model.config), model.state_dict()
    names = {kind.router.format(layer=layer): layer for layer in range(NUM_LAYERS)}
    seen: dict[int, Any] = {}
    for name, layer in names.items():
        if name in state:
            router = model.get_submodule(name.removesuffix(".weight"))
            router.register_forward_hook(lambda _, inputs, out, layer=layer: seen.update({layer: (inputs[0], out)}))
    logits_of(model, token_ids(3, rows=6, length=30))
    assert len(seen) == NUM_LAYERS - (family in EXTRA)

    def bias(name: str | None, layer: int) -> torch.Tensor | None:
        return None if name is None else state[name.format(layer=layer)]

    for layer, (x, (_, weights, ids)) in seen.items():
        x = x.reshape(-1, config.hidden)
        logits = linear(x, state[kind.router.format(layer=layer)], bias(kind.router_bias, layer))
        routing = route(logits, config.routing, routing_bias=bias(kind.routing_bias, layer))
        order, own_order = ids.argsort(1), routing.topk_ids.long().argsort(1)
        assert torch.equal(routing.topk_ids.long().gather(1, own_order), ids.gather(1, order))
        assert worst_row_error(routing.topk_weights.gather(1, own_order), weights.gather(1, order)) < LIMIT
        assert ids.unique().numel() > config.routing.num_topk
        if kind.routing_bias is not None:
            assert not torch.equal(routing.topk_ids, route(logits, config.routing).topk_ids)


PUBLISHED = {  # from the config.json of the models named
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "hidden_size": 7168, "moe_intermediate_size": 2048, "intermediate_size": 18432}
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "hidden_act": "silu"}
        | {"routed_scaling_factor": 2.5, "norm_topk_prob": True},
        (7168, 2048, 256),
        {"method": 2, "num_topk": 8, "num_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
        {},
    ),
    "Mixtral with gelu": (
        {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8}
        | {"num_experts_per_tok": 2, "hidden_act": "gelu"},
        (4096, 14336, 8),
        {"method": 1, "num_topk": 2},
        {"kind": "gelu"},
    ),
    "OLMoE-1B-7B": (
        {"model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64}
        | {"num_experts_per_tok": 8, "hidden_act": "silu", "norm_topk_prob": False},
        (2048, 1024, 64),
        {"method": 0, "num_topk": 8},
        {},
    ),
    "GLM-4.5-Air": (
        {"model_type": "glm4_moe", "hidden_size": 4096, "moe_intermediate_size": 1408, "intermediate_size": 10944}
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "hidden_act": "silu"}
        | {"routed_scaling_factor": 1.0, "norm_topk_prob": True},
        (4096, 1408, 128),
        {"method": 2, "num_topk": 8},
        {},
    ),
    "MiniMax-M2": (
        {"model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_local_experts": 256}
        | {"num_experts_per_tok": 8, "hidden_act": "silu"},
        (3072, 1536, 256),
        {"method": 7, "num_topk": 8},
        {},
    ),
    "gpt-oss-20b": (
        {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32}
        | {"num_experts_per_tok": 4, "hidden_act": "silu", "swiglu_limit": 7.0},
        (2880, 2880, 32),
        {"method": 1, "num_topk": 4},
        {"kind": "swiglu", "alpha": 1.702, "beta": 1.0, "limit": 7.0},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_and_routing(name: str) -> None:
    config, (hidden, intermediate, num_experts), routing, activation = PUBLISHED[name]
    assert moe_config(config) == MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        routing=RoutingConfig(**routing),
        activation=ActivationConfig(**activation),
    )


READ = {  # keys of config.json from which these models' experts are read, and other accepted values
    **dict.fromkeys(("hidden_size", "num_experts_per_tok", "n_group", "topk_group", "num_hidden_layers"), int),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "num_nextn_predict_layers"), int),
    **dict.fromkeys(("routed_scaling_factor", "swiglu_limit", "swiglu_alpha"), float),
    "norm_topk_prob": bool,
    "hidden_act": str,
    "dtype": str,
    "torch_dtype": str,
}
MORE = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "dtype": "bfloat16", "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_values_of_another_type_are_named(name: str, tmp_path: Path) -> None:
    """A text, 4.0, a list, an object or true in place of a number, and so on; also NaN, which Python's JSON accepts."""
    config, path = PUBLISHED[name][0] | MORE, tmp_path / "config.json"
    save_file({}, tmp_path / "model.safetensors")
    family = FAMILIES[config["model_type"]]
    read = {key: kind for key, kind in READ.items() if key in config} | {family.intermediate: int}
    if family.activation is FAMILIES["gpt_oss"].activation:
        del read["hidden_act"]  # which has another meaning there
    path.write_text(json.dumps(config))
    Checkpoint.open(tmp_path)
    tried = 0
    for key, kind in read.items():
        for value in ("4", 4.0, [4], {"a": 4}, True, float("nan")):
            if type(value) is kind and value == value:
                continue
            path.write_text(json.dumps(config | {key: value}))
            with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: {key} \({re.escape(repr(value))}\) "):
                Checkpoint.open(tmp_path)
            tried += 1
    assert tried >= 5 * len(read)
    for value in (["qwen3_moe"], {}, None, 3):
        path.write_text(json.dumps(config | {"model_type": value}))
        with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: model_type \(.*\) is not one of qwen3_moe"):
            Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 40}, "hidden (40) must be a positive multiple of 16; hidden is its hidden_size"),
        ({"n_routed_experts": 0}, "num_experts (0) must be at least 1; num_experts is its n_routed_experts"),
        ({"num_experts_per_tok": 0}, "num_topk (0) must be at least 1; num_topk is its num_experts_per_tok"),
        ({"topk_group": 9}, "topk_group (9) must be in [1, num_group (8)]; num_group is its n_group"),
        (
            {"n_group": 7},
            "num_experts (256) is not a multiple of num_group (7); num_experts is its n_routed_experts; "
            "num_group is its n_group",
        ),
        ({"hidden_act": "relu6"}, "hidden_act ('relu6') is not one of silu, swish, gelu"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_out_of_range_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["DeepSeek-V3"][0] | changes))
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}$"):
        moe_config(tmp_path)


@pytest.mark.parametrize(
    "content", ["[]", "null", "3", '"x"', "[" * 100_000], ids=["list", "null", "number", "text", "deep"]
)
def test_a_generation_config_that_is_no_object_is_named(content: str) -> None:
    directory = new_directory()
    shutil.copytree(directory_of("olmoe", "published"), directory, dirs_exist_ok=True)
    (directory / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(directory / "generation_config.json"))):
        from_pretrained(directory, EPGroup.single("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_of_transformers_says_the_same(family: str) -> None:
    directory = directory_of(family, "published")
    assert moe_config(make_config(family)) == moe_config(directory) == moe_config(directory_of(family, "saved"))
    config = json.loads((directory / "config.json").read_text())
    del config["num_experts_per_tok"]
    with pytest.raises(ValueError, match=f"no key num_experts_per_tok, which model_type '{family}' needs"):
        moe_config(config)


# fp8 on disk.

BLOCK = (16, 32)
PLAIN = ("embed_tokens", "lm_head", "norm", ".gate.weight", "bias", f"layers.{NUM_LAYERS - 1}.mlp.experts")
SCHEMES_ON_DISK = {
    "deepseek_v3": ["fp8_block_16x32", "none"],
    "glm4_moe": ["fp8_block_16x32", "none"],
    "minimax_m2": ["fp8_block_16x32"] * 3,
    "qwen3_moe": ["fp8_block_16x32", "fp8_block_16x32", "none"],
}


@functools.cache
def fp8_parts(family: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of an fp8 checkpoint, and the same dequantized."""
    stored, real = {}, {}
    for name, value in published(family, whole_model(family)).items():
        if value.isnan().any() or value.dim() != 2 or any(part in name for part in PLAIN):
            stored[name] = real[name] = value
        else:
            stored[name], scale = quantized(value, BLOCK)
            stored[f"{name}_scale_inv"], real[name] = scale, stored[name].float() * spread(scale, value.shape, BLOCK)
    return stored, real


@functools.cache
def fp8_directory(family: str) -> Path:
    directory = new_directory()
    save_file(fp8_parts(family)[0], directory / "model.safetensors")
    fmt = "float8_e4m3fn" if family == "minimax_m2" else "e4m3"
    quantized = {"quant_method": "fp8", "fmt": fmt, "activation_scheme": "dynamic", "weight_block_size": BLOCK}
    write_config(directory, whole_model(family), quantization_config=quantized)
    return directory


@functools.cache
def fp8_model(family: str) -> PreTrainedModel:
    """transformers' eager model with the dequantized weights."""
    directory = new_directory()
    save_file(fp8_parts(family)[1], directory / "model.safetensors")
    write_config(directory, whole_model(family))
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager").eval()


@pytest.mark.parametrize("family", SCHEMES_ON_DISK)
def test_fp8_dequantized_on_load(family: str) -> None:
    whole, ids = fp8_model(family), token_ids(5)
    model = from_pretrained(fp8_directory(family), EPGroup.single("cpu"), scheme="none")
    assert worst_row_error(logits_of(model, ids), logits_of(whole, ids)) < LIMIT
    assert {layer.scheme.name for layer in model.ep_moe.layers} == {"none"}
    for name, value in model.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("family", SCHEMES_ON_DISK)
def test_a_whole_model_from_fp8(family: str) -> None:
    check_whole(fp8_directory(family), fp8_model(family))


def fp8_forward(module: Any, *arguments: torch.Tensor) -> torch.Tensor:
    """The output of a transformers experts module whose GEMMs take quantized tokens."""
    weights = list(zip(module.gate_up_proj, module.down_proj, strict=True))
    return loop(weights, BLOCK[1], (None, None), arguments)


def with_rounded_tokens(family: str) -> PreTrainedModel:
    model = copy.deepcopy(fp8_model(family))
    modules = [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for module, scheme in zip(modules, SCHEMES_ON_DISK[family], strict=True):
        if scheme != "none":
            module.forward = functools.partial(fp8_forward, module)
    return model


@pytest.mark.parametrize("family", SCHEMES_ON_DISK)
def test_fp8_as_it_is_stored(family: str) -> None:
    """Rounding tokens adds 8 to 14 % error to a layer's worst row, and more to logits once it flips an expert choice;
    the weights add no error."""
    whole, ids = with_rounded_tokens(family), token_ids(5)
    model = from_pretrained(fp8_directory(family), EPGroup.single("cpu"))
    assert [layer.scheme.name for layer in model.ep_moe.layers] == SCHEMES_ON_DISK[family]
    assert worst_row_error(logits_of(model, ids), logits_of(whole, ids)) < ROW_ERROR_LIMITS["fp8"]
    generator = torch.Generator().manual_seed(8)
    x, weights = torch.randn(64, 48, generator=generator), torch.rand(64, 2, generator=generator)
    picks = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(64)])
    [first, *_] = (name for name, _ in model.named_modules() if name.endswith("mlp.experts"))
    with torch.no_grad():
        plain = fp8_model(family).get_submodule(first)(x, picks, weights)
        cost = worst_row_error(whole.get_submodule(first)(x, picks, weights), plain)
        found = worst_row_error(model.get_submodule(first)(x, picks, weights), plain)
    assert 0.03 < cost < 0.15
    assert abs(found - cost) < ROW_ERROR_LIMITS["fp8"] * cost


@pytest.mark.parametrize("family", SCHEMES_ON_DISK)
def test_fp8_on_two_ranks(family: str) -> None:
    whole, exact = with_rounded_tokens(family), fp8_model(family)
    for rank, found in enumerate(two_ranks()):
        ids = rank_ids(rank)
        assert worst_row_error(found[f"fp8-{family}"], logits_of(whole, ids)) < ROW_ERROR_LIMITS["fp8"]
        assert worst_row_error(found[f"dequantized-{family}"], logits_of(exact, ids)) < LIMIT


def test_a_config_that_transformers_refuses_is_named_with_its_key(tmp_path: Path) -> None:
    config = make_config("deepseek_v3").to_dict() | {"routed_scaling_factor": 1}  # an integer for a float
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{tmp_path} has no config.json .*'routed_scaling_factor' .* \(value: 1\)"):
        build_skeleton(tmp_path, None, None)
