"""A quantization method of vLLM that computes here: vLLM's own object creates and loads the weights, we do the rest.

Letters: T rows on this rank, K top-k, E physical experts, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import logging
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

from ep_moe.config import Layout, MoEConfig, PluginConfig, TransportConfig
from ep_moe.engines.common.layers import warm_up
from ep_moe.engines.common.transports import SharedTransports, with_topk
from ep_moe.engines.vllm.eligibility import LayerKind
from ep_moe.engines.vllm.experts import EpMoeBatchedExperts, EpMoeStandardExperts
from ep_moe.engines.vllm.parameters import RowOrder, share_scale, weights_of
from ep_moe.engines.vllm.prepare_finalize import EpMoePrepareAndFinalize, RoundOptions
from ep_moe.engines.vllm.step import RowShare, tokens_of_ranks
from ep_moe.group import PeerLostError
from ep_moe.layer import ExpertParallelMoE
from ep_moe.transport import Transport
from ep_moe.weights import ExpertWeights

SMALL_STEP = 1024  # tokens of all ranks up to which "auto" packs rows (COMPACT) instead of gathering them (FLAT)
ATTRIBUTE = "ep_moe"  # of a method: its `LayerMethod`


@dataclasses.dataclass(eq=False)
class Plugin:
    """What all layers of a process share.

    Attributes:
        config: the options. transports: those of the layers. log: where lines are said.
        said: lines that were said once. warm: kinds of layers whose kernels are compiled.
        loaded: sizes of the transports that ranks have waited for.
    """

    config: PluginConfig
    transports: SharedTransports
    log: logging.Logger
    said: set[str] = dataclasses.field(default_factory=set)
    warm: set[Any] = dataclasses.field(default_factory=set)
    loaded: set[TransportConfig] = dataclasses.field(default_factory=set)

    def say_once(self, key: str, level: int, line: str) -> None:
        """Log a line unless one with the same key was logged before. Local."""
        if key not in self.said:
            self.said.add(key)
            self.log.log(level, "%s", line)

    def refuse(self, layer_name: str, why: ValueError) -> None:
        """Say once for each reason that a layer stays on vLLM's own path. Errors: ValueError if strict. Local."""
        line = f"ep_moe does not run {layer_name} and layers like it, vLLM does: {why}"
        if self.config.strict:
            raise ValueError(f"{line} (EP_MOE_STRICT=1)") from why
        self.say_once(str(why), logging.WARNING, line)


