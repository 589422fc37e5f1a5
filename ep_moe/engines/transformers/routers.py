"""Our routing in place of the routers of a transformers model that compute the same.

A router of transformers computes logits [T, E] and returns (logits, weights [T, K], ids [T, K]). Ours keeps the module,
its parameters and the GEMM of the logits, so that checkpoints and the hooks behind `output_router_logits` see no
difference, and routes in one kernel on a GPU instead of about ten. What may differ:
- equal scores: ours go to the lower expert; those of transformers to any, as in `torch.topk`;
- ids are int32 by descending score, weights float32, rounded to the dtype in which the model returns them;
- MiniMax-M2 divides by a sum, ours by the sum + 1e-20, as DeepSeek-V3 does.

Letters: T tokens on this rank, H hidden, E experts, K top-k.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from ep_moe.config import RoutingConfig, RoutingMethod
from ep_moe.routing import route

Router = Any  # a torch.nn.Module with the attributes of its class in transformers
_PROBES = 64  # tokens on which a router is compared with ours
_SEED = 20240607
_RTOL, _ATOL = 1e-5, 1e-6  # of weights in float32


def _logits(router: Router, x: torch.Tensor) -> torch.Tensor:
    weight = router.weight
    if x.dim() != 2:
        x = x.reshape(-1, weight.shape[1])
    if x.dtype != weight.dtype:
        x = x.to(weight.dtype)
    return F.linear(x, weight, router._parameters.get("bias"))


def _float32_logits(router: Router, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x.reshape(-1, router.weight.shape[1]).float(), router.weight.float())


def _deepseek(router: Router) -> RoutingConfig:
    return RoutingConfig(
        method=RoutingMethod.DEEPSEEK_V3,
        num_topk=router.top_k,
        num_group=router.num_group,
        topk_group=router.topk_group,
        routed_scaling_factor=float(router.routed_scaling_factor),
        norm_topk_prob=router.norm_topk_prob,
    )


def _method(method: RoutingMethod) -> Callable[[Router], RoutingConfig]:
    return lambda router: RoutingConfig(method=method, num_topk=router.top_k)


def _softmax(router: Router) -> RoutingConfig:
    return _method(RoutingMethod.RENORMALIZE_NAIVE if router.norm_topk_prob else RoutingMethod.DEFAULT)(router)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What routers of the same source code compute.

    Args:
        config: of a router. logits: of a router and tokens [.., H].
        bias: the attribute with the bias of the choice, "" if there is none. takes_bias: the bias is the second
            argument of the forward.
    """

    config: Callable[[Router], RoutingConfig]
    logits: Callable[[Router, torch.Tensor], torch.Tensor] = _logits
    bias: str = ""
    takes_bias: bool = False


# Beginnings of the names of classes in transformers 5.17.0 and 5.23.0 whose forward has the same source.
_FORMS: dict[Form, tuple[str, str]] = {
    Form(config=_deepseek, logits=_float32_logits, bias="e_score_correction_bias"): (
        "TopkRouter",
        "AXK1 BailingHybrid DeepseekV3 DeepseekV32 Dots1 Dots3NoteText ExaoneMoe Glm4MoeLite Glm4Moe Glm4vMoeText "
        "Glm5NextText GlmMoeDsa HYV4 KimiLinear MiMoV2Flash NemotronH SolarOpen",
    ),
    Form(config=_softmax): (
        "TopKRouter",
        "FlexOlmo Mellum Olmoe Qwen2Moe Qwen3Moe Qwen3Next Qwen3OmniMoeTalkerText Qwen3OmniMoeThinkerText Qwen4ExpText",
    ),
    Form(config=_method(RoutingMethod.RENORMALIZE)): ("TopKRouter", "GptOss MiniMax Mixtral"),
    Form(config=_method(RoutingMethod.MINIMAX2), takes_bias=True): ("TopKRouter", "MiniMaxM2"),
}
FORMS: Mapping[str, Form] = {
    model + ending: form for form, (ending, models) in _FORMS.items() for model in models.split()
}


