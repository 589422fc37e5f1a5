"""Models with experts spread over ranks: sharded completely or not at all, in step, and saved bit for bit."""

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import small_models
from helpers.small_models import LATENT, SIZES, assert_close, logits_of, make_config, token_ids
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import use_experts_implementation
from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as ernie

from ep_moe.config import ActivationConfig, GroupConfig
from ep_moe.engines.transformers import architectures, from_pretrained, installing, register, shard_experts
from ep_moe.engines.transformers.experts import activation_of, weights_of
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.placement import Placement

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 5, "mlp_only_layers": [1], "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 3},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "norm_topk_prob": False,
        **LATENT,
    },
    "granitemoe": {"num_local_experts": 4},  # two tensors of a layer are written under names of their own
    "nemotron_h": {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},  # no gate
}
READ_BY_US = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
SURVEYED = (
    "afmoe aria axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 "
    "deepseek_v4 diffusion_gemma dots1 dots3_note ernie4_5_moe ernie4_5_vl_moe exaone_moe flex_olmo flint gemma4 "
    "glm4_moe glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid "
    "granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl inkling inkling2 inkling2_loop jamba kimi_linear kolibri1 "
    "laguna lara_mini lfm2_moe mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl mistral4 mistral_large4 mixtral "
    "muse_spark nemotron_h olmoe openai_privacy_filter phimoe qwen2_moe qwen3_5_moe qwen3_moe qwen3_next "
    "qwen3_omni_moe qwen3_vl_moe qwen4_exp solar_open unlimited_ocr zaya "
)
surveyed = pytest.mark.skipif(
    not hasattr(transformers, "Dots3NoteModel"), reason="needs the models of transformers 5.23, as they were read"
)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register()


