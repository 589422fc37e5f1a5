"""Hugging Face models on our experts give the same logits and the same text as in transformers alone."""

import contextlib
import dataclasses
import functools
import gc
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from helpers.small_models import LOGITS_LIMIT, logits_of, make_model, token_ids
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.utils import is_accelerate_available

from ep_moe.app.start import SHIPPED_MODEL
from ep_moe.config import ActivationConfig, ActivationKind, GroupConfig
from ep_moe.engines import transformers as ours
from ep_moe.engines.common import transports
from ep_moe.engines.transformers import (
    architectures,
    distributed_config,
    from_pretrained,
    parallel,
    register,
    shard_experts,
)
from ep_moe.engines.transformers.experts import activation_of, weights_of
from ep_moe.group import EPGroup
from ep_moe.launch import launch
from ep_moe.layer import ExpertParallelMoE
from ep_moe.placement import Placement

TIED = {"moe_intermediate_size": 16, "num_experts": 8, "mlp_only_layers": [1], "tie_word_embeddings": True}
WIDE = {"moe_intermediate_size": 16, "num_experts": 48, "num_experts_per_tok": 40, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe_tied": {"model_type": "qwen3_moe", **TIED},
    "qwen3_moe_wide": {"model_type": "qwen3_moe", **WIDE},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "layer_types": ["full_attention"] * 3},
}
LOADABLE = ("qwen3_moe_tied", "qwen3_moe_wide", "mixtral")


@functools.cache
def directory_of(name: str) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="ep_moe_test_"))
    make_model(**MODELS[name]).save_pretrained(directory, max_shard_size="40KB")
    return directory


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """Most tests name "ep_moe" themselves."""
    register()
    yield
    for name in LOADABLE:
        shutil.rmtree(directory_of(name))
    directory_of.cache_clear()


def text_of(model: PreTrainedModel, ids: torch.Tensor, num_tokens: int, **options: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, **options
        )


def load_whole(directory: Path, experts: str = "eager") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, experts_implementation=experts, dtype=torch.float32).eval()


# One process, all experts.


@pytest.mark.parametrize("name", ["qwen3_moe_tied", "gpt_oss"])
def test_experts_implementation(name: str) -> None:
    model, ids = make_model(**MODELS[name]), token_ids(0)
    expected, text = logits_of(model, ids), text_of(model, ids, 5)
    model.set_experts_implementation("ep_moe")
    assert (logits_of(model, ids) - expected).abs().max() < LOGITS_LIMIT
    assert torch.equal(text_of(model, ids, 5), text)
    model.set_experts_implementation("eager")
    assert torch.equal(logits_of(model, ids), expected)
    for key, value in model.named_parameters():
        if "experts.down_proj" in key:
            value.data.zero_()
    assert (logits_of(model, ids) - expected).abs().max() > 1000 * LOGITS_LIMIT


def make_experts(has_gate: bool = True, has_bias: bool = False, transposed: bool = False, **flags: Any) -> Any:
    """An experts module with these flags, H 32, I 48, 3 experts; all parameters differ."""

    class Experts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            del config
            self.num_experts = 3
            width = 96 if has_gate else 48
            first = "gate_up_proj" if has_gate else "up_proj"
            shapes = {first: (3, width, 32), "down_proj": (3, 32, 48)}
            for key, shape in shapes.items():
                shape = (shape[0], shape[2], shape[1]) if transposed else shape
                self.register_parameter(key, torch.nn.Parameter(0.2 * torch.randn(shape)))
            if has_bias:
                self.register_parameter(f"{first}_bias", torch.nn.Parameter(torch.randn(3, width)))
                self.register_parameter("down_proj_bias", torch.nn.Parameter(torch.randn(3, 32)))
            self.act_fn = torch.nn.SiLU() if has_gate else lambda x: torch.relu(x).square()

        def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
            raise AssertionError("an implementation runs in place of this")

    torch.manual_seed(5)
    decorated = use_experts_implementation(
        Experts, has_gate=has_gate, has_bias=has_bias, is_transposed=transposed, **flags
    )
    return decorated(AutoConfig.for_model("mixtral"))


