"""Loading a transformers model from a checkpoint directory without its experts, or whole from a quantized checkpoint.

transformers' own loader allocates every tensor that it does not find, so it cannot skip the experts. For fp8 it infers
block sizes from the numbers of rows and scales, which is wrong if the last block is short, and on a CPU the loaded
model has several dtypes.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from ep_moe.engines.transformers.experts import drop_parameters, find_experts, write_weights
from ep_moe.engines.transformers.registering import ensure_registered
from ep_moe.placement import Placement
from ep_moe.weights import Checkpoint, DenseTensors, ExpertWeights
from ep_moe.weights.json_files import read_object


def build_skeleton(directory: Path, dtype: torch.dtype | None, attention: str | None) -> PreTrainedModel:
    """Build the model of a directory on the meta device (shapes and dtypes, no memory), without experts.

    Args:
        dtype: of parameters; by default that of config.json, else float32.
        attention: transformers' `attn_implementation`; None lets transformers choose.
    Errors: ValueError for a config that transformers cannot read. Local.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - of huggingface_hub for a value of another type, or of a config class
        reason = " ".join(str(error).split())
        raise ValueError(f"{directory} has no config.json that transformers can read: {reason}") from error
    vars(config).pop("quantization_config", None)  # the model is not quantized once it is loaded
    ensure_registered()
    options = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype or config.dtype or torch.float32, experts_implementation="ep_moe", **options
        )
    for module in find_experts(model).values():
        drop_parameters(module)
        module._is_hf_initialized = True  # so that transformers does not initialize its parameters
    if (directory / "generation_config.json").is_file():
        read_object(directory / "generation_config.json")  # its error is clearer than that of transformers
        model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return model


def load_dense(model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device) -> None:
    """Load all weights of a skeleton except the experts, tie tied weights, compute buffers that are not stored.

    Errors: ValueError names tensors that are missing, unexpected or of a wrong shape. Local.
    """
    needed, kept = set(model.state_dict()), model._get_dtype_plan(model.dtype)
    with checkpoint.dense(model.dtype) as dense:
        missing = _check_names(model, dense, checkpoint.directory)
        for name in filter(needed.__contains__, dense):
            parent, _, leaf = name.rpartition(".")
            module, stored = model.get_submodule(parent), dense.stored[name]
            places: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
            place = places[leaf]
            if stored.shape != tuple(place.shape):
                raise ValueError(f"{stored.name} in {stored.file} is {[*stored.shape]}, expected {[*place.shape]}")
            chosen = (kept[pattern] for pattern in kept if re.search(pattern.replace("*", r"\d+"), name))
            tensor = dense[name].to(device=device, dtype=next(chosen, place.dtype))
            places[leaf] = tensor if places is module._buffers else torch.nn.Parameter(tensor, requires_grad=False)
            vars(places[leaf])["_is_hf_initialized"] = True  # so that transformers does not initialize it
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    for module in model.modules():
        for leaf in module._non_persistent_buffers_set & module._buffers.keys():
            buffer = module._buffers[leaf]
            module._buffers[leaf] = None if buffer is None else torch.empty_like(buffer, device=device)
    model.initialize_weights()  # computes only those buffers: all else is marked as initialized
    model.requires_grad_(False)


def layers_of(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, int]:
    """Name of each experts module -> the layer of the checkpoint that has its experts, in order.

    Errors: ValueError for a module whose experts the checkpoint does not have. Local.
    """
    layers = {checkpoint.family.experts_module.format(layer=layer): layer for layer in checkpoint.layers}
    modules = find_experts(model)
    absent = [name for name in modules if name not in layers]
    if absent:
        raise ValueError(f"{checkpoint.directory} has no experts for {absent[0]}; it has those of {', '.join(layers)}")
    return {name: layers[name] for name in modules}


def load_whole(checkpoint: Checkpoint, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    """Load a whole model with transformers' own eager experts, dequantized if it is quantized on disk.

    Args: dtype: as of `build_skeleton`. Returns: the model in evaluation mode, without gradients.
    Errors: those of `build_skeleton`, `load_dense` and `ExpertWeights.from_pretrained`. Local; synchronizes with
        `device`.
    """
    model = build_skeleton(checkpoint.directory, dtype, None)
    load_dense(model, checkpoint, device)
    everything = Placement.linear(checkpoint.config.num_experts, 1)
    for name, layer in layers_of(model, checkpoint).items():
        module = model.get_submodule(name)
        weights = ExpertWeights.from_pretrained(
            checkpoint, everything, 0, layers=[layer], dtype=model.dtype, scheme="none", device=device
        )
        write_weights(module, weights[layer])
    model.set_experts_implementation("eager")
    return model.eval()


def _check_names(model: PreTrainedModel, dense: DenseTensors, directory: Path) -> set[str]:
    """Return the missing names that tying will fill; raise for other missing names and for unexpected ones."""
    needed = set(model.state_dict())
    tied = {name for pair in model.all_tied_weights_keys.items() if not dense.keys().isdisjoint(pair) for name in pair}
    _raise_if_any(
        needed - set(dense) - tied, model._keys_to_ignore_on_load_missing, f"{directory} lacks", "that the model needs"
    )
    old_buffers = (r"rotary_emb\.inv_freq$",)  # stored by old releases of transformers; now computed
    _raise_if_any(
        set(dense) - needed,
        (*(model._keys_to_ignore_on_load_unexpected or ()), *old_buffers),
        f"{directory} holds",
        f"that {type(model).__name__} has no place for",
    )
    return needed - set(dense)


def _raise_if_any(names: set[str], ignored: Iterable[str] | None, before: str, after: str) -> None:
    wrong = sorted(name for name in names if not any(re.search(pattern, name) for pattern in ignored or ()))
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{before} {', '.join(wrong[:5])}{more}, {after}")