def make_model(name: str, **sizes: Any) -> PreTrainedModel:
    return small_models.make_model(name, **MODELS.get(name, {}) | sizes)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor once."""
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        assert found.keys().isdisjoint(tensors)
        found |= tensors
    return found


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    tensors, wanted = tensors_of(found), tensors_of(expected)
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name
    index = json.loads((found / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == wanted.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    for name in ("config.json", "generation_config.json"):
        assert json.loads((found / name).read_text()) == json.loads((expected / name).read_text())
    leftovers = [path.name for path in found.iterdir() if path.name.startswith(".")]
    assert leftovers == []


# Written back.


@pytest.mark.parametrize("original", [True, False], ids=["published_names", "own_names"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sharded_model_is_written_whole(name: str, original: bool, tmp_path: Path) -> None:
    plain, ours, ids = tmp_path / "plain", tmp_path / "ours", token_ids()
    model = make_model(name)
    expected = logits_of(model, ids)
    model.save_pretrained(plain, save_original_format=original)
    ours.mkdir()
    (ours / "model.safetensors").write_bytes(b"of an earlier save, which transformers would read first")
    (ours / "model-00007-of-00009.safetensors").write_bytes(b"the same")
    shard_experts(model, EPGroup.single("cpu"))
    model.save_pretrained(ours, max_shard_size="20KB", save_original_format=original)
    assert_same_checkpoint(ours, plain)
    whole = AutoModelForCausalLM.from_pretrained(ours, experts_implementation="eager", dtype=torch.float32).eval()
    assert torch.equal(logits_of(whole, ids), expected)
    if name in READ_BY_US:
        again = from_pretrained(ours, EPGroup.single("cpu"))
        assert_close(logits_of(again, ids), expected)
        again.save_pretrained(tmp_path / "again", save_original_format=original)
        assert_same_checkpoint(tmp_path / "again", plain)


def test_a_part_of_a_sharded_model_is_written_with_its_experts(tmp_path: Path) -> None:
    model = make_model("mixtral", dtype=torch.bfloat16)
    model.model.save_pretrained(tmp_path / "plain")
    shard_experts(model, EPGroup.single("cpu"))
    model.model.save_pretrained(str(tmp_path / "ours"))
    wanted, found = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "ours")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    model = shard_experts(make_model("mixtral"), EPGroup.single("cpu"), scheme="fp8_block")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts holds its experts in scheme 'fp8_block'"):
        model.save_pretrained(tmp_path / "never")
    model = shard_experts(make_model("mixtral"), EPGroup.single("cpu"))
    for options in ({"push_to_hub": True}, {"state_dict": {}}, {"variant": "fp16"}, {"distributed_checkpoint": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            model.save_pretrained(tmp_path / "never", **options)
    with pytest.raises(ValueError, match="is_main_process is False on rank 0"):
        model.save_pretrained(tmp_path / "never", is_main_process=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        model.save_pretrained(tmp_path / "file")
    assert not (tmp_path / "never").exists()


def test_a_save_that_fails_leaves_no_half_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = shard_experts(make_model("mixtral"), EPGroup.single("cpu")), []

    def full_disk(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("No space left on device")
        save(*arguments, **options)

    saving = installing.save_pretrained.__globals__
    save = saving["save_file"]
    monkeypatch.setitem(saving, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "ours")
    assert list((tmp_path / "ours").iterdir()) == []


def test_each_layer_is_written_before_the_next_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, events = shard_experts(make_model("mixtral"), EPGroup.single("cpu")), []
    saving = installing.save_pretrained.__globals__
    gather, save = saving["_gather"], saving["save_file"]

    def gather_and_tell(group: EPGroup, module: Any, layer: Any) -> Any:
        events.append(f"gather {layer.tag.number}")
        return gather(group, module, layer)

    def save_and_tell(tensors: dict[str, torch.Tensor], path: Path, **options: Any) -> None:
        layers = {name.split(".")[2] for name in tensors}
        assert len(layers) == 1
        assert len(tensors) == 3 * 4
        events.append(f"write {layers.pop()}")
        save(tensors, path, **options)

    monkeypatch.setitem(saving, "_gather", gather_and_tell)
    monkeypatch.setitem(saving, "save_file", save_and_tell)
    model.save_pretrained(tmp_path)
    assert events == [f"{what} {layer}" for layer in range(3) for what in ("gather", "write")]


# All or nothing.


def refused_transport(*arguments: Any, **options: Any) -> Any:
    del arguments, options
    raise RuntimeError("no memory for a transport")


def widen(model: PreTrainedModel) -> None:
    """The last layer gets another number of experts."""
    experts = model.model.layers[-1].mlp.experts
    experts.down_proj = torch.nn.Parameter(torch.cat([experts.down_proj, experts.down_proj[:1]]))
    experts.gate_up_proj = torch.nn.Parameter(torch.cat([experts.gate_up_proj, experts.gate_up_proj[:1]]))


def another_activation(model: PreTrainedModel) -> None:
    model.model.layers[-1].mlp.experts.act_fn = torch.nn.GELU(approximate="tanh")


def another_dtype(model: PreTrainedModel) -> None:
    model.model.layers[-1].mlp.experts.to(torch.bfloat16)


def nothing(model: PreTrainedModel) -> None:
    del model


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (nothing, {"scheme": "fp9"}, "fp9"),
        (nothing, {"layout": "sideways"}, "sideways"),
        (nothing, {"placement": "best"}, "best"),
        (nothing, {"transport": "pigeon"}, "pigeon"),
        (nothing, {"experts": "wise"}, "wise"),
        (nothing, {"max_tokens_per_rank": 0}, r"max_tokens_per_rank \(0\)"),
        (another_activation, {}, "activation of MixtralExperts"),
        (another_dtype, {}, r"hidden 32, float32, but model\.layers\.2.* hidden 32, bfloat16"),
        (widen, {}, r"layers\.0\.mlp\.experts has 4 experts.*layers\.2\.mlp\.experts has 5 experts"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_a_refused_call_changes_nothing(
    prepare: Callable[[PreTrainedModel], None], options: dict[str, Any], message: str
) -> None:
    model, ids = make_model("mixtral"), token_ids()
    expected = logits_of(model, ids)
    prepare(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            shard_experts(model, EPGroup.single("cpu"), **options)
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert model.config._experts_implementation == "eager"
    if prepare is nothing:
        assert torch.equal(logits_of(model, ids), expected)
        shard_experts(model, EPGroup.single("cpu"))
        assert_close(logits_of(model, ids), expected)


def test_what_the_machine_lacks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model("mixtral"), token_ids()
    expected = logits_of(model, ids)
    for name in ("create_transport", "ExpertParallelMoE"):
        with monkeypatch.context() as patch:
            patch.setattr(installing, name, refused_transport)
            with pytest.raises(RuntimeError, match="no memory for a transport"):
                shard_experts(model, EPGroup.single("cpu"))
    assert torch.equal(logits_of(model, ids), expected)


def test_experts_that_keep_their_own_implementation_are_refused() -> None:
    """A module with a config of its own is not reached by transformers' setter, and would run without weights."""
    model, ids = make_model("mixtral"), token_ids()
    experts = model.model.layers[0].mlp.experts
    experts.config = make_config("mixtral", **MODELS["mixtral"], experts_implementation="eager")
    expected = logits_of(model, ids)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.experts \(MixtralExperts\) keeps .*'eager'"):
        shard_experts(model, EPGroup.single("cpu"))
    assert torch.equal(logits_of(model, ids), expected)


