"""Our routing in place of the routers of transformers: the same experts, weights, logits and recorded outputs."""

import copy
import logging
from typing import Any

import pytest
import torch
from helpers import small_models
from helpers.small_models import LATENT, LOGITS_LIMIT
from transformers import PreTrainedModel

from ep_moe.engines.transformers import shard_experts
from ep_moe.engines.transformers.routers import FORMS
from ep_moe.group import EPGroup

GROUPED = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
SOFTMAX = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {**GROUPED, **LATENT}),
    "deepseek_v3_no_norm": (
        "deepseek_v3",
        {**GROUPED, **LATENT, "norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    ),
    "glm4_moe": ("glm4_moe", GROUPED),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 16, "num_experts_per_tok": 4}),
    "qwen3_moe": ("qwen3_moe", {**SOFTMAX, "norm_topk_prob": True}),
    "qwen3_moe_no_norm": ("qwen3_moe", {**SOFTMAX, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen2_moe": ("qwen2_moe", SOFTMAX),
    "olmoe": ("olmoe", {"num_experts": 16, "num_experts_per_tok": 4}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 16, "num_experts_per_tok": 4, "layer_types": ["full_attention"] * 3}),
}
WEIGHTS_LIMIT = 1e-6
STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # between a dtype's neighbors, relative


def make_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model whose routers have a bias of the choice, which transformers sets to zero."""
    model_type, sizes = MODELS.get(name, (name, {}))
    model = small_models.make_model(model_type, dtype=dtype, **{"num_key_value_heads": 4} | sizes)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape) * 0.2)
    return model


def routers_of(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in FORMS]


def run(model: PreTrainedModel) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], list[tuple[torch.Tensor, ...]]]:
    """The logits, the router logits that the model records, and each router's output."""
    outputs: list[tuple[torch.Tensor, ...]] = []
    hooks = [
        router.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        for router in routers_of(model)
    ]
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = model(ids, output_router_logits=True)
    for hook in hooks:
        hook.remove()
    return found.logits, found.router_logits, outputs


def dense(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The weights [T, E], -1 where an expert is not chosen."""
    return torch.full(logits.shape, -1.0).scatter(1, ids.long(), weights.float())


@pytest.mark.parametrize("name", MODELS)
def test_the_same_experts_and_weights(name: str) -> None:
    model = make_model(name)
    keys = set(dict(model.named_modules()))
    logits, recorded, outputs = run(model)
    shard_experts(model, EPGroup.single("cpu"))
    assert model.ep_moe.why_own_routers == ""
    assert all("forward" in vars(router) for router in routers_of(model))
    assert set(dict(model.named_modules())) == keys
    found_logits, found_recorded, found = run(model)
    assert (found_logits - logits).abs().max() < LOGITS_LIMIT * logits.abs().max()
    assert len(found_recorded) == len(recorded) == len(found) == len(outputs) > 1
    for mine, theirs in zip(found_recorded, recorded, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=LOGITS_LIMIT, atol=LOGITS_LIMIT)
    assert torch.equal(found[0][0], outputs[0][0])
    for index, (mine, theirs) in enumerate(zip(found, outputs, strict=True)):
        assert (mine[1].dtype, mine[2].dtype) == (torch.float32, torch.int32)
        limit = LOGITS_LIMIT if index else WEIGHTS_LIMIT  # later routers see rounding errors of the experts
        torch.testing.assert_close(dense(*mine), dense(*theirs), rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_router_alone(name: str, dtype: torch.dtype) -> None:
    """In the model's dtype, on tokens whose K + 1 largest scores differ: of equal ones torch chooses any."""
    model = make_model(name, dtype)
    shard_experts(model, EPGroup.single("cpu"))
    assert model.ep_moe.why_own_routers == ""
    router = routers_of(model)[0]
    x = (torch.randn(200, 32, generator=torch.Generator().manual_seed(3)) * 0.5).to(dtype)
    more = [torch.randn(16, generator=torch.Generator().manual_seed(4)) * 0.2] if name == "minimax_m2" else []
    with torch.no_grad():
        mine, theirs = router(x, *more), type(router).forward(router, x, *more)
    assert torch.equal(mine[0], theirs[0])
    ranked = mine[0].sort(dim=1).values
    clear = (ranked.diff(dim=1) > 0).all(1)
    assert int(clear.sum()) > 20
    found, expected = (dense(*output)[clear] for output in (mine, theirs))
    torch.testing.assert_close(found, expected, rtol=WEIGHTS_LIMIT + STEP[theirs[1].dtype], atol=WEIGHTS_LIMIT)
    assert torch.equal(mine[1], mine[1].to(theirs[1].dtype).float())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("class", "GraniteMoe"),
        ("replaced", "the forward of Qwen3MoeTopKRouter is replaced already"),
        ("code", "Qwen3MoeTopKRouter computes something else than it is known for"),
        ("attribute", "Qwen3MoeTopKRouter is not built as it is known"),
        ("value", "num_topk"),
    ],
)
def test_other_routers_are_kept(
    change: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In all layers, though only the last one is not known; and one line says so."""
    model = make_model("granitemoe" if change == "class" else "qwen3_moe")
    last = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")][-1]
    own = type(last).forward
    if change == "replaced":
        vars(last)["forward"] = lambda x: own(last, x)
    elif change == "code":

        def another(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, weights, ids = own(self, x)
            return logits, weights * 1.01, ids

        monkeypatch.setattr(type(last), "forward", another)
    elif change == "attribute":
        del last.norm_topk_prob
    elif change == "value":
        last.top_k = 0
    with caplog.at_level(logging.INFO, logger="ep_moe"):
        shard_experts(model, EPGroup.single("cpu"))
    assert reason in model.ep_moe.why_own_routers
    lines = [record.getMessage() for record in caplog.records if "own routers" in record.getMessage()]
    assert lines == [f"{type(model).__name__} keeps its own routers: {model.ep_moe.why_own_routers}"]
    replaced = [router for router in routers_of(model) if "forward" in vars(router)]
    assert replaced == ([last] if change == "replaced" else [])


def test_a_compiler_sees_the_models_own_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3_moe")
    shard_experts(model, EPGroup.single("cpu"))
    router, x = routers_of(model)[0], torch.randn(5, 32)
    assert router(x)[2].dtype == torch.int32
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert router(x)[2].dtype == torch.int64


def test_parameters_are_read_in_each_call() -> None:
    model = make_model("deepseek_v3")
    shard_experts(model, EPGroup.single("cpu"))
    router, x = routers_of(model)[0], torch.randn(5, 32)
    with torch.no_grad():
        before = copy.deepcopy(router(x))
        router.weight.mul_(-1)
        router.e_score_correction_bias.zero_()
        after = router(x)
        assert torch.equal(after[0], -before[0])
        torch.testing.assert_close(dense(*after), dense(*type(router).forward(router, x)), rtol=1e-6, atol=1e-6)