def interleaved(**flags: Any) -> Any:
    module = make_experts(is_concatenated=False, **flags)
    type(module)._apply_gate = lambda self, x: self.act_fn(x[..., 0::2]) * x[..., 1::2]
    return module


def run_experts(module: Any, implementation: str, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return ALL_EXPERTS_FUNCTIONS[implementation](module, *inputs)


def expert_inputs(num_tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(num_tokens)])
    return torch.randn(num_tokens, 32, generator=generator), ids, torch.rand(num_tokens, 2, generator=generator)


@pytest.mark.parametrize(
    "make",
    [
        make_experts,
        functools.partial(make_experts, has_bias=True),
        functools.partial(make_experts, transposed=True, has_bias=True),
        interleaved,
        functools.partial(interleaved, transposed=True, has_bias=True),
        functools.partial(make_experts, has_gate=False),
        functools.partial(make_experts, has_gate=False, has_bias=True, transposed=True),
    ],
    ids=["plain", "bias", "transposed", "interleaved", "interleaved_transposed", "no_gate", "no_gate_transposed"],
)
def test_flags_of_experts_modules(make: Any) -> None:
    module, inputs = make(), expert_inputs()
    expected = run_experts(module, "batched_mm", *inputs)
    assert (run_experts(module, "ep_moe", *inputs) - expected).abs().max() < LOGITS_LIMIT


