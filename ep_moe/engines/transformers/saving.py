"""Saving a model with sharded experts as a checkpoint that transformers and `from_pretrained` can load.

Letters: E logical experts, R ranks, H hidden, I intermediate; W = 2I if the experts have a gate, else I.
"""

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ep_moe.engines.common.model import Agreement
from ep_moe.engines.transformers.experts import SHARDED, ExpertsModule, parameters_of
from ep_moe.group import EPGroup
from ep_moe.layer import ExpertParallelMoE
from ep_moe.weights import ExpertWeights
from ep_moe.weights.storage import INDEX_FILE, SINGLE_FILE, read_header

PHASE = "save_pretrained"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def save_pretrained(
    model: PreTrainedModel,
    modules: Mapping[str, ExpertsModule],
    save_directory: str | Path,
    is_main_process: bool = True,
    *,
    max_shard_size: int | str = "50GB",
    save_original_format: bool = True,
    **others: Any,
) -> None:
    """The `save_pretrained` of a model of `from_pretrained` or `shard_experts`.

    Every rank calls it: rank 0 gathers the experts and writes each layer to separate files before the next. It needs
    memory for one layer's experts besides the model, twice that if transformers converts them. The directory ends up
    complete, or without weights. Ranks that call it alone wait until another one reaches a timeout of its own.

    Args:
        modules: the experts modules by their names in `model`.
        save_directory, max_shard_size, save_original_format: those of transformers; weights that the directory already
            has are replaced. is_main_process: must not be False on rank 0.
        others: transformers' other options; only their defaults are accepted.
    Errors: ValueError on every rank for quantized experts, which would be written in the model's dtype with their
        rounding errors; for another option; for a directory that is a file. RuntimeError on the other ranks
        if rank 0 cannot write. Collective.
    """
    sharded = {name: getattr(module, SHARDED) for name, module in modules.items()}
    group: EPGroup = next(iter(sharded.values())).session.group
    layers: dict[str, ExpertParallelMoE] = {name: entry.layer for name, entry in sharded.items()}
    directory = Path(save_directory)
    with Agreement(group, PHASE):
        _check(model, group, layers, directory, is_main_process, others)
    with contextlib.ExitStack() as stack:
        writer: _Writer | None = None
        with Agreement(group, PHASE):
            if group.rank == 0:
                writer = _Writer(stack, directory, max_shard_size)
                writer.add_dense(model, save_original_format)
        for name, layer in layers.items():
            gathered = _gather(group, modules[name], layer)
            with Agreement(group, PHASE):
                if writer is not None:
                    tensors = {f"{name}.{leaf}": tensor for leaf, tensor in gathered.items()}
                    writer.add(revert_weight_conversion(model, tensors) if save_original_format else tensors)
            del gathered
        with Agreement(group, PHASE):
            if writer is not None:
                writer.finish()


def _check(
    model: PreTrainedModel,
    group: EPGroup,
    layers: Mapping[str, ExpertParallelMoE],
    directory: Path,
    is_main_process: bool,
    others: Mapping[str, Any],
) -> None:
    defaults = {"save_peft_format": True}
    refused = [key for key, value in others.items() if value not in (None, False) and value != defaults.get(key)]
    if refused:
        raise ValueError(f"{', '.join(refused)}: not an option of save_pretrained for experts spread over ranks")
    if group.rank == 0 and not is_main_process:
        raise ValueError("is_main_process is False on rank 0, which alone writes experts that are spread over ranks")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("the model has adapters, which are not written together with experts spread over ranks")
    if directory.is_file():
        raise ValueError(f"save_directory ({directory}) is a file")
    for name, layer in layers.items():
        if layer.scheme.weight.quantized:
            raise ValueError(
                f"{name} holds its experts in scheme '{layer.scheme.name}', which is not written: load the model with "
                f"scheme='none', which dequantizes what is quantized on disk"
            )