class RouterForward:
    """The forward of a router that routes by `ep_moe.routing.route`.

    Args:
        router: the module; its parameters are read in each call.
        form: what its class computes. weights_dtype: what its weights are rounded to.
    Errors: ValueError for a config that `RoutingConfig` refuses, AttributeError for a module without its attributes.
    """

    def __init__(self, router: Router, form: Form, weights_dtype: torch.dtype) -> None:
        self._router, self._form, self._weights_dtype = router, form, weights_dtype
        self.config = form.config(router)

    def __call__(
        self, hidden_states: torch.Tensor, *bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits [T, E], weights [T, K] float32, ids [T, K] int32. Local, no host sync."""
        if torch.compiler.is_compiling():  # which fuses the model's own operations, and cannot trace our launch
            return type(self._router).forward(self._router, hidden_states, *bias)
        logits = self._form.logits(self._router, hidden_states)
        own = getattr(self._router, self._form.bias) if self._form.bias else None
        chosen = route(logits, self.config, routing_bias=bias[0] if bias else own, weights_dtype=self._weights_dtype)
        return logits, chosen.topk_weights, chosen.topk_ids


def _probe_of(router: Router, form: Form, dtype: torch.dtype) -> tuple[Router, list[torch.Tensor]]:
    """A router of the same class and attributes with random parameters on the CPU, and arguments of its forward."""
    generator = torch.Generator().manual_seed(_SEED)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    num_experts, hidden = router.weight.shape
    probe, weight = copy.copy(router), normal(num_experts, hidden) * (2.0 / hidden**0.5)

    def biases(named: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
        found = {name: tensor for name, tensor in named.items() if name != "weight" and tensor is not None}
        return {name: normal(tensor.shape) * 0.3 for name, tensor in found.items()}

    own = {"weight": weight} | biases(router._parameters)
    vars(probe)["_parameters"] = {name: tensor.to(dtype) for name, tensor in own.items()}
    vars(probe)["_buffers"] = biases(router._buffers)
    inputs = [normal(_PROBES, hidden).to(dtype)]
    return probe, [*inputs, normal(num_experts)] if form.takes_bias else inputs


def forward_of(router: Router, compared: dict[object, torch.dtype]) -> RouterForward:
    """Our forward for a router, compared with that of its class on random logits.

    Args: compared: routers of the same class and config -> the dtype of their weights; this call adds its own.
    Errors: ValueError names the reason why the router stays. Local.
    """
    name, form = type(router).__name__, FORMS.get(type(router).__name__)
    if form is None:
        raise ValueError(f"{name} is not known")
    if "forward" in vars(router):
        raise ValueError(f"the forward of {name} is replaced already")
    try:
        key = (type(router), form.config(router), router.weight.shape, router.weight.dtype)
        if key not in compared:
            compared[key] = _compare(router, form)
        return RouterForward(router, form, compared[key])
    except (AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name} is not built as it is known: {error}") from error


@torch.no_grad()
def _compare(router: Router, form: Form) -> torch.dtype:
    """The dtype of a router's weights. Errors: ValueError if ours computes something else; those of its class."""
    probe, inputs = _probe_of(router, form, router.weight.dtype)
    dtype: torch.dtype = type(router).forward(probe, *inputs)[1].dtype
    probe, inputs = _probe_of(router, form, torch.float32)
    found, expected = RouterForward(probe, form, torch.float32)(*inputs), type(router).forward(probe, *inputs)
    if not _equal(found, expected):
        raise ValueError(f"{type(router).__name__} computes something else than it is known for")
    return dtype


def _equal(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Whether two routers gave the same logits, and the same experts the same weights, in any order."""
    dense = []
    for logits, weights, ids in (found, expected):
        chosen = torch.full_like(logits, torch.inf).scatter(1, ids.long(), weights.float())
        dense += [logits, chosen]
    return torch.equal(dense[0], dense[2]) and torch.allclose(dense[1], dense[3], rtol=_RTOL, atol=_ATOL)


def _router_beside(model: torch.nn.Module, experts: str) -> Router:
    """The router of the block that holds the experts of this name. Errors: ValueError if it is not known. Local."""
    block_name, _, own = experts.rpartition(".")
    block = model.get_submodule(block_name)
    known = [child for name, child in block.named_children() if name != own and type(child).__name__ in FORMS]
    if len(known) != 1:
        gates = [type(child).__name__ for name, child in block.named_children() if name in ("gate", "router")]
        raise ValueError(f"the router of {type(block).__name__} is not known" + (f" ({gates[0]})" if gates else ""))
    return known[0]


def replace_routers(model: torch.nn.Module, experts: Iterable[str]) -> str:
    """Route by `ep_moe.routing` in all blocks of a model, or in none.

    Args: model: changed in place. experts: the names of its experts modules.
    Returns: the reason why the model keeps its own routers, "" if they are replaced. Local.
    """
    replaced: list[tuple[Router, RouterForward]] = []
    compared: dict[object, torch.dtype] = {}
    try:
        for name in experts:
            router = _router_beside(model, name)
            replaced.append((router, forward_of(router, compared)))
    except ValueError as error:
        return str(error)
    for router, forward in replaced:
        router.__dict__["forward"] = forward
    return ""
