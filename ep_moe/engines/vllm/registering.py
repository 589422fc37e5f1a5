"""Registration of out-of-tree classes with vLLM, for every class of experts that its models make."""

import importlib
import importlib.util
import logging
from typing import Any

import vllm
from vllm.model_executor.custom_op import op_registry_oot

from ep_moe.engines.common.plugin import Plugin
from ep_moe.engines.vllm.hooks import NEEDS
from ep_moe.environment import PluginConfig

# modules of vLLM that define subclasses of RoutedExperts, each in some version: a class is replaced by its name
SUBCLASS_MODULES = (
    "vllm.model_executor.models.dbrx",
    "vllm.model_executor.models.gpt_oss",
    "vllm.model_executor.models.transformers.moe",
)
MARK = "_ep_moe_plugin"  # attribute of our classes

_log = logging.getLogger("vllm.ep_moe")  # vLLM shows what is logged below its own name


def register_classes(config: PluginConfig) -> None:
    """Register a subclass of each class of routed experts; does nothing the second time. Local.

    Errors: RuntimeError names a hook that vLLM lacks, and a class that another plug-in has replaced.
    """
    if any(hasattr(found, MARK) for found in op_registry_oot.values()):
        return
    plugin = Plugin.create(NEEDS, vllm.__version__, config, _log)
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for name in SUBCLASS_MODULES:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    for theirs in (RoutedExperts, *_subclasses(RoutedExperts)):
        if theirs.__name__ in op_registry_oot:
            raise RuntimeError(f"another plug-in has replaced {theirs.__name__}; unset EP_MOE_VLLM or that plug-in")
        theirs.register_oot(_our_class(theirs, plugin), name=theirs.__name__)


def _subclasses(base: type) -> list[type]:
    """All subclasses, nearest first."""
    direct: list[type] = base.__subclasses__()
    return [*direct, *(deeper for found in direct for deeper in _subclasses(found))]


def _our_class(theirs: Any, plugin: Any) -> type:
    """A subclass whose method is adopted where the layer is eligible."""
    from ep_moe.engines.vllm.eligibility import kind_of_layer
    from ep_moe.engines.vllm.method import LayerMethod, compute_here
    from ep_moe.engines.vllm.parameters import note_tokens

    class EpMoeRoutedExperts(theirs):
        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            method = super()._get_quant_method(prefix, quant_config, moe_config)
            note_tokens(method, quant_config, self, prefix)
            try:
                kind = kind_of_layer(self, method, moe_config)
            except ValueError as error:
                plugin.refuse(self.layer_name, error)
            else:
                compute_here(method, LayerMethod(plugin, self, moe_config, kind))
            return method

    setattr(EpMoeRoutedExperts, MARK, plugin)
    return EpMoeRoutedExperts