def test_ids_of_other_ranks_are_left_out() -> None:
    """transformers' own expert parallelism marks another rank's expert by id 3 of 3 local experts."""
    module, (x, ids, weights) = make_experts(), expert_inputs()
    elsewhere = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    assert 0 < elsewhere.sum() < ids.numel()
    expected = run_experts(module, "batched_mm", x, ids, weights.masked_fill(elsewhere, 0.0))
    found = run_experts(module, "ep_moe", x, ids.masked_fill(elsewhere, 3), weights)
    assert (found - expected).abs().max() < LOGITS_LIMIT
    ids[0, 0] = 4
    with pytest.raises(ValueError, match=r"1 ids outside \[-1, num_experts \(3\)\)"):
        run_experts(module, "ep_moe", x, ids, weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_experts_of_one_process_in_a_cuda_graph() -> None:
    """Captured with one input, replayed with another: nothing is read back to the host."""
    module = make_experts(has_bias=True).to("cuda", torch.bfloat16)
    x, ids, weights = (tensor.cuda() for tensor in expert_inputs())
    x = x.bfloat16()
    expected = run_experts(module, "ep_moe", 2 * x, ids, weights)
    run_experts(module, "ep_moe", x, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_experts(module, "ep_moe", x, ids, weights)
    x.mul_(2)
    graph.replay()
    assert torch.equal(found, expected)


def test_weights_are_views_and_stay_current() -> None:
    module = make_experts(has_bias=True)
    weights = weights_of(module)
    assert weights.w13.values.data_ptr() == module.gate_up_proj.data_ptr()
    assert weights.w2.values.data_ptr() == module.down_proj.data_ptr()
    for module in (make_experts(), make_experts(transposed=True, has_bias=True), interleaved(has_bias=True)):
        inputs = expert_inputs()
        before = run_experts(module, "ep_moe", *inputs)
        with torch.no_grad():
            module.down_proj.mul_(2)
        expected = run_experts(module, "batched_mm", *inputs)
        assert (run_experts(module, "ep_moe", *inputs) - expected).abs().max() < LOGITS_LIMIT
        assert (expected - before).abs().max() > 1000 * LOGITS_LIMIT
        for parameter in module.parameters():
            parameter.data.mul_(-0.5)  # which torch does not count as a new version
        expected = run_experts(module, "batched_mm", *inputs)
        assert (run_experts(module, "ep_moe", *inputs) - expected).abs().max() < LOGITS_LIMIT
        module.double()
        module.float()
        module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.flip(0))
        more = expert_inputs(num_tokens=5000)  # beyond what the transport was made for
        expected = run_experts(module, "batched_mm", *more)
        assert (run_experts(module, "ep_moe", *more) - expected).abs().max() < LOGITS_LIMIT


def test_no_backward() -> None:
    module, (x, ids, weights) = make_experts(), expert_inputs()
    y = ALL_EXPERTS_FUNCTIONS["ep_moe"](module, x, ids, weights)
    assert torch.equal(y, run_experts(module, "ep_moe", x, ids, weights))
    with pytest.raises(RuntimeError, match="no backward"):
        y.sum().backward()


def test_what_cannot_be_honored_is_named() -> None:
    module = make_experts()
    module.has_post_expert_norm = True
    with pytest.raises(ValueError, match="has_post_expert_norm"):
        weights_of(module)
    module = make_experts()
    module.act_fn = torch.nn.GELU(approximate="tanh")
    with pytest.raises(ValueError, match=r"activation of Experts \(has_gate=True\).*silu, gelu"):
        activation_of(module)
    module = make_experts()
    module.down_proj = torch.nn.Parameter(torch.zeros(3, 32, 48).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"down_proj of Experts is torch.float8_e4m3fn.*bfloat16"):
        weights_of(module)
    with pytest.raises(ValueError, match="Linear has no experts"):
        shard_experts(torch.nn.Linear(2, 2), EPGroup.single("cpu"))


def test_activations_are_recognized() -> None:
    gpt_oss = make_model(**MODELS["gpt_oss"]).model.layers[0].mlp.experts
    assert activation_of(gpt_oss) == ActivationConfig(kind="swiglu", alpha=1.702, beta=1.0, limit=7.0)
    assert activation_of(make_experts(has_gate=False)).kind is ActivationKind.RELU2
    module = make_experts()
    module.act_fn = torch.nn.GELU()
    assert activation_of(module).kind is ActivationKind.GELU


def limited(module: Any, gate_limit: float | None, low: float | None, high: float | None) -> Any:
    """A module that clamps its gate and its linear half."""

    def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate if gate_limit is None else gate.clamp(max=gate_limit)
        return module.act_fn(gate) * (up if low == high else up.clamp(low, high))

    module._apply_gate = apply_gate
    return module


@pytest.mark.parametrize("limit", [9.0, 16.0, 100.0, 900.0])
def test_a_limit_is_seen_wherever_it_is(limit: float) -> None:
    """One that the module does not declare, and one that it does."""
    for bounds in ((limit, None, None), (None, None, limit), (None, -limit, None)):
        with pytest.raises(ValueError, match="activation of Experts"):
            activation_of(limited(make_experts(), *bounds))
    module = limited(make_experts(), limit, -limit, limit)
    module.limit = limit
    assert activation_of(module) == ActivationConfig(kind="swiglu", limit=limit)
    module.limit = limit + 1
    with pytest.raises(ValueError, match="activation of Experts"):
        activation_of(module)


# One rank, read from a directory.


def test_from_pretrained_on_one_rank() -> None:
    directory, ids = directory_of("qwen3_moe_tied"), token_ids(1)
    whole = load_whole(directory)
    whole.generation_config.max_new_tokens = 3
    whole.generation_config.save_pretrained(directory)
    model = from_pretrained(directory, EPGroup.single("cpu"))
    assert (logits_of(model, ids) - logits_of(whole, ids)).abs().max() < LOGITS_LIMIT
    assert torch.equal(text_of(model, ids, 5, synced_gpus=True), text_of(whole, ids, 5))
    assert model.generation_config.max_new_tokens == 3
    assert not model.training
    for key, value in whole.named_buffers():
        assert torch.equal(model.get_buffer(key), value), key
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert len(model.ep_moe.layers) == 2


def test_session() -> None:
    directory, ids = directory_of("qwen3_moe_tied"), token_ids(1)
    model = from_pretrained(directory, EPGroup.single("cpu"), layout="flat")
    session, chosen = model.ep_moe, []
    for index in (0, 2):
        gate = model.model.layers[index].mlp.gate
        gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
    logits_of(model, ids)
    expected = torch.tensor([[int((picks == expert).sum()) for expert in range(8)] for picks in chosen])
    assert torch.equal(session.expert_load, expected)
    session.idle = True
    hidden = torch.randn(4, 32)
    picks = torch.tensor([[0, 1]] * 4)
    experts = model.model.layers[0].mlp.experts
    assert torch.equal(experts(hidden, picks, torch.ones(4, 2)), torch.zeros(4, 32))
    assert torch.equal(session.expert_load, expected)
    session.idle = False
    assert experts(hidden, picks, torch.ones(4, 2)).abs().max() > 0
    session.reset_expert_load()
    assert int(session.expert_load.sum()) == 0
    session.destroy()
    session.destroy()


@pytest.mark.parametrize(
    ("dtype", "scheme", "limit"),
    [(torch.bfloat16, "none", 0.01), (torch.float32, "fp8_block", 0.15)],
    ids=["bfloat16", "fp8_block"],
)
def test_dtype_and_scheme(dtype: torch.dtype, scheme: str, limit: float) -> None:
    """Compares one layer, not the logits, which change completely once rounding flips an expert choice."""
    directory = directory_of("mixtral")
    with mock.patch.object(ExpertParallelMoE, "warmup", autospec=True) as warmed:
        model = from_pretrained(directory, EPGroup.single("cpu"), dtype=dtype, scheme=scheme)
    assert model.dtype == dtype
    [call] = warmed.call_args_list  # the layers are alike
    assert call.args[0] in model.ep_moe.layers
    assert call.kwargs == {"num_topk": 2, "padded": False}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    x, ids, weights = expert_inputs()
    expected = load_whole(directory).model.layers[1].mlp.experts(x, ids, weights)
    found = model.model.layers[1].mlp.experts(x.to(dtype), ids, weights.to(dtype))
    assert found.dtype == dtype
    error = ((found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
    assert 1e-4 < error < limit


def _edit(directory: Path, target: Path, edit: Any) -> Path:
    """A copy of a checkpoint in one file, changed."""
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors |= load_file(path)
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    return target


@pytest.mark.parametrize(
    ("edit", "fragments"),
    [
        (lambda t: t.pop("model.norm.weight"), ("lacks model.norm.weight",)),
        (
            lambda t: t.update({"model.extra.weight": torch.zeros(2)}),
            ("holds model.extra.weight", "MixtralForCausalLM"),
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(7)}), ("model.norm.weight", "[7]", "[32]")),
        (
            lambda t: [t.pop(key) for key in list(t) if "layers.1." in key and ".experts." in key],
            ("model.layers.1.mlp.experts", "model.layers.0.mlp.experts"),
        ),
    ],
    ids=["missing", "unexpected", "misshapen", "layer_without_experts"],
)
def test_bad_dense_tensors_are_named(tmp_path: Path, edit: Any, fragments: tuple[str, ...]) -> None:
    directory = _edit(directory_of("mixtral"), tmp_path, edit)
    with pytest.raises(ValueError) as caught:
        from_pretrained(directory, EPGroup.single("cpu"))
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_old_buffers_are_passed_over(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    directory = _edit(directory_of("mixtral"), tmp_path, lambda t: t.update({name: torch.zeros(4)}))
    model = from_pretrained(directory, EPGroup.single("cpu"))
    assert (logits_of(model, token_ids(1)) - logits_of(load_whole(directory), token_ids(1))).abs().max() < LOGITS_LIMIT


def test_bad_options() -> None:
    group = EPGroup.single("cpu")
    with pytest.raises(ValueError, match=r"4 experts on 2 ranks, expected 4 experts on 1 ranks"):
        from_pretrained(directory_of("mixtral"), group, placement=Placement.linear(4, 2))
    with pytest.raises(ValueError, match="sideways"):
        from_pretrained(directory_of("mixtral"), group, layout="sideways")
    with pytest.raises(ValueError, match="best"):
        from_pretrained(directory_of("mixtral"), group, placement="best")
    model = from_pretrained(directory_of("mixtral"), group, max_tokens_per_rank=8)
    with pytest.raises(ValueError, match=r"num_tokens \(14\) exceeds max_tokens_per_rank \(8\)"):
        logits_of(model, token_ids(1))


# Two ranks, each with a batch of its own.


def rank_ids(rank: int) -> torch.Tensor:
    return token_ids(20 + rank, rows=1 + rank, length=9 - 4 * rank)


def load_spread(directory: Path, config: Any) -> PreTrainedModel:
    """A model that transformers itself spreads over ranks."""
    return AutoModelForCausalLM.from_pretrained(directory, distributed_config=config, dtype=torch.float32).eval()


def hook_config(group: EPGroup, directory: Path) -> Any:
    return distributed_config(AutoConfig.from_pretrained(directory), group.num_ranks)


def close(model: PreTrainedModel, directory: Path, ids: torch.Tensor) -> bool:
    return bool((logits_of(model, ids) - logits_of(load_whole(directory), ids)).abs().max() < LOGITS_LIMIT)


def texts_of_different_length(group: EPGroup, directory: Path) -> bool:
    """Rank 0 stops after 2 tokens, rank 1 after 6: rank 0 goes on stepping with it."""
    model, ids = from_pretrained(directory, group, max_tokens_per_rank=64), rank_ids(group.rank)
    num_tokens = 2 + 4 * group.rank
    found = text_of(model, ids, num_tokens, synced_gpus=True)
    return torch.equal(found, text_of(load_whole(directory), ids, num_tokens))


def hook(group: EPGroup, directory: Path) -> bool:
    """transformers' own expert parallelism with our transport, all ranks on the same 7 and then 1 tokens."""
    model = load_spread(directory, hook_config(group, directory))
    own, every = (made.model.layers[0].mlp.experts.gate_up_proj for made in (model, load_whole(directory)))
    own = own.to_local() if hasattr(own, "to_local") else own
    assert own.shape[0] * group.num_ranks == every.shape[0]
    return all(close(model, directory, token_ids(3, rows=1, length=length)) for length in (7, 1))


def out_of_order(group: EPGroup, directory: Path) -> bool:
    """Ranks call two layers of a new model, that of rank 1 in the other order; then the model as it should be. Layers
    that are made in the first call are numbered in the model's order, not in that of the calls."""
    model, (x, ids, weights) = load_spread(directory, hook_config(group, directory)), expert_inputs()
    message = ""
    for index in (0, 1) if group.rank == 0 else (1, 0):
        try:
            model.model.layers[index].mlp.experts(x, ids, weights)
        except ValueError as error:
            message = str(error)
    return "ranks are out of step" in message and close(model, directory, token_ids(3, rows=1))


def later_model(group: EPGroup, directory: Path) -> bool:
    """Another model of the same shape opens no transport, though rank 1 has collected the first one and rank 0 not."""
    with mock.patch.object(transports, "create_transport", wraps=transports.create_transport) as opened:
        if group.rank == 1:
            gc.collect()
        return hook(group, directory) and not opened.called


def own_batches(group: EPGroup, directory: Path) -> bool:
    """The hook where each rank has a batch of its own (5.23); and a model that cannot be kept in step then."""
    config = transformers.distributed.DistributedConfig(
        tp_size=1, fsdp_size=group.num_ranks, ep_size=group.num_ranks, ep_implementation="ep_moe"
    )
    same = close(load_spread(directory, config), directory, rank_ids(group.rank))
    words = "MixtralExperts cannot be kept in step on ranks with batches of their own"
    known = (*architectures.EXPERTS_OUT_OF_STEP, "MixtralExperts")
    with mock.patch.object(architectures, "EXPERTS_OUT_OF_STEP", known), pytest.raises(ValueError, match=words):
        load_spread(directory, config)
    return same


VERSION = tuple(int(number) for number in re.findall(r"\d+", transformers.__version__)[:2])
NEW = VERSION >= (5, 23)
# transformers spreads nothing over ranks without accelerate
HAS_HOOK = (NEW or VERSION < (5, 19)) and is_accelerate_available()


CASES: dict[str, tuple[Callable[[EPGroup, Path], bool], str, bool]] = {  # what, for which model, if transformers can
    "texts": (texts_of_different_length, "mixtral", True),
    "hook": (hook, "mixtral", HAS_HOOK),
    "hook for many experts": (hook, "qwen3_moe_wide", HAS_HOOK),
    "later model": (later_model, "mixtral", HAS_HOOK),
    "out of order": (out_of_order, "mixtral", HAS_HOOK),
    "own batches": (own_batches, "mixtral", HAS_HOOK and NEW),
}


def on_rank(group: EPGroup, directories: dict[str, Path]) -> dict[str, bool]:
    """All cases on two ranks, so that ranks start only once."""
    torch.set_num_threads(1)
    register()
    return {case: run(group, directories[name]) for case, (run, name, here) in CASES.items() if here}


@functools.cache
def two_ranks() -> list[dict[str, bool]]:
    directories = {name: directory_of(name) for name in LOADABLE}
    # transformers' own expert parallelism uses any visible GPUs
    env, config = {"CUDA_VISIBLE_DEVICES": ""}, GroupConfig(timeout_secs=120)
    return launch(on_rank, directories, num_ranks=2, config=config, device="cpu", env=env)


@pytest.mark.parametrize("case", CASES)
def test_on_two_ranks(case: str) -> None:
    """Each with a batch of its own, or by transformers' own expert parallelism."""
    if not CASES[case][2]:
        pytest.skip("needs transformers 5.17, 5.18 or 5.23 and accelerate")
    assert [found[case] for found in two_ranks()] == [True, True]


# Registration.


def call_and_look(group: EPGroup, name: str) -> bool:
    """Whether a call registers, in a process that has only imported."""
    arguments: dict[str, Callable[[], tuple[Any, ...]]] = {
        "register": tuple,
        "distributed_config": lambda: (AutoConfig.for_model("mixtral"), 2),
        "shard_experts": lambda: (torch.nn.Linear(2, 2), EPGroup.single("cpu")),
        "from_pretrained": lambda: (SHIPPED_MODEL, EPGroup.single("cpu")),
    }
    before = PreTrainedModel.post_init
    assert "ep_moe" not in ALL_EXPERTS_FUNCTIONS
    assert before.__module__ == PreTrainedModel.__module__
    with contextlib.suppress(RuntimeError, ValueError):
        getattr(ours, name)(*arguments[name]())
    return "ep_moe" in ALL_EXPERTS_FUNCTIONS and PreTrainedModel.post_init is not before


@pytest.mark.parametrize("name", ["register", "distributed_config", "shard_experts", "from_pretrained"])
def test_a_call_registers_and_not_an_import(name: str) -> None:
    assert launch(call_and_look, name, num_ranks=1, device="cpu") == [True]


def test_registering_twice_is_fine() -> None:
    register()
    model, ids = make_model(**MODELS["mixtral"]), token_ids(0)
    expected = logits_of(model, ids)
    register(layout="batched", max_tokens_per_rank=16)
    model.set_experts_implementation("ep_moe")
    assert (logits_of(model, ids) - expected).abs().max() < LOGITS_LIMIT
    register()


def test_releases_between_have_experts_but_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Between:
        tp_size: int | None = None
        ep_size: int | None = None

    monkeypatch.setattr(parallel, "DistributedConfig", Between)
    register()
    assert "ep_moe" in ALL_EXPERTS_FUNCTIONS
    with pytest.raises(RuntimeError, match=rf"transformers {re.escape(transformers.__version__)} .*5\.23"):
        distributed_config(AutoConfig.for_model("mixtral"), 2)