@pytest.mark.parametrize("load", ["shard_experts", "from_pretrained"])
def test_a_second_call_is_refused(load: str, tmp_path: Path) -> None:
    model, ids, group = make_model("mixtral"), token_ids(), EPGroup.single("cpu")
    if load == "from_pretrained":
        model.save_pretrained(tmp_path)
        model = from_pretrained(tmp_path, group)
    else:
        shard_experts(model, group)
    expected = logits_of(model, ids)
    for part in (model, model.model):
        with pytest.raises(ValueError, match=rf"experts of {type(part).__name__} are spread over ranks already"):
            shard_experts(part, group)
    assert torch.equal(logits_of(model, ids), expected)


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp8", "fp8_block", "int8_token"])
def test_every_scheme_shards(scheme: str) -> None:
    """Compares one layer, as rounding that flips an expert choice changes all logits. nvfp4 packs two per byte."""
    model = make_model("mixtral")
    experts = model.model.layers[1].mlp.experts
    generator = torch.Generator().manual_seed(3)
    x, ids = torch.randn(9, 32, generator=generator), torch.randint(0, 4, (9, 1), generator=generator)
    weights = torch.ones(9, 1)
    with torch.no_grad():
        expected = experts(x, ids, weights)
        shard_experts(model, EPGroup.single("cpu"), scheme=scheme)
        found = experts(x, ids, weights)
    assert model.ep_moe.layers[1].config.intermediate == 64
    assert [layer.tag.number for layer in model.ep_moe.layers] == [0, 1, 2]
    error = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
    assert 1e-4 < error < {"nvfp4": 0.8}.get(scheme, 0.15)  # 1.0 is a lost token; 4 bits twice, of a gated product


def test_nothing_holds_the_old_parameters() -> None:
    """A model that ran with "ep_moe" in one process has layers with views of its parameters."""
    model = make_model("mixtral")
    model.set_experts_implementation("ep_moe")
    logits_of(model, token_ids())
    experts = model.model.layers[0].mlp.experts
    assert hasattr(experts, "_ep_moe_local")
    shard_experts(model, EPGroup.single("cpu"), scheme="fp8_block")
    assert not hasattr(experts, "_ep_moe_local")


# What else a model may ask for.


def test_more_experts_of_a_token_than_32(tmp_path: Path) -> None:
    model, ids = make_model("qwen3_moe", num_experts=48, num_experts_per_tok=40, norm_topk_prob=True), token_ids()
    expected = logits_of(model, ids)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, EPGroup.single("cpu"))
    assert loaded.ep_moe.transport.config.max_topk == 40
    for sharded in (loaded, shard_experts(model, EPGroup.single("cpu"))):
        assert_close(logits_of(sharded, ids), expected)


@pytest.mark.parametrize(("name", "key"), [("hunyuan_v1_moe", "moe_topk"), ("ernie4_5_moe", "moe_k")])
def test_k_by_other_names(name: str, key: str) -> None:
    sizes = {"num_experts": 4} if key == "moe_topk" else {"moe_num_experts": 4}
    config = type(AutoConfig.for_model(name))(**sizes, **{key: 3})
    assert architectures.num_topk_of(config) == 3


