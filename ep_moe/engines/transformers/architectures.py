"""Architectures of transformers in which ranks may call different MoE layers.

Every rank must call the same layers in the same order. The modeling files of transformers 5.24.0 with experts that
support other implementations (68 classes) were searched for conditional calls, loops and early returns:

| architecture | ranks call different layers because | here |
|---|---|---|
| Ernie-4.5-VL-MoE | `vision_moe` is called only by ranks with image or video tokens | kept in step |
| Dots3-Note | a vision tower with experts runs only on ranks with images | refused on several ranks |
| DiffusionGemma | each rank's own tokens decide when it stops denoising | refused on several ranks |
| Qwen3-Omni-MoE | the talker runs only if speech is requested, and until its end | refused on several ranks |

All others call every layer once in each forward pass, or as often as their config says (Inkling2-Loop); `generate`
needs `synced_gpus=True` if ranks stop at different steps.
"""

import functools
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ep_moe.engines.transformers.experts import SHARDED, ExpertsModule, is_experts

NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
NUM_TOPK_KEYS = ("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k")


# class of a model -> its submodule that only some ranks call, "" for the whole model, and the reason
OUT_OF_STEP = {
    "Dots3NoteModel": ("vision_tower", "a rank without images does not call them"),
    "DiffusionGemmaModel": ("", "ranks denoise for different numbers of steps"),
    "Qwen3OmniMoeForConditionalGeneration": (
        "talker",
        "ranks speak for different numbers of steps, or not at all; shard model.thinker alone",
    ),
}
EXPERTS_OUT_OF_STEP = ("Ernie4_5_VLMoeMoeExperts", "Dots3NoteExperts", "DiffusionGemmaTextExperts")
_MARK = "_ep_moe_checks"  # marks a method that `refuse_unsupported_models` has wrapped
KEPT_IN_STEP = "Ernie4_5_VLMoeMoeBlock"  # always calls text_moe first, then vision_moe if there are vision tokens


def num_topk_of(config: PreTrainedConfig) -> int | None:
    """K of a model's config, the largest if layers differ; None if it has none. Local."""
    text = config.get_text_config()
    for key in NUM_TOPK_KEYS:
        value = getattr(text, key, None)
        if isinstance(value, int):
            return value
        if isinstance(value, list | tuple) and value and all(isinstance(entry, int) for entry in value):
            return max(value)
    return None


def check_in_step(model: torch.nn.Module, num_ranks: int) -> None:
    """Refuse a model whose ranks would not call the same layers.

    Errors: ValueError names the class, the part with the experts, and the reason. Local.
    """
    for module in model.modules() if num_ranks > 1 else ():
        for model_name in OUT_OF_STEP.keys() & {base.__name__ for base in type(module).__mro__}:
            name, reason = OUT_OF_STEP[model_name]
            part = module.get_submodule(name) if not name or hasattr(module, name) else None
            if part is not None and any(is_experts(child) for child in part.modules()):
                where = f"the experts of its {name}" if name else "its experts"
                raise ValueError(
                    f"{model_name} cannot be kept in step on {num_ranks} ranks, {where} are not called equally often "
                    f"on all: {reason}"
                )


def check_hook_in_step(experts: ExpertsModule) -> None:
    """Refuse experts of `EXPERTS_OUT_OF_STEP`, for hooks of ranks with different batches. Errors: ValueError. Local."""
    name = type(experts).__name__
    if name in EXPERTS_OUT_OF_STEP:
        raise ValueError(
            f"{name} cannot be kept in step on ranks with batches of their own, which may not call it equally often: "
            f"use tp_size equal to ep_size, or ep_moe.engines.transformers.shard_experts"
        )


def keep_in_step(model: torch.nn.Module, num_topk: int | None) -> None:
    """Make blocks of `KEPT_IN_STEP` call skipped experts with zero tokens, so that every rank calls all. Local."""
    for module in model.modules():
        if type(module).__name__ == KEPT_IN_STEP:
            module.register_forward_pre_hook(_forget_calls)
            module.register_forward_hook(functools.partial(_call_the_rest, num_topk=num_topk or 1))


def _in_order(block: torch.nn.Module) -> list[ExpertsModule]:
    """The experts of a block, in the order in which it calls them."""
    return [block.get_submodule(name).experts for name in ("text_moe", "vision_moe")]


def _forget_calls(block: torch.nn.Module, _inputs: Any) -> None:
    for experts in _in_order(block):
        getattr(experts, SHARDED).called = False


def _call_the_rest(block: torch.nn.Module, _inputs: Any, output: Any, *, num_topk: int) -> None:
    tokens = output[0].new_empty(0, output[0].shape[-1])
    for experts in _in_order(block):
        if not getattr(experts, SHARDED).called:
            ids = torch.empty(0, num_topk, dtype=torch.int64, device=tokens.device)
            experts(tokens, ids, tokens.new_empty(0, num_topk))


def check_takes_experts(model: PreTrainedModel) -> None:
    """Refuse a model unless any of its modules, or the source of its class, supports experts implementations.

    Errors: ValueError names the class. Local.
    """
    if type(model)._can_set_experts_implementation() or any(is_experts(module) for module in model.modules()):
        return
    config = model.config.get_text_config()
    counts = {key: getattr(config, key, None) for key in NUM_EXPERTS_KEYS}
    found = {key: value for key, value in counts.items() if isinstance(value, int) and value > 1}
    if found and getattr(config, "is_moe", True):
        key, value = next(iter(found.items()))
        raise ValueError(
            f"{type(model).__name__} ({key} {value}) computes its experts by itself and takes no "
            f"experts_implementation: 'ep_moe' would be ignored"
        )


def refuse_unsupported_models(name: str) -> None:
    """Make transformers call `check_takes_experts` for models that use implementation `name`, when they are built and
    when it is set later: it would ignore the name, and has no hook, so two of its methods are wrapped, once. Local."""
    post_init, correct = PreTrainedModel.post_init, PreTrainedModel.get_correct_experts_implementation
    if hasattr(post_init, _MARK):
        return

    @functools.wraps(post_init)
    def checked_post_init(self: PreTrainedModel) -> None:
        if self.config._experts_implementation == name:
            check_takes_experts(self)
        post_init(self)

    @functools.wraps(correct)
    def checked_correct(self: PreTrainedModel, requested_experts: str | None) -> str:
        if requested_experts == name and self._modules:
            check_takes_experts(self)
        return correct(self, requested_experts)

    setattr(checked_post_init, _MARK, True)
    patched: Any = PreTrainedModel
    patched.post_init, patched.get_correct_experts_implementation = checked_post_init, checked_correct