class LayerMethod:
    """The state and the work of one layer, which its method of vLLM calls.

    Args:
        plugin: shared with the other layers. layer: RoutedExperts, as far as its constructor has come.
        moe: its FusedMoEConfig. kind: what it computes.
    Collective at the first layer: ranks join the group of the transports.
    """

    def __init__(self, plugin: Plugin, layer: Any, moe: Any, kind: LayerKind) -> None:
        self._plugin, self._moe, self._kind = plugin, moe, kind
        self._name = layer.layer_name
        self._number = plugin.transports.number_module()
        self._order = RowOrder()
        self._kernels: dict[Layout, mk.FusedMoEKernel] = {}
        parallel = moe.moe_parallel_config
        self._share = RowShare.of(parallel)
        self._slots = 2 if get_current_vllm_config().parallel_config.use_ubatching else 1
        self._process_group = get_ep_group().device_group if parallel.ep_size > 1 else None
        self._device = torch.empty(0).device  # vLLM makes its models under their device
        self._group = plugin.transports.join(self._process_group, self._device)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts that the layer may use."""
        given = self._plugin.config.layout
        return (Layout.COMPACT, Layout.FLAT) if given is None else (given,)

    def load(self, layer: Any) -> mk.FusedMoEKernel:
        """Take the layer's parameters; called again after each reload of weights.

        Returns: the kernel of the first layout; vLLM asks it for properties that all layouts share.
        Collective at the first call, without a deadline: ranks read checkpoints at different speeds.
        """
        if self._kind.interleaved:
            self._order.separate(layer)
        if self._kind.scheme.weight.granularity == "tensor":
            share_scale(layer)
        transport = self._transport()
        weights = self._with_input_scales(layer, weights_of(layer, self._kind.loaded))
        for layout in self.layouts:
            moe_layer = ExpertParallelMoE(
                self._config(layout),
                weights,
                transport,
                experts=self._plugin.config.experts,
                layer_index=self._number,
            )
            self._warm_up(moe_layer)
            self._kernels[layout] = self._kernel(moe_layer)
        return self._kernels[self.layouts[0]]

    def apply(self, layer: Any, call: dict[str, Any]) -> torch.Tensor:
        """Compute the layer for the rows of this rank.

        Args: layer: RoutedExperts. call: vLLM's arguments by name.
        Errors: as of `Transport.dispatch_send`; any other failure of this rank is raised here after its round is ended.
        `PeerLostError` is logged. Collective.
        """
        x, ids = call["x"], call["topk_ids"]
        kernel = self._kernels[self._layout(x.shape[0])]
        exchange: EpMoePrepareAndFinalize = kernel.prepare_finalize
        exchange.begin()
        try:
            return kernel.apply(
                hidden_states=x,
                w1=layer.w13_weight,
                w2=layer.w2_weight,
                topk_weights=call["topk_weights"],
                topk_ids=ids,
                activation=layer.activation,
                global_num_experts=layer.global_num_experts,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=layer.apply_router_weight_on_input,
                shared_experts=call["shared_experts"],
                shared_experts_input=call["shared_experts_input"],
            )
        except PeerLostError as error:
            self._plugin.log.error("ep_moe in %s: %s", self._name, error)
            raise
        except Exception:
            exchange.fail(*ids.shape)
            raise

    def _layout(self, num_rows: int) -> Layout:
        """The layout of this step; ranks may differ."""
        if len(self.layouts) == 1:
            return self.layouts[0]
        return Layout.COMPACT if tokens_of_ranks(num_rows)[1] <= SMALL_STEP else Layout.FLAT

    def _config(self, layout: Layout) -> MoEConfig:
        moe = self._moe
        return MoEConfig(
            hidden=moe.hidden_dim,
            intermediate=moe.intermediate_size_per_partition,
            num_experts=moe.num_experts,
            activation=self._kind.activation,
            scheme=self._kind.scheme.name,
            layout=layout,
        )

    def _transport(self) -> Transport:
        """The transport of all layers with these sizes. Collective when it is made."""
        moe = self._moe
        sizes = TransportConfig(
            hidden=moe.hidden_dim,
            max_tokens_per_rank=max(self._share.most(moe.max_num_tokens), 1),
            dtype=moe.in_dtype,
            num_slots=self._slots,
        )
        sizes = with_topk(sizes, moe.experts_per_token)
        if sizes not in self._plugin.loaded:  # the first layer of its kind waits until all ranks have read their files
            self._group.wait_for_all("load")
            self._plugin.loaded.add(sizes)
        shared = self._plugin.transports.get(self._process_group, moe.num_experts, sizes, self._device)
        layouts = " or ".join(layout.value for layout in self.layouts)
        self._plugin.say_once(
            f"{sizes} {self._kind.scheme.name}",
            logging.INFO,
            f"ep_moe runs {self._name} and layers like it: {shared.group.num_ranks} ranks, scheme "
            f"{self._kind.scheme.name}, layout {layouts} (by the step's tokens), at most {sizes.max_tokens_per_rank} "
            "tokens per rank",
        )
        return shared.transport

    def _with_input_scales(self, layer: Any, weights: ExpertWeights) -> ExpertWeights:
        """Add static scales of activations, if there are: one for all experts of all ranks, the largest, since vLLM's
        load balancer moves experts without them. Collective then."""
        if not self._kind.loaded.static:
            return weights
        own = [float(getattr(layer, f"{name}_input_scale").max()) for name in ("w13", "w2")]
        first, second = (max(scales) for scales in zip(*self._group.all_gather_object(own), strict=True))
        like: dict[str, Any] = {"dtype": torch.float32, "device": weights.w13.values.device}
        return dataclasses.replace(
            weights,
            w13_input_scale=torch.full((1,), first, **like),
            w2_input_scale=torch.full((weights.num_local_experts,), second, **like),
        )

    def _warm_up(self, moe_layer: ExpertParallelMoE) -> None:
        """Compile the kernels of a kind of layer once. Collective on GPUs, does nothing on a CPU."""
        kind = (moe_layer.config, id(moe_layer.transport), *(tensor is None for tensor in moe_layer.weights.optional))
        if kind not in self._plugin.warm:
            self._plugin.warm.add(kind)
            warm_up([moe_layer], self._moe.experts_per_token)

    def _kernel(self, moe_layer: ExpertParallelMoE) -> mk.FusedMoEKernel:
        """vLLM's kernel of our prepare/finalize and experts."""
        layout, transport = moe_layer.config.layout, moe_layer.transport
        options = RoundOptions(
            layout=layout,
            scheme=moe_layer.scheme,
            layer=moe_layer.tag,
            share=self._share,
            input_scale=moe_layer.weights.w13_input_scale,
            sized=True,
        )
        experts: EpMoeBatchedExperts | EpMoeStandardExperts
        if layout is Layout.BATCHED:
            experts = EpMoeBatchedExperts(
                self._moe, FUSED_MOE_UNQUANTIZED_CONFIG, transport.config.max_tokens_per_rank, transport.num_ranks
            )
        else:
            experts = EpMoeStandardExperts(self._moe, FUSED_MOE_UNQUANTIZED_CONFIG)
        experts.bind(moe_layer.weights, moe_layer.experts)
        return mk.FusedMoEKernel(EpMoePrepareAndFinalize(transport, options), experts)


