"""SGLang's layer `FusedMoE` and its relatives, over the experts of one rank.

Letters: T tokens, H hidden, I intermediate, K top-k, E experts, L those of this rank.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.library import custom_op

from ep_moe.functional.common import experts_for
from ep_moe.functional.sglang.calls import MoeRunnerConfig, options_of
from ep_moe.functional.sglang.configs import found_tiles
from ep_moe.functional.sglang.experts import activation_config, check_tokens, routed_rows
from ep_moe.functional.sglang.layer_formats import layer_format, parts_of
from ep_moe.functional.sglang.layer_loading import MoeParallel, Share, fit_scale, load_expert, load_stacked
from ep_moe.functional.sglang.layer_weights import weights_of
from ep_moe.functional.sglang.routing import chosen
from ep_moe.local_moe import local_moe
from ep_moe.placement import Placement
from ep_moe.quant import quantize_weight
from ep_moe.routing import Routing
from ep_moe.weights import ExpertWeights

# an operator takes tensors and plain values only, so a number refers to a layer; the registry keeps no layer alive
_LAYERS: "weakref.WeakValueDictionary[int, FusedMoE]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()
_OPTIONS = {field.name for field in dataclasses.fields(MoeRunnerConfig)}


class _Made:
    """Weights made of a layer's parameters, shared by shallow copies as these are; other copies make their own."""

    weights: ExpertWeights | None = None

    def __reduce__(self) -> tuple[type["_Made"], tuple[()]]:
        return _Made, ()


