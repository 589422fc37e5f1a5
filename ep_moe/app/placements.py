"""Which rank has which expert, as options say; known before ranks start, so that its errors come at once."""

from ep_moe.app.start import open_model
from ep_moe.balance import ModelSizes, plan_placement, read_placements
from ep_moe.config import EngineConfig
from ep_moe.placement import PLACEMENTS, Placement
from ep_moe.weights import families


def model_sizes(engine: EngineConfig) -> ModelSizes:
    """By what files of load and placements are known to be of the model. Errors: ValueError. Local."""
    checkpoint = open_model(engine)
    config = checkpoint.config
    return ModelSizes(
        model_type=str(families.read_config(checkpoint.directory)[0]["model_type"]),
        num_layers=len(checkpoint.layers),
        num_experts=config.num_experts,
        hidden=config.hidden,
        intermediate=config.intermediate,
    )


def placements_for(engine: EngineConfig, num_ranks: int) -> str | tuple[Placement, ...]:
    """Which rank has which expert: by name, or for each MoE layer.

    Errors: ValueError for a file that is none, of another model or number of ranks, or with other copies. Local.
    """
    copies, named = engine.redundant_experts, engine.placement in PLACEMENTS
    if named and not copies:
        return engine.placement
    sizes = model_sizes(engine)
    if named:
        if engine.placement != "linear":
            raise ValueError(f"redundant_experts ({copies}) needs placement linear or a file, not {engine.placement!r}")
        even = [[1] * sizes.num_experts]  # loads are not known yet
        return plan_placement(even, sizes.num_experts + copies, num_ranks).placements * sizes.num_layers
    try:
        placements = read_placements(engine.placement, sizes, num_ranks)
    except OSError as error:
        names = ", ".join(PLACEMENTS)
        raise ValueError(
            f"placement ({engine.placement!r}) is not one of {names}, nor a readable file: {error}"
        ) from None
    found = placements[0].num_physical - sizes.num_experts
    if copies not in (0, found):
        raise ValueError(f"redundant_experts ({copies}) is not the number of copies in {engine.placement} ({found})")
    return placements
