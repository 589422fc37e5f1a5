"""SGLang with its MoE layers on ep_moe: a general plug-in, found by its entry point and switched on by EP_MOE_SGLANG=1.

    EP_MOE_SGLANG=1 python -m sglang.launch_server --model-path MODEL --tp-size 2 --ep-size 2

docs/engines/sglang.md says what works. Only `register` is called from outside; the other modules import SGLang.
Letters: T rows on this rank, H hidden, I intermediate, K top-k, E physical experts, L local experts, R ranks.
"""

import dataclasses
import sys

from ep_moe.environment import SGLANG_BACKEND, PluginConfig, switch_on

__all__ = ["register"]


def register() -> None:
    """Register our hooks with SGLang if EP_MOE_SGLANG is 1, or if its command line says --moe-runner-backend ep_moe.

    SGLang calls this in each of its processes. A command line sets EP_MOE_SGLANG for those that it starts.
    Errors: SystemExit for a bad environment variable, and for a hook that this SGLang lacks; SGLang would log any other
    exception and serve without us. Local.
    """
    try:
        config = PluginConfig.from_environ()
        if not config.sglang and _asked_for(sys.argv):
            switch_on("EP_MOE_SGLANG")
            config = dataclasses.replace(config, sglang=True)
        if not config.sglang:
            return
        from ep_moe.engines.sglang.registering import register_hooks

        register_hooks(config)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"ep_moe: {error}") from error


def _asked_for(arguments: list[str]) -> bool:
    """Whether a command line chooses our backend of experts."""
    option = "--moe-runner-backend"
    pairs = zip(arguments, arguments[1:], strict=False)
    return f"{option}={SGLANG_BACKEND}" in arguments or (option, SGLANG_BACKEND) in pairs
