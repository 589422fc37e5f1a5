"""Names of a checkpoint's tensors and of the parameters of `FusedMoE` that they are loaded into."""


def expert_names(shards: dict[str, str], num_experts: int) -> list[tuple[str, str, int, str]]:
    """The names of each expert's tensors, by shard "w1", "w2" and "w3"; see `make_expert_params_mapping`. Local."""
    found = []
    for expert in range(num_experts):
        for shard, name in shards.items():
            field = "w2" if shard == "w2" else "w13"
            found.append((f"experts.{field}_", f"experts.{expert}.{name}.", expert, shard))
    return found


def stacked_names(names: dict[str, str]) -> list[tuple[str, str, str]]:
    """Parameters, stacked tensors and shards, by parameter; see `make_expert_params_mapping_fused`. Local."""
    return [(f"experts.{own}", f"experts.{name}", own.partition("_")[0]) for own, name in names.items()]
