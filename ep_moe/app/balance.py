"""`ep-moe balance record` and `plan`: the load of experts into a file, and placements for it into another."""

import dataclasses
import http.client
import json
import re
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ep_moe.app.chat import changed_options
from ep_moe.app.generate import GenerateConfig, generate
from ep_moe.config import EngineConfig, from_mapping
from ep_moe.environment import client_key
from ep_moe.fields import Field, check_fields, shown
from ep_moe.report.plots import draw_loads
from ep_moe.report.records import check_writable

if TYPE_CHECKING:
    from ep_moe.balance import RecordedLoad

ANSWER_SECS = 30.0
NEW_TOKENS, RECORD_SECS = 128, 60.0  # by default


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordConfig:
    """What `ep-moe balance record` counts: tokens of prompts and their continuations, or those of a running server.

    Of a server it counts what comes within `secs`, of which the last two seconds may be missing.
    """

    out: Annotated[Path, Field(help="File to write")]
    prompts: Annotated[Path | None, Field(help="A text file; each of its lines is a prompt")] = None
    max_new_tokens: Annotated[int | None, Field(help="New tokens per prompt, by default 128", at_least=1)] = None
    url: Annotated[str, Field(help="A running server to record instead, such as http://127.0.0.1:8000")] = ""
    secs: Annotated[float | None, Field(help="How long to record a server, by default 60", positive=True)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.prompts is None) != bool(self.url):
            raise ValueError("either prompts, a file, or the url of a server is needed")
        if self.prompts is not None and self.secs is not None:
            raise ValueError(f"secs ({self.secs}) is of a server, and prompts are recorded")
        if self.url and self.max_new_tokens is not None:
            raise ValueError(f"max_new_tokens ({self.max_new_tokens}) is of prompts, and a server is recorded")
        if self.url and not re.match(r"https?://", self.url):
            raise ValueError(f"url ({self.url!r}) does not begin with http:// or https://")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BalancePlanConfig:
    """Ranks and copies of `ep-moe balance plan`."""

    load: Annotated[Path, Field(help="A file of `ep-moe balance record`")]
    out: Annotated[Path | None, Field(help="File to write the placements to; without one they are only judged")] = None
    ranks: Annotated[int, Field(help="Number of ranks", at_least=1)] = 4
    redundant_experts: Annotated[int, Field(help="Copies of experts in each layer, on all ranks", at_least=0)] = 0
    ranks_per_node: Annotated[int | None, Field(help="Neighboring ranks of a node; by default all", at_least=1)] = None
    groups: Annotated[
        int, Field(help="Groups of experts that routing is limited to, each of which stays on a node", at_least=1)
    ] = 1
    previous: Annotated[Path | None, Field(help="Placements now, to move few experts; by default linear")] = None
    max_moves: Annotated[int | None, Field(help="Most experts that move, in all layers together", at_least=0)] = None
    plot: Annotated[Path | None, Field(help="Draw the load of ranks by layer, before and after, to this file")] = None
    min_gain: Annotated[float, Field(help="Least gain of a step, by the mean rank's load", at_least=0)] = 0.005

    def __post_init__(self) -> None:
        check_fields(self)


def record(engine: EngineConfig, config: RecordConfig) -> dict[str, Any]:
    """Record a load and write it.

    Errors: ValueError as of `generate`, and for a file without prompts; RuntimeError for a server that does not answer.
    """
    from ep_moe.balance import ModelSizes, RecordedLoad

    check_writable(config.out, "out")
    if config.url:
        changed = changed_options(engine)
        if changed:
            raise ValueError(f"url ({config.url!r}) is a running server, which has its own {changed[0]}")
        found = _of_server(config)
    else:
        report = generate(
            engine, GenerateConfig(prompts=_lines(config), max_new_tokens=config.max_new_tokens or NEW_TOKENS)
        )
        found = RecordedLoad(
            model=from_mapping(ModelSizes, report["sizes"], "sizes"), load=tuple(map(tuple, report["expert_load"]))
        )
    if not any(map(any, found.load)):
        raise RuntimeError("no token came to an expert, so nothing is recorded")
    found.save(config.out)
    return {
        "ok": True,
        "out": str(config.out),
        "model": dataclasses.asdict(found.model),
        "tokens": max(sum(layer) for layer in found.load),
        "expert_load": [list(layer) for layer in found.load],
    }