@pytest.mark.parametrize("name", ["hy_v4", "minimax_m3_vl_text"])
def test_swiglu_of_other_names(name: str) -> None:
    """Both have a limit low enough that tokens reach it; MiniMax-M3 has alpha and adds 1 to the linear half."""
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "swiglu_limit": 0.5}
    if name == "minimax_m3_vl_text":
        sizes = {"num_local_experts": 4, "swiglu_limit": 0.5, "swiglu_alpha": 1.25}
    model = make_model(name, **sizes)
    experts = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    expected = ActivationConfig(kind="swiglu", limit=0.5)
    if name == "minimax_m3_vl_text":
        expected = ActivationConfig(kind="swiglu", alpha=1.25, beta=1.0, limit=0.5)
    assert activation_of(experts) == expected
    ids = token_ids()
    logits = logits_of(model, ids)
    shard_experts(model, EPGroup.single("cpu"))
    assert_close(logits_of(model, ids), logits)


@pytest.mark.parametrize("limit", [None, 0.0, float("inf")])
def test_a_limit_that_is_none_is_none(limit: float | None) -> None:
    experts = make_model("mixtral").model.layers[0].mlp.experts
    experts.swiglu_limit = limit
    assert activation_of(experts) == ActivationConfig(kind="silu")


LLAMA4 = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"}
LLAMA4 |= {"intermediate_size_mlp": 32, "num_local_experts": 4}
LLAMA4_VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
LLAMA4_VISION |= {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}


def test_a_model_that_would_ignore_us_says_so() -> None:
    text = transformers.Llama4TextConfig(**LLAMA4)
    both = transformers.Llama4Config(text_config=LLAMA4, vision_config=LLAMA4_VISION)
    message = r"Llama4\w+ \(num_local_experts 4\) computes its experts by itself"
    whole = transformers.Llama4ForConditionalGeneration
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_config(text, experts_implementation="ep_moe")
    with pytest.raises(ValueError, match=message):
        whole._from_config(both, experts_implementation="ep_moe")
    for make in (
        functools.partial(AutoModelForCausalLM.from_config, text),
        functools.partial(whole._from_config, both),
    ):
        model = make(experts_implementation="eager")
        with pytest.raises(ValueError, match=message):
            model.set_experts_implementation("ep_moe")
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no experts that transformers lets another"):
            shard_experts(model, EPGroup.single("cpu"))


def test_models_that_are_not_asked_for_experts_pass() -> None:
    dense = make_config("llama")
    AutoModelForCausalLM.from_config(dense, experts_implementation="ep_moe")
    moe = make_config("mixtral", **MODELS["mixtral"])
    pictures = transformers.LlavaConfig(text_config=moe, vision_config=transformers.CLIPVisionConfig(**SIZES))
    model = transformers.LlavaForConditionalGeneration._from_config(pictures, experts_implementation="ep_moe")
    text = model.model.language_model.config
    assert text._experts_implementation == "ep_moe"
    model.set_experts_implementation("eager")
    model.set_experts_implementation("ep_moe")
    assert text._experts_implementation == "ep_moe"


# In step.