def adopt(method: Any, state: LayerMethod) -> None:
    """Let a method of vLLM compute here: its class becomes a subclass with the same name, which vLLM compares. Local.

    A subclass and not a wrapper: vLLM asks for a method's class, its name and its attributes while it loads weights.
    """
    theirs = type(method)
    namespace = {
        "__module__": theirs.__module__,
        "__qualname__": theirs.__qualname__,
        "__doc__": theirs.__doc__,
        "ep_moe_adopted": True,
        "is_monolithic": property(lambda self: False),
        "skip_forward_padding": property(lambda self: False),
        "has_unpadded_output": property(lambda self: False),
        "supports_pre_processed_weights": False,
        "maybe_roundup_sizes": _keep_sizes,
        "process_weights_after_loading": _process_weights_after_loading,
        "get_fused_moe_quant_config": _quant_config,
        "apply": _apply,
    }
    method.__class__ = type(theirs.__name__, (theirs,), namespace)
    object.__setattr__(method, ATTRIBUTE, state)


def _keep_sizes(
    self: Any, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any
) -> tuple[int, int]:
    """vLLM would round sizes up for a kernel of its own."""
    return hidden_size, intermediate_size_per_partition


def _process_weights_after_loading(self: Any, layer: Any) -> None:
    """vLLM would repack weights for a kernel of its own; we take them as they were loaded."""
    self.moe_quant_config = FUSED_MOE_UNQUANTIZED_CONFIG
    self.moe_kernel = getattr(self, ATTRIBUTE).load(layer)


def _quant_config(self: Any, layer: Any) -> Any:
    """Our prepare/finalize and experts know the format from their scheme."""
    return FUSED_MOE_UNQUANTIZED_CONFIG


def _apply(
    self: Any,
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared_experts: Any,
    shared_experts_input: torch.Tensor | None,
) -> torch.Tensor:
    """The call of vLLM's runner."""
    call = {
        "x": x,
        "topk_weights": topk_weights,
        "topk_ids": topk_ids,
        "shared_experts": shared_experts,
        "shared_experts_input": shared_experts_input,
    }
    result: torch.Tensor = getattr(self, ATTRIBUTE).apply(layer, call)
    return result