def _lines(config: RecordConfig) -> tuple[str, ...]:
    assert config.prompts is not None
    try:
        found = tuple(filter(None, _reading(Path.read_text, config.prompts, "utf-8").splitlines()))
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts ({str(config.prompts)!r}) are not UTF-8: {error}") from None
    if not found:
        raise ValueError(f"prompts ({str(config.prompts)!r}) has no lines")
    return found


def _of_server(config: RecordConfig) -> "RecordedLoad":
    from ep_moe.balance import ModelSizes, RecordedLoad

    first = _ask(config.url)
    time.sleep(config.secs or RECORD_SECS)
    last = _ask(config.url)
    if not isinstance(last.get("sizes"), dict):
        raise RuntimeError(f"{config.url} does not tell the sizes of its model")
    sizes = from_mapping(ModelSizes, last["sizes"], f"{config.url}/load: sizes")
    before = first["load"] or [[0] * sizes.num_experts for _ in range(sizes.num_layers)]
    after = last["load"] or before
    try:
        load = tuple(tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(before, after, strict=True))
        return RecordedLoad(model=sizes, load=load)
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"{config.url} was started again meanwhile, or is no ep-moe server: {error}") from None


def _ask(url: str) -> dict[str, Any]:
    """The answer of a server's /load. Errors: RuntimeError."""
    address = url.rstrip("/").removesuffix("/v1") + "/load"
    key = client_key()
    request = urllib.request.Request(address, headers={"authorization": f"Bearer {key}"} if key else {})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECS) as answer:  # noqa: S310
            found = json.load(answer)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RuntimeError(f"{address} does not answer: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("load"), list):
        raise RuntimeError(f"{address} does not answer with a load: {shown(found)}")
    return found


def check_load(path: Path) -> None:
    """Raise ValueError for a file that is no recorded load. Local."""
    from ep_moe.balance import RecordedLoad

    _reading(RecordedLoad.read, path)


def balance_plan(config: BalancePlanConfig) -> dict[str, Any]:
    """Plan placements for a recorded load, and write them if a file is named.

    Errors: ValueError for a load or previous placements that cannot be read, or do not fit each other or the sizes;
    RuntimeError for a plot without matplotlib.
    """
    from ep_moe.balance import RecordedLoad, balancedness, plan_placement, rank_loads, read_placements, save_placements
    from ep_moe.placement import Placement

    if config.out is not None:
        check_writable(config.out, "out")
    found, previous = _reading(RecordedLoad.read, config.load), None
    num_experts = found.model.num_experts
    linear = (Placement.linear(num_experts, config.ranks),) * found.model.num_layers
    if config.previous is not None:
        previous = _reading(read_placements, config.previous, found.model, config.ranks)
    elif not config.redundant_experts:
        previous = linear
    plan = plan_placement(
        found.load,
        num_experts + config.redundant_experts,
        config.ranks,
        ranks_per_node=config.ranks_per_node,
        num_groups=config.groups,
        previous=previous,
        max_moves=config.max_moves,
        min_gain=config.min_gain,
    )
    if config.out is not None:
        save_placements(config.out, plan.placements, found.model)
    before, after = (rank_loads(found.load, each) for each in (previous or linear, plan.placements))
    if config.plot is not None:
        draw_loads(config.plot, {"before": before, "after": after}, "MoE layer")
    return {
        "ok": True,
        "out": None if config.out is None else str(config.out),
        "plot": None if config.plot is None else str(config.plot),
        "ranks": config.ranks,
        "redundant_experts": config.redundant_experts,
        "balancedness_before": balancedness(before),
        "balancedness": balancedness(after),
        "layers": [
            {"before": balancedness([old]), "after": balancedness([new])}
            for old, new in zip(before, after, strict=True)
        ],
        "rank_load_before": before,
        "rank_load": after,
        "moves": plan.num_moves,
        "steps": [dataclasses.asdict(step) for step in plan.steps],
    }


def _reading(read: Any, path: Path, *more: Any) -> Any:
    """The content of a file. Errors: ValueError for one that cannot be read."""
    try:
        return read(path, *more)
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from None