def make_ernie() -> PreTrainedModel:
    config = transformers.Ernie4_5_VLMoeTextConfig(
        **{key: value for key, value in SIZES.items() if key not in ("num_experts_per_tok", "head_dim")},
        moe_k=2,
        moe_num_experts=4,
        moe_num_shared_experts=1,
        moe_intermediate_size=[16, 32],
        mlp_layer_types=["dense", "sparse", "sparse"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )
    torch.manual_seed(7)
    return ernie.Ernie4_5_VLMoeTextModel._from_config(config, experts_implementation="eager").eval()


def picture_tokens(rank: int) -> torch.Tensor | None:
    """Rank 0 has an image in one of two rows, rank 1 none."""
    return torch.tensor([[0, 1, 1, 1, 0, 0, 0], [0] * 7]) if rank == 0 else None


def see(model: PreTrainedModel, rank: int) -> torch.Tensor:
    with torch.no_grad():
        return model(token_ids(40 + rank), moe_mm_token_type_ids=picture_tokens(rank)).last_hidden_state


class Holder(torch.nn.Module):
    """A stand-in for a model class of another name."""


def experts_module() -> torch.nn.Module:
    class Experts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()

        def forward(self, *inputs: Any) -> None:
            raise AssertionError(inputs)

    return use_experts_implementation(Experts)(AutoConfig.for_model("mixtral"))


def test_the_installed_families_were_read() -> None:
    """A family that is new is to be read as the docstring of `architectures` says, and added there and here."""
    models = Path(transformers.__file__).parent / "models"
    files = models.glob("*/modeling_*.py")
    found = {path.parent.name for path in files if "@use_experts_implementation" in path.read_text(encoding="utf-8")}
    assert "mixtral" in found
    assert sorted(found - set(SURVEYED.split())) == []


@pytest.mark.skipif(not hasattr(transformers, "LaraMiniModel"), reason="needs the models of transformers 5.24")
def test_the_families_of_5_24() -> None:
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    sizes = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **linear}
    model, ids = make_model("lara_mini", linear_value_head_dim=8, **sizes), token_ids()
    expected = logits_of(model, ids)
    assert_close(logits_of(shard_experts(model, EPGroup.single("cpu")), ids), expected)
    assert not torch.equal(expected, torch.zeros_like(expected))
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_hidden_layers": 2}
    hy = importlib.import_module("transformers.models.hy_v4_vl.modeling_hy_v4_vl")
    activation = activation_of(hy.HYV4VLExperts(transformers.HYV4VLTextConfig(swiglu_limit=7.0, **sizes)))
    assert (activation.kind.value, activation.alpha, activation.beta, activation.limit) == ("swiglu", 1.0, 0.0, 7.0)
    loop = importlib.import_module("transformers.models.inkling2_loop.modeling_inkling2_loop")
    with pytest.raises(ValueError, match="the activation of Inkling2LoopExperts .* is none of"):
        activation_of(loop.Inkling2LoopExperts(transformers.Inkling2LoopTextConfig(**sizes)))


@surveyed
def test_what_is_named_exists() -> None:
    modules = [
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        for name in ("ernie4_5_vl_moe", "dots3_note", "diffusion_gemma", "qwen3_omni_moe")
    ]
    names = {architectures.KEPT_IN_STEP, *architectures.EXPERTS_OUT_OF_STEP}
    names |= architectures.OUT_OF_STEP.keys()
    assert [name for name in names if not any(hasattr(module, name) for module in modules)] == []


@pytest.mark.parametrize("name", architectures.OUT_OF_STEP)
def test_what_cannot_be_kept_in_step_is_named(name: str) -> None:
    part_name, reason = architectures.OUT_OF_STEP[name]
    model = type(name, (Holder,), {})()
    part = Holder()
    model.add_module("language_model", experts_module())
    model.add_module(part_name or "decoder", part)
    if part_name:
        architectures.check_in_step(model, 2)  # without experts in that part
    part.add_module("experts", experts_module())
    architectures.check_in_step(model, 1)
    with pytest.raises(ValueError, match=rf"{name} cannot be kept in step on 2 ranks.*{reason}"):
        architectures.check_in_step(model, 2)