def _gather(group: EPGroup, module: ExpertsModule, layer: ExpertParallelMoE) -> dict[str, torch.Tensor]:
    """All E experts of a module in its parameters' order, on the CPU of rank 0; empty on other ranks. Collective.

    Experts are broadcast one at a time, since a broadcast uses connections that exist already.
    """
    found: dict[str, torch.Tensor] = {}
    for expert, (owner, index) in _owners(layer).items():
        one = parameters_of(module, _expert(group, layer.weights, owner, index))
        if group.rank != 0:
            continue
        for leaf, tensor in one.items():
            if leaf not in found:
                shape = (layer.config.num_experts, *tensor.shape[1:])
                found[leaf] = torch.empty(shape, dtype=tensor.dtype, device="cpu")
            found[leaf][expert].copy_(tensor[0])
    return found


def _owners(layer: ExpertParallelMoE) -> dict[int, tuple[int, int]]:
    """Logical expert -> the first rank that has it and its local index there, ordered by rank and index."""
    placement = layer.placement
    owners: dict[int, tuple[int, int]] = {}
    for rank in range(placement.num_ranks):
        for index, expert in enumerate(placement.local_experts(rank)):
            owners.setdefault(expert, (rank, index))
    return owners


def _expert(group: EPGroup, local: ExpertWeights, owner: int, index: int) -> ExpertWeights:
    """Broadcast one expert [1, ...] from its rank to all. Collective."""

    def broadcast(stack: torch.Tensor) -> torch.Tensor:
        mine = group.rank == owner
        tensor = stack[index : index + 1].contiguous() if mine else stack.new_empty(1, *stack.shape[1:])
        if group.process_group is not None:
            source = dist.get_global_rank(group.process_group, owner)
            with group.guard(PHASE):
                dist.broadcast(tensor, source, group=group.process_group)
        return tensor

    return ExpertWeights(
        w13=local.w13.map(broadcast),
        w2=local.w2.map(broadcast),
        w13_bias=None if local.w13_bias is None else broadcast(local.w13_bias),
        w2_bias=None if local.w2_bias is None else broadcast(local.w2_bias),
    )


class _Writer:
    """Writes a checkpoint's files to a temporary folder in the directory, and moves them when all are complete."""

    def __init__(self, stack: contextlib.ExitStack, directory: Path, max_shard_size: int | str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._max_shard_size, self._num_layers = directory, max_shard_size, 0
        self._folder = Path(tempfile.mkdtemp(prefix=".ep_moe-", dir=directory))
        stack.callback(shutil.rmtree, self._folder, ignore_errors=True)

    def add_dense(self, model: PreTrainedModel, save_original_format: bool) -> None:
        """Make transformers write the configs and all weights that are not experts."""
        vars(model)["should_save_on_this_rank"] = lambda is_main_process: True  # its own checks for global rank 0
        try:
            type(model).save_pretrained(
                model, self._folder, max_shard_size=self._max_shard_size, save_original_format=save_original_format
            )
        finally:
            del vars(model)["should_save_on_this_rank"]
        (self._folder / INDEX_FILE).unlink(missing_ok=True)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a layer's tensors to separate files, as few as `max_shard_size` allows."""
        split = split_torch_state_dict_into_shards(
            dict(tensors),
            filename_pattern=f"experts-{self._num_layers:05d}{{suffix}}.safetensors",
            max_shard_size=self._max_shard_size,
        )
        self._num_layers += 1
        for file, names in split.filename_to_tensors.items():
            chosen = {name: tensors[name].contiguous() for name in names}
            save_file(chosen, self._folder / file, metadata={"format": "pt"})

    def finish(self) -> None:
        """Move all files into the directory, the index last: without it the checkpoint cannot be read."""
        for path in self._directory.iterdir():
            if path.name in (SINGLE_FILE, INDEX_FILE) or SHARD.fullmatch(path.name):
                path.unlink()
        files = sorted(self._folder.glob("*.safetensors"))
        weight_map, size, count = {}, 0, 0
        for number, file in enumerate(files, start=1):
            target = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            for name, stored in read_header(file).items():
                weight_map[name] = target
                count += math.prod(stored.shape)
                size += math.prod(stored.shape) * stored.dtype.itemsize
            os.replace(file, self._directory / target)
        index = {"metadata": {"total_parameters": count, "total_size": size}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self._folder / INDEX_FILE).write_text(text, encoding="utf-8")
        for path in sorted(self._folder.iterdir(), key=lambda path: path.name == INDEX_FILE):
            os.replace(path, self._directory / path.name)
