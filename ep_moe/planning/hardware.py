"""GPUs and their links: constants of the predictions, from a TOML file."""

import dataclasses
from pathlib import Path
from typing import Annotated

from ep_moe.config import config_dir, read_toml
from ep_moe.fields import Field, check_fields

PREFIX = "hardware-"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One kind of GPU, its links, and what the kernels of this package reach on it.

    Args:
        gpu: the device's name in measured rows.
        gpus_per_node: of one machine; all of them reach each other's memory.
        gpu_memory_gib: of one GPU. memory_share: the most of it that weights and buffers may take.
        link_gbs: what leaves a GPU for others of its node, in 1e9 bytes per second.
        network_gbs: what leaves a GPU for other nodes. network_us: latency of a message between nodes.
        dispatch_us: of an empty dispatch; dispatch_wire_us, dispatch_pack_us: for each 1e6 bytes that leave a rank, and
            that it packs for its experts. combine_*: the same; combine_pack_us is for rows of its experts.
        dispatch_sms, combine_sms: SMs of an exchange kernel from which more SMs do not help.
        collective_us: of an empty exchange by NCCL there and back; collective_rank_us: for each other rank;
            collective_wire_us: for each 1e6 bytes that leave a rank.
        experts_us: of both GEMMs without work. weight_gbs: weights read. fp8_tflops, bf16_tflops: of full tiles.
        overlap: p of (reading^p + multiplying^p)^(1/p), which is infinite if the shorter of both is hidden.
        layer_us: of a layer beside its exchange and its experts: routing, and gaps between kernels.
        rows: the measured rows that the constants come from, each by words that it contains.
        superseded: commits whose kernels have been replaced: their rows are not compared.
    """

    gpu: str
    gpus_per_node: Annotated[int, Field(at_least=1)]
    gpu_memory_gib: Annotated[float, Field(positive=True)]
    memory_share: Annotated[float, Field(positive=True)]
    link_gbs: Annotated[float, Field(positive=True)]
    network_gbs: Annotated[float, Field(positive=True)]
    network_us: Annotated[float, Field(at_least=0)]
    dispatch_us: float
    dispatch_wire_us: float
    dispatch_pack_us: float
    dispatch_sms: float
    combine_us: float
    combine_wire_us: float
    combine_pack_us: float
    combine_sms: float
    collective_us: float
    collective_rank_us: float
    collective_wire_us: float
    experts_us: float
    weight_gbs: Annotated[float, Field(positive=True)]
    fp8_tflops: Annotated[float, Field(positive=True)]
    bf16_tflops: Annotated[float, Field(positive=True)]
    overlap: Annotated[float, Field(at_least=1)]
    layer_us: float
    rows: tuple[str, ...]
    superseded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def read(cls, name: str) -> "Hardware":
        """Read table [hardware] of configs/hardware-NAME.toml, or of the file that `name` is the path of.

        Errors: ValueError names the file and the key that is wrong, or the names that are known.
        """
        path = Path(name) if name.endswith(".toml") else config_dir() / f"{PREFIX}{name}.toml"
        try:
            return read_toml(cls, path, "hardware")
        except FileNotFoundError:
            raise ValueError(
                f"hardware ({name!r}) is not a .toml file or one of {', '.join(known_hardware())}"
            ) from None


def known_hardware() -> list[str]:
    """The names that `Hardware.read` knows."""
    return sorted(path.stem.removeprefix(PREFIX) for path in config_dir().glob(f"{PREFIX}*.toml"))