@surveyed
def test_a_diffusion_model_runs_on_one_rank_alone() -> None:
    text = SIZES | {"num_hidden_layers": 2, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    with torch.device("meta"):
        model = transformers.DiffusionGemmaModel(transformers.DiffusionGemmaConfig(text_config=text))
    architectures.check_in_step(model, 1)
    with pytest.raises(ValueError, match="DiffusionGemmaModel cannot be kept in step on 2 ranks"):
        architectures.check_in_step(model, 2)


def test_hooks_with_batches_of_their_own_name_what_they_cannot_keep_in_step() -> None:
    experts = experts_module()
    architectures.check_hook_in_step(experts)
    for name in architectures.EXPERTS_OUT_OF_STEP:
        type(experts).__name__ = name
        with pytest.raises(ValueError, match=f"{name} cannot be kept in step.*shard_experts"):
            architectures.check_hook_in_step(experts)


# Two ranks.


def outcome(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001  what is raised is the result
        return f"{type(error).__name__}: {error}"
    return "fine"


def on_rank(group: EPGroup, base: Path) -> dict[str, Any]:
    """All checks on two ranks, so that ranks start only once: of what they write, read, refuse, and see in step."""
    torch.set_num_threads(1)
    rank, own = group.rank, base / f"of_rank_{group.rank}"
    found: dict[str, Any] = {}
    twice = Placement((0, 1, 2, 3, 0, 1), (0, 3, 6))  # two experts are on both ranks
    for name, placement in (("qwen3_moe", "round_robin"), ("gpt_oss", "linear"), ("mixtral", twice)):
        model = shard_experts(make_model(name), group, placement=placement)
        model.save_pretrained(own / name, is_main_process=rank == 0, max_shard_size="20KB")
        found[name] = sorted(path.name for path in own.glob(f"{name}/*"))
    ids, expected = token_ids(rank), logits_of(make_model("mixtral"), token_ids(rank))
    assert_close(logits_of(from_pretrained(base / "of_rank_0" / "mixtral", group), ids), expected)
    if rank == 1:
        own.mkdir()
    target = own / "qwen3_moe" / "config.json" if rank == 0 else own / "nothing"
    found["unwritable"] = outcome(lambda: model.save_pretrained(target))
    assert_close(logits_of(model, ids), expected)
    quantized = shard_experts(make_model("mixtral"), group, scheme="fp8_block")
    found["quantized"] = outcome(lambda: quantized.save_pretrained(own / "quantized"))
    found["left"] = sorted(path.name for path in own.iterdir())
    odd = make_model("mixtral")
    act_fn = odd.model.layers[-1].mlp.experts.act_fn
    if rank == 1:
        another_activation(odd)
    before = logits_of(odd, ids)
    found["refused"] = outcome(lambda: shard_experts(odd, group))
    assert torch.equal(logits_of(odd, ids), before)
    odd.model.layers[-1].mlp.experts.act_fn = act_fn
    assert_close(logits_of(shard_experts(odd, group), ids), expected)
    whole, model = make_ernie(), shard_experts(make_ernie(), group)
    assert (see(whole, 0) - see(whole, 1)).abs().max() > 0.1
    for which in (rank, 1 - rank, 1):  # with and without pictures
        assert_close(see(model, which), see(whole, which))
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    base = tmp_path_factory.mktemp("saved")
    return base, launch(on_rank, base, num_ranks=2, config=GroupConfig(timeout_secs=120), device="cpu")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_two_ranks_write_one_model(name: str, two_ranks: Any, tmp_path: Path) -> None:
    base, found = two_ranks
    make_model(name).save_pretrained(tmp_path)
    assert_same_checkpoint(base / "of_rank_0" / name, tmp_path)
    assert len(found[0][name]) > 5
    assert found[1][name] == []


def test_what_one_rank_cannot_write_both_hear(two_ranks: Any) -> None:
    first, second = (found["unwritable"] for found in two_ranks[1])
    assert first.startswith("ValueError: save_directory (")
    assert second == f"ValueError: rank 0 raised {first}"
    for found in two_ranks[1]:
        assert "holds its experts in scheme 'fp8_block'" in found["quantized"]
    assert two_ranks[1][0]["left"] == ["gpt_oss", "mixtral", "qwen3_moe"]
    assert two_ranks[1][1]["left"] == []


def test_what_one_rank_refuses_none_shards(two_ranks: Any) -> None:
    first, second = (found["refused"] for found in two_ranks[1])
    assert second.startswith("ValueError: the activation of MixtralExperts")
    assert first == f"ValueError: rank 1 raised {second}"


def save_alone(group: EPGroup, directory: Path) -> str:
    """Rank 0 saves, as one does with a model that each rank has whole; rank 1 goes on."""
    torch.set_num_threads(1)
    model = shard_experts(make_model("mixtral"), group)
    return outcome(lambda: model.save_pretrained(directory) if group.rank == 0 else logits_of(model, token_ids()))


def test_a_rank_that_saves_alone_is_named(tmp_path: Path) -> None:
    found = launch(save_alone, tmp_path / "never", num_ranks=2, config=GroupConfig(timeout_secs=4), device="cpu")
    for message in found:
        assert message.startswith("PeerLostError: rank 0 did not arrive in dispatch")
        assert "last seen in save_pretrained" in message
    assert not (tmp_path / "never").exists()


def test_weights_of_no_expert_tell_shapes() -> None:
    """A plan reads sizes from them, without a copy."""
    for name in ("mixtral", "gpt_oss"):
        weights = weights_of(make_model(name).model.layers[0].mlp.experts, ())
        assert (tuple(weights.w13.values.shape), tuple(weights.w2.values.shape)) == ((0, 128, 32), (0, 32, 64))
