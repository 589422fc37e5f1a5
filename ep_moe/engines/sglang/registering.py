"""Registration of our hooks with SGLang: around the constructors of its layers and of their dispatchers."""

import logging
from collections.abc import Callable
from typing import Any

import sglang
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ep_moe.engines.common.plugin import ADOPTED, Plugin
from ep_moe.engines.sglang.hooks import NEEDS
from ep_moe.environment import SGLANG_BACKEND, PluginConfig

_MOE = "sglang.srt.layers.moe"
_log = logging.getLogger("ep_moe.sglang")
_plugins: list[Plugin] = []  # of this process: one, once registered


def register_hooks(config: PluginConfig) -> None:
    """Register our hooks; does nothing the second time. Errors: RuntimeError names a hook that SGLang lacks. Local."""
    if _plugins:
        return
    plugin = Plugin.create(NEEDS, sglang.__version__, config, _log)
    _plugins.append(plugin)
    _add_backend()
    layers = _Layers(plugin)
    for target, hook in (
        (f"{_MOE}.fused_moe_triton.layer.FusedMoE.__init__", layers.around_layer),
        (f"{_MOE}.fused_moe_triton.layer.create_moe_dispatcher", layers.around_dispatcher),
        (f"{_MOE}.ep_moe.layer.DeepEPMoE.__init__", _around_deepep_layer),
        (f"{_MOE}.moe_runner.runner.MoeRunner.__init__", layers.around_runner),
        (f"{_MOE}.utils.initialize_moe_config", _around_config),
        (f"{_MOE}.token_dispatcher.deepep.DeepEPConfig.__init__", _around_deepep_config),
        ("sglang.srt.batch_overlap.two_batch_overlap.execute_overlapped_operations", _around_two_batches),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)


class _Layers:
    """Hooks around layers that SGLang constructs, one inside of another at most by inheritance."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin
        self._constructed: list[Any] = []
        self._runner_error: NotImplementedError | None = None

    def around_layer(self, original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
        """Remember which layer is constructed: `create_moe_dispatcher` of 0.5.17 has no such argument."""
        self._constructed.append(layer)
        self._runner_error = None
        try:
            original(layer, *args, **kwargs)
            if self._runner_error is not None:  # nothing has asked for the layer's dispatcher
                raise self._runner_error
        finally:
            self._constructed.pop()

    def around_runner(self, original: Callable[..., None], runner: Any, *args: Any, **kwargs: Any) -> None:
        """Keep the error of a runner that does not serve the a2a backend, until it is known whether the layer is ours,
        which uses no runner."""
        try:
            original(runner, *args, **kwargs)
        except NotImplementedError as error:
            if not self._constructed:
                raise
            self._runner_error = error

    def around_dispatcher(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Our dispatcher for a layer that is eligible, whose method then computes here."""
        from ep_moe.engines.sglang.dispatcher import EpMoeDispatcher, EqualRowsDispatcher
        from ep_moe.engines.sglang.eligibility import kind_of_layer
        from ep_moe.engines.sglang.method import LayerMethod, compute_here

        layer = self._constructed[-1]
        try:
            kind = kind_of_layer(layer, layer.quant_method)
        except ValueError as error:
            self._plugin.refuse(layer.layer_name, error)
            if self._runner_error is not None:
                raise self._runner_error from error
            return original(*args, **kwargs)
        self._runner_error = None
        state = LayerMethod(self._plugin, layer, kind)
        compute_here(layer.quant_method, state)
        return EqualRowsDispatcher(state) if state.equal_rows else EpMoeDispatcher(state)


def _around_deepep_layer(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Let DeepEPMoE pass its calls on to FusedMoE if its method is ours: its constructor ends with needs of DeepEP."""
    try:
        original(layer, *args, **kwargs)
    except AssertionError:
        if not _is_ours(layer):
            raise
    if _is_ours(layer):
        layer.deprecate_flag = True


def _around_deepep_config(original: Callable[..., None], config: Any, *args: Any, **kwargs: Any) -> None:
    """Without DeepEP no SMs are its own: of two batches that alternate, prompts ask how many DeepGEMM has to spare."""
    try:
        original(config, *args, **kwargs)
    except NameError as error:  # of a class of DeepEP's
        from sglang.srt.layers.moe.utils import get_deepep_config

        if get_deepep_config():
            raise ValueError("--deepep-config is for DeepEP, which is not installed") from error
        config.num_sms = 0


def _around_two_batches(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Let the rows of the whole step size the rounds of its two halves, whose rows SGLang does not count."""
    from ep_moe.engines.sglang.step import halved

    with halved():
        return original(*args, **kwargs)


def _is_ours(layer: Any) -> bool:
    return hasattr(type(getattr(layer, "quant_method", None)), ADOPTED)


def _around_config(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Our name of a backend means "auto" to the layers that are not ours."""
    original(*args, **kwargs)
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.runtime_context import get_flags

    moe = get_flags().moe
    for name in ("runner_backend", "speculative_runner_backend"):
        if getattr(getattr(moe, name), "value", None) == SGLANG_BACKEND:
            setattr(moe, name, MoeRunnerBackend.AUTO)


def _add_backend() -> None:
    """Make --moe-runner-backend ep_moe legal, where SGLang takes names of others: not in 0.5.17."""
    try:
        from sglang.srt.arg_groups.choices import add_moe_runner_backend_choices
        from sglang.srt.layers.moe.utils import register_moe_runner_backend_name
    except ImportError:
        return
    register_moe_runner_backend_name(SGLANG_BACKEND)
    add_moe_runner_backend_choices([SGLANG_BACKEND])
