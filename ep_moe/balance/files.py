"""Recorded loads and placements as JSON files, each with the sizes of the model that it is of.

Letters: A MoE layers, E logical experts, P physical experts, R ranks.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ep_moe.config import from_mapping
from ep_moe.fields import shown, typed
from ep_moe.files import write_whole
from ep_moe.placement import Placement
from ep_moe.weights.json_files import read_object

LOAD, PLACEMENTS = "ep_moe load 1", "ep_moe placements 1"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """By what files of one model are told from those of others: its kind and the sizes of its MoE layers."""

    model_type: str
    num_layers: int  # with experts
    num_experts: int
    hidden: int
    intermediate: int

    def check(self, other: "ModelSizes", what: str) -> None:
        """Raise ValueError if `what`, a file, is of another model. Local."""
        for field in dataclasses.fields(self):
            needed, found = getattr(self, field.name), getattr(other, field.name)
            if needed != found:
                raise ValueError(f"{what} is of another model: its {field.name} is {found!r}, not {needed!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedLoad:
    """How many tokens each expert got, [A][E]. Errors: ValueError for counts that are not of the model's sizes."""

    model: ModelSizes
    load: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.load) != self.model.num_layers:
            raise ValueError(f"load has {len(self.load)} layers, the model {self.model.num_layers}")
        for layer, counts in enumerate(self.load):
            least, most = min(counts, default=0), max(counts, default=0)
            if len(counts) != self.model.num_experts or least < 0 or most >= 2**63:
                raise ValueError(
                    f"load[{layer}] has {len(counts)} counts from {least} to {shown(most)}; "
                    f"{self.model.num_experts} from 0 to 2^63 - 1 needed"
                )

    def save(self, path: str | Path) -> None:
        """Write a file. Errors: OSError. Local."""
        _write(path, LOAD, self.model, load=self.load)

    @classmethod
    def read(cls, path: str | Path, model: ModelSizes | None = None) -> "RecordedLoad":
        """Read a file. Errors: ValueError for a file that is none, or of another model than `model`; OSError. Local."""
        found, content = _read(path, LOAD, model, "load")
        load = tuple(typed(counts, tuple[int, ...], f"{path}: load[{layer}]") for layer, counts in enumerate(content))
        try:
            return cls(model=found, load=load)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def save_placements(path: str | Path, placements: Sequence[Placement], model: ModelSizes) -> None:
    """Write a file with the placement of each layer. Errors: ValueError if they do not fit `model`; OSError. Local."""
    _check_placements(placements, model, "placements")
    layers = [placement.physical_to_logical for placement in placements]
    idle = [placement.idle for placement in placements]
    _write(path, PLACEMENTS, model, starts=placements[0].starts, layers=layers, idle=idle)


def read_placements(
    path: str | Path, model: ModelSizes | None = None, num_ranks: int | None = None
) -> tuple[Placement, ...]:
    """Read the placement of each layer from a file.

    Errors: ValueError for a file that is none, of another model than `model`, or for another number of ranks; OSError.
    Local.
    """
    found, content = _read(path, PLACEMENTS, model, "layers", "starts", "idle")
    layers, starts, idle = content
    try:
        if len(idle) != len(layers):
            raise ValueError(f"idle has {len(idle)} entries, layers {len(layers)}")
        placements = tuple(Placement(layer, starts, unused) for layer, unused in zip(layers, idle, strict=True))
        _check_placements(placements, found, "layers")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if num_ranks is not None and placements[0].num_ranks != num_ranks:
        raise ValueError(f"{path} is for {placements[0].num_ranks} ranks, there are {num_ranks}")
    return placements


def _check_placements(placements: Sequence[Placement], model: ModelSizes, name: str) -> None:
    if len(placements) != model.num_layers or not placements:
        raise ValueError(f"{name} are {len(placements)}, the model has {model.num_layers} layers with experts")
    for layer, placement in enumerate(placements):
        if placement.num_experts != model.num_experts:
            raise ValueError(f"{name}[{layer}] has {placement.num_experts} experts, the model {model.num_experts}")
        if placement.starts != placements[0].starts:
            raise ValueError(f"{name}[{layer}] has starts {placement.starts}, {name}[0] {placements[0].starts}")


def _write(path: str | Path, kind: str, model: ModelSizes, **content: Any) -> None:
    everything = {"format": kind, "model": dataclasses.asdict(model), **content}
    write_whole(path, json.dumps(everything) + "\n")


def _read(path: str | Path, kind: str, model: ModelSizes | None, *keys: str) -> tuple[ModelSizes, Any]:
    """The model of a file, and the lists of its keys."""
    content = read_object(Path(path))
    if content.get("format") != kind:
        raise ValueError(f"{path}: format is {shown(content.get('format'))}, {kind!r} needed")
    for key, wanted in (("model", dict), *((key, list) for key in keys)):
        if not isinstance(content.get(key), wanted):
            raise ValueError(f"{path}: {key} is {shown(content.get(key))}, no {wanted.__name__}")
    found = from_mapping(ModelSizes, content["model"], f"{path}: model")
    if model is not None:
        model.check(found, str(path))
    return found, content[keys[0]] if len(keys) == 1 else [content[key] for key in keys]