class FusedMoE(torch.nn.Module):
    """The routed experts of a layer: tokens with their experts in, the weighted sum out.

    Parameters have SGLang's names and shapes; `quant_config` says which. A rank of several has the experts
    [start_expert_id, end_expert_id], its result is its part of the sum.

    Args:
        num_experts: E, of all ranks, with the fused shared ones. hidden_size, intermediate_size: H and I.
        layer_id, prefix: in errors; a `prefix` that the config skips is not quantized.
        top_k: K, checked; None: any. num_fused_shared_experts: the last ones among E, which the ids choose as others.
        params_dtype: of unquantized weights and of biases, torch's default if None.
        reduce_results: sum over the ranks of `parallel`, an all-reduce.
        quant_config: SGLang's object, or the `quantization_config` of config.json; None: not quantized.
        activation: "silu", "gelu" (erf), "gelu_tanh" or "situ". gemm1_alpha, gemm1_clamp_limit, swiglu_limit: as of
            `fused_experts_impl`; with an alpha and `gate_up_interleaved` stacked rows of w13 alternate in checkpoints,
            and are loaded as [gate; up]. gemm1_beta: 1 or None. is_gated: True.
        apply_router_weight_on_input, no_combine: as of `fused_experts_impl`.
        routed_scaling_factor: multiplies the sum, unless `should_fuse_routed_scaling_factor_in_topk`.
        use_presharded_weights: tensors that are loaded have this rank's share of I alone.
        inplace: the result is written into `hidden_states`, unless `no_combine`.
        use_weight_loader_fused: the parameters' `weight_loader` is `weight_loader_fused`.
        with_bias: parameters w13_weight_bias [L, 2I] and w2_weight_bias [L, H]. quant_method: None.
        routing_method_type, enable_qwen35_fp8_deferred_finalize, uses_expert_location: without meaning here: logits say
            how they are routed, results are final, and experts lie as their ids say.
        parallel: the ranks, one by default.
    Errors: ValueError names the argument, its value and what is needed.
    """

    up_first = False  # rows of w13 are [up; gate]

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        layer_id: int,
        top_k: int | None = None,
        num_fused_shared_experts: int = 0,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        quant_config: Any = None,
        prefix: str = "",
        activation: str = "silu",
        apply_router_weight_on_input: bool = False,
        use_presharded_weights: bool = False,
        inplace: bool = True,
        no_combine: bool = False,
        routed_scaling_factor: float | None = None,
        gemm1_alpha: float | None = None,
        gemm1_beta: float | None = None,
        gemm1_clamp_limit: float | None = None,
        swiglu_limit: float | None = None,
        use_weight_loader_fused: bool = False,
        with_bias: bool = False,
        routing_method_type: Any = None,
        is_gated: bool = True,
        gate_up_interleaved: bool = True,
        enable_qwen35_fp8_deferred_finalize: bool = False,
        quant_method: Any = None,
        uses_expert_location: bool = True,
        *,
        parallel: MoeParallel | None = None,
    ) -> None:
        given = {**locals()}  # the arguments by their names
        super().__init__()
        del enable_qwen35_fp8_deferred_finalize, uses_expert_location
        ranks = MoeParallel() if parallel is None else parallel
        if quant_method is not None or not is_gated:
            raise ValueError(
                f"quant_method ({quant_method}) is not None or is_gated ({is_gated}) not True: quant_config says how "
                "weights are stored, with a gate"
            )
        if intermediate_size % ranks.tp_size:
            raise ValueError(f"intermediate_size ({intermediate_size}) is not a multiple of tp_size ({ranks.tp_size})")
        if not 0 <= num_fused_shared_experts <= num_experts:
            raise ValueError(f"num_fused_shared_experts ({num_fused_shared_experts}) is not in [0, {num_experts}]")
        if apply_router_weight_on_input and with_bias:
            raise ValueError("with_bias and apply_router_weight_on_input are both set: weights would multiply b1 too")
        self.layer_id, self.prefix, self.top_k = layer_id, prefix, top_k
        self.num_experts, self.num_fused_shared_experts = num_experts, num_fused_shared_experts
        self.hidden_size, self.reduce_results, self.parallel = hidden_size, reduce_results, ranks
        self.moe_ep_size, self.moe_tp_size = ranks.ep_size, ranks.tp_size
        self.moe_ep_rank, self.moe_tp_rank = divmod(ranks.rank, ranks.tp_size)
        self.intermediate_size_per_partition = intermediate_size // ranks.tp_size
        placement = Placement.linear(num_experts, ranks.ep_size)
        self.start_expert_id = placement.local_expert_offset(self.moe_ep_rank)
        self.num_local_experts = placement.num_local_experts(self.moe_ep_rank)
        self.end_expert_id = self.start_expert_id + self.num_local_experts - 1
        self.quant_config, self.use_presharded_weights = quant_config, use_presharded_weights
        sizes: dict[str, Any] = {"num_local_experts": self.num_local_experts}
        sizes["intermediate_size_per_partition"] = self.intermediate_size_per_partition
        self.moe_runner_config = MoeRunnerConfig(**{name: given[name] for name in _OPTIONS & given.keys()}, **sizes)
        options_of(self.moe_runner_config)
        numbers = gemm1_alpha, gemm1_clamp_limit, swiglu_limit
        self._activation = activation_config(activation, is_gated, *numbers, limit_name="gemm1_clamp_limit")
        alternating = gemm1_alpha is not None and gate_up_interleaved and activation == "silu"
        self._format = layer_format(quant_config, prefix, num_experts=num_experts)
        self._flags, self._is_nvfp4 = self._format.flags, self._format.scheme.name == "nvfp4"
        if alternating and self._format.stored.granularity == "block":
            raise ValueError(f"gemm1_alpha ({gemm1_alpha}) has alternating rows, which share no blocks of scales")
        self._share = Share(
            first=self.start_expert_id,
            count=self.num_local_experts,
            tp_rank=self.moe_tp_rank,
            tp_size=ranks.tp_size,
            presharded=use_presharded_weights,
            up_first=self.up_first,
            alternating=alternating,
        )
        sizes = {"num_local_experts": self.num_local_experts, "hidden": hidden_size}
        sizes |= {"intermediate": self.intermediate_size_per_partition, "with_bias": with_bias}
        sizes["dtype"] = torch.get_default_dtype() if params_dtype is None else params_dtype
        self._parts = {part.name: part for part in parts_of(self._format, num_experts, **sizes)}
        for name, part in self._parts.items():
            parameter = torch.nn.Parameter(part.initial(), requires_grad=False)
            loader = self.weight_loader_fused if use_weight_loader_fused else self.weight_loader
            parameter.weight_loader = loader  # type: ignore[attr-defined]
            parameter.part = part  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)
        self._kept = _Made()
        self._register()

    def _register(self) -> None:
        self._number = next(_NUMBERS)
        _LAYERS[self._number] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "attributes": self._attributes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy another layer: with a number of its own, and loaders of its own parameters."""
        attributes = state.pop("attributes")
        super().__setstate__(state)
        self._restore(attributes)
        self._register()

    def _attributes(self) -> dict[str, dict[str, Any]]:
        """Each parameter's attributes, such as its loader, which torch loses where it puts another one in its place."""
        return {name: vars(getattr(self, name)) for name in self._parts}

    def _restore(self, attributes: dict[str, dict[str, Any]]) -> None:
        for name, values in attributes.items():
            vars(getattr(self, name)).update(values)

    def _forget(self) -> None:
        """Parameters have changed: what was made of them is made again."""
        self._kept.weights = None

    def _load_from_state_dict(self, state_dict: Mapping[str, torch.Tensor], prefix: str, *options: Any) -> None:
        """`load_state_dict`, after which parameters of scales have the dtypes of the state."""
        attributes = self._attributes()
        for name, part in self._parts.items():
            if prefix + name in state_dict:
                attributes[name].pop("scale_dtype", None)  # of those before, which the state replaces
                fit_scale(getattr(self, name), part, state_dict[prefix + name], name)
        super()._load_from_state_dict(state_dict, prefix, *options)
        self._restore(attributes)
        self._forget()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "FusedMoE":
        """`to` and the like move parameters, which keep their dtypes: the format says these."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        attributes = self._attributes()
        super()._apply(moved, recurse)
        self._restore(attributes)
        self._forget()
        return self

    def weight_loader(
        self,
        param: torch.nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int | None,
    ) -> None:
        """Copy a tensor of one expert into a parameter of this layer; those of other ranks' experts are left out.

        Args:
            loaded_weight: whole, or with `use_presharded_weights` this rank's share. weight_name: in errors.
            shard_id: "w1" the gate, "w3" the up half, "w2". expert_id: among all E; None: of all experts, [E, ...].
        Errors: ValueError names the tensor, its shape and what is needed. Local.
        """
        part: Any = getattr(param, "part", None)
        own = part is not None and self._parts.get(part.name) is part
        if not own:
            raise ValueError(f"param {tuple(param.shape)} is not a parameter of layer {self.layer_id}")
        if expert_id is not None and not 0 <= expert_id < self.num_experts:
            raise ValueError(f"expert_id ({expert_id}) of {weight_name} is not in [0, {self.num_experts})")
        self._forget()
        fit_scale(param, part, loaded_weight, weight_name)
        if expert_id is None:
            load_stacked(part, param.data, loaded_weight, weight_name, shard_id, self._share, self.num_experts)
        else:
            load_expert(part, param.data, loaded_weight, weight_name, shard_id, expert_id, self._share)

    def weight_loader_fused(
        self, param: torch.nn.Parameter, loaded_weight: torch.Tensor, weight_name: str, shard_id: str
    ) -> None:
        """Copy the tensor of all experts [E, rows, columns] into a parameter of this layer.

        Args: shard_id: "w13", rows [gate; up], or in turns with gemm1_alpha; or "w2". The others: as of
            `weight_loader`; groups of bytes may have a dimension of their own, as gpt-oss' blocks.
        Errors: as of `weight_loader`. Local.
        """
        if shard_id not in ("w13", "w2"):
            raise ValueError(f"shard_id ({shard_id!r}) of {weight_name} is not w13 or w2")
        self.weight_loader(param, loaded_weight, weight_name, shard_id, None)

    def process_weights_after_loading(self) -> None:
        """Make ready for calls; a first call does so too, and so does one after a loader, `load_state_dict` or `to`.

        Needed if parameters with scales were changed in another way. Weights that are quantized on load are so here.
        """
        if self._format.on_load and self.w13_weight.dtype != torch.float8_e4m3fn:
            for field in ("w13", "w2"):
                parameter = getattr(self, f"{field}_weight")
                matrix = quantize_weight(parameter.data, self._format.scheme)
                assert matrix.scale is not None
                parameter.data = matrix.values
                scale = torch.nn.Parameter(matrix.scale, requires_grad=False)
                self.register_parameter(f"{field}_weight_scale", scale)
        self._kept.weights = self._made()

    def _made(self) -> ExpertWeights:
        local = slice(self.start_expert_id, self.end_expert_id + 1)
        return weights_of(self._format, self.tensors, local, up_first=self.up_first)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by field and part of a `StoredMatrix`, such as "w13_values" and "w2_scale"; "w13_bias"."""
        found = {f"{part.field}_{part.what}": getattr(self, name).data for name, part in self._parts.items()}
        if self._format.on_load and hasattr(self, "w13_weight_scale"):
            found |= {f"{field}_scale": getattr(self, f"{field}_weight_scale").data for field in ("w13", "w2")}
        return found

    @property
    def expert_weights(self) -> ExpertWeights:
        """The parameters as the runtime's own weights; the same object until they change."""
        if self._kept.weights is None:
            self.process_weights_after_loading()
        assert self._kept.weights is not None
        return self._kept.weights

    @property
    def should_fuse_routed_scaling_factor_in_topk(self) -> bool:
        """True for NVFP4 weights of modelopt: router weights have the factor, and the layer does not apply it."""
        return self._is_nvfp4

    def forward(self, hidden_states: torch.Tensor, topk_output: Any, pre_quant_input: Any = None) -> torch.Tensor:
        """The weighted sum of each token's experts.

        Args:
            hidden_states: [T, H]. topk_output: SGLang's or our `StandardTopKOutput`, `TritonKernelTopKOutput`, without
                `no_combine`, or `BypassedTopKOutput`, whose logits are routed here.
            pre_quant_input: None: tokens are quantized here.
        Returns: [T, H], or [T, K, H] with `no_combine`; `hidden_states`, overwritten, with `inplace`.
        Errors: ValueError. Collective over the ranks of `parallel` if `reduce_results`, else local; an operator under
        torch.compile. Host sync and CUDA graphs: as of `fused_experts_impl`.
        """
        if pre_quant_input is not None:
            raise ValueError("pre_quant_input is given, tokens are quantized here")
        (x, routing), config = chosen(hidden_states, topk_output), self.moe_runner_config
        num_topk = routing.topk_ids.numel() // max(hidden_states.shape[0], 1)
        if self.top_k is not None and hidden_states.shape[0] and num_topk != self.top_k:
            raise ValueError(f"topk_output has {num_topk} experts a token, layer {self.layer_id} has {self.top_k}")
        if x is not hidden_states and config.no_combine:
            raise ValueError("no_combine is set, and topk_output has pairs by expert, whose rows are summed here")
        inplace = config.inplace and not config.no_combine
        if x is hidden_states and inplace and not torch.compiler.is_compiling():
            return self.run(x, routing, x)
        if torch.compiler.is_compiling():
            y = _layer_op(x, routing.topk_ids, routing.topk_weights, self._number)
        else:
            y = self.run(x, routing)
        if x is not hidden_states:
            y = y.view(hidden_states.shape[0], num_topk, y.shape[1]).float().sum(1).to(y.dtype)
        return hidden_states.copy_(y) if inplace else y

    def run(self, x: torch.Tensor, routing: Routing, out: torch.Tensor | None = None) -> torch.Tensor:
        """`forward` with chosen experts, into `out` if it is given."""
        check_tokens(x)
        if x.shape[1] != self.hidden_size:
            raise ValueError(f"hidden_states are {tuple(x.shape)}; [T, {self.hidden_size}] needed")
        config, weights = self.moe_runner_config, self.expert_weights
        if self.start_expert_id:
            routing = Routing(topk_ids=routing.topk_ids - self.start_expert_id, topk_weights=routing.topk_weights)
        factor = config.routed_scaling_factor
        if factor is None or config.no_combine or self.should_fuse_routed_scaling_factor_in_topk:
            factor = 1.0
        tiles = None if self._flags is None else found_tiles(self._flags, weights.w2.values, x, weights.scheme)
        experts = experts_for(self._activation, weights.scheme, x.device, tiles)
        if config.no_combine and not (config.no_combine_keep_router_weight or config.apply_router_weight_on_input):
            routing = Routing(topk_ids=routing.topk_ids, topk_weights=torch.ones_like(routing.topk_weights))
        num_topk = routing.topk_ids.shape[1]
        options = {"on_input": config.apply_router_weight_on_input, "no_combine": config.no_combine}
        rows, routing = routed_rows(x, routing, weights, **options, factor=factor)
        y = local_moe(rows, routing, weights, experts, dtype=x.dtype, out=out)
        if config.no_combine:
            y = y.view(-1, num_topk, y.shape[1])
        return self.reduced(y)

    def reduced(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks if `reduce_results`, in place. Collective then."""
        if self.reduce_results and self.parallel.size > 1:
            torch.distributed.all_reduce(y, group=self.parallel.group)
        return y

    @classmethod
    def make_expert_params_mapping(
        cls, ckpt_gate_proj_name: str, ckpt_down_proj_name: str, ckpt_up_proj_name: str, num_experts: int
    ) -> list[tuple[str, str, int, str]]:
        """Parts of names: of parameters and of the checkpoint's tensors, with their expert and `weight_loader`'s shard.

        Example: ("experts.w13_", "experts.3.gate_proj.", 3, "w1"), so that experts.3.gate_proj.weight is loaded into
        experts.w13_weight.
        """
        shards = {"w1": ckpt_gate_proj_name, "w2": ckpt_down_proj_name, "w3": ckpt_up_proj_name}
        return [
            ("experts.w2_" if shard == "w2" else "experts.w13_", f"experts.{expert}.{name}.", expert, shard)
            for expert in range(num_experts)
            for shard, name in shards.items()
        ]

    @classmethod
    def make_expert_input_scale_params_mapping(cls, num_experts: int) -> list[tuple[str, str, int, str]]:
        """`make_expert_params_mapping` for tensors that are named w1, w2 and w3 in the checkpoint."""
        return cls.make_expert_params_mapping("w1", "w2", "w3", num_experts)

    @classmethod
    def make_expert_params_mapping_fused(
        cls,
        ckpt_gate_up_proj_name: str,
        ckpt_down_proj_name: str,
        ckpt_gate_up_proj_bias_name: str,
        ckpt_down_proj_bias_name: str,
    ) -> list[tuple[str, str, str]]:
        """Names of parameters and of stacked tensors, and the shard of `weight_loader_fused`."""
        names = {"w13_weight": ckpt_gate_up_proj_name, "w13_weight_bias": ckpt_gate_up_proj_bias_name}
        names |= {"w2_weight": ckpt_down_proj_name, "w2_weight_bias": ckpt_down_proj_bias_name}
        return [(f"experts.{own}", f"experts.{name}", own.partition("_")[0]) for own, name in names.items()]

    @classmethod
    def make_expert_params_mapping_fused_mxfp4(
        cls,
        ckpt_gate_up_proj_name: str,
        ckpt_down_proj_name: str,
        ckpt_gate_up_proj_bias_name: str,
        ckpt_down_proj_bias_name: str,
        ckpt_gate_up_proj_scale_name: str,
        ckpt_down_proj_scale_name: str,
    ) -> list[tuple[str, str, str]]:
        """`make_expert_params_mapping_fused`, and the scales."""
        names = ckpt_gate_up_proj_name, ckpt_down_proj_name, ckpt_gate_up_proj_bias_name, ckpt_down_proj_bias_name
        return [
            *cls.make_expert_params_mapping_fused(*names),
            ("experts.w13_weight_scale", f"experts.{ckpt_gate_up_proj_scale_name}", "w13"),
            ("experts.w2_weight_scale", f"experts.{ckpt_down_proj_scale_name}", "w2"),
        ]


@custom_op("ep_moe::sglang_fused_moe", mutates_args=())
def _layer_op(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int) -> torch.Tensor:
    """`FusedMoE` under torch.compile, which does not trace into it."""
    found = _LAYERS.get(layer)
    if found is None:
        raise RuntimeError(f"layer {layer} of a compiled graph no longer exists: keep its FusedMoE alive")
    return found.run(x, Routing(topk_ids=topk_ids, topk_weights=topk_weights))


@_layer_op.register_fake
def _fake(x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int) -> torch.Tensor:
    del topk_weights
    found = _LAYERS.get(layer)
    no_combine = found is not None and found.moe_runner_config.no_combine
    return x.new_empty((x.shape[0], topk_ids.shape[1], x.shape[1]) if no_combine else x.shape)


_register_effectful_op(torch.ops.ep_moe.sglang_fused_moe.default, _EffectType.ORDERED)
