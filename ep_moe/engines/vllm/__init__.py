"""vLLM with its MoE layers on ep_moe: a general plug-in, found by its entry point and switched on by EP_MOE_VLLM=1.

    EP_MOE_VLLM=1 vllm serve MODEL --enable-expert-parallel --data-parallel-size 2

docs/engines/vllm.md says what works. Only `register` is called from outside; the other modules import vLLM.
Letters: T rows on this rank, H hidden, I intermediate, K top-k, E physical experts, L local experts, R ranks.
"""

from ep_moe.environment import PluginConfig

__all__ = ["register"]


def register() -> None:
    """Register our classes with vLLM if EP_MOE_VLLM is 1: vLLM calls this in each of its processes, more than once.

    Errors: ValueError for a bad environment variable; RuntimeError names a hook that this vLLM lacks. Local.
    """
    config = PluginConfig.from_environ()
    if not config.vllm:
        return
    from ep_moe.engines.vllm.registering import register_classes

    register_classes(config)
