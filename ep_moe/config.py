"""The options that a user can set: frozen, validated configs.

No other module reads TOML files; `environment` reads the environment. Importing this module does not import torch,
which takes seconds: the command line makes its options of these classes.
Letters: T tokens on this rank, H hidden, I intermediate, K top-k, E experts, R ranks, M max_tokens_per_rank.
"""

import dataclasses
import enum
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from ep_moe.fields import Field, check_fields, check_keys, field_types, require, typed
from ep_moe.logs import LEVELS
from ep_moe.names import DTYPE_NAMES, SCHEME_NAMES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_TIMEOUT_SECS = 1e9  # twice this, in nanoseconds, still fits int64
ALIGNMENT = 16  # hidden and intermediate sizes are multiples of this: one 16-byte access in the narrowest format

if TYPE_CHECKING:
    import torch

    DTYPES: dict[str, torch.dtype]
    Dtype = torch.dtype
else:
    Dtype = object  # `TransportConfig` checks that it is one of DTYPES

    def __getattr__(name: str) -> Any:
        """DTYPES, torch's dtypes by name, which need torch."""
        if name != "DTYPES":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, {dtype: torch_dtype(dtype) for dtype in DTYPE_NAMES})


def torch_dtype(name: str) -> "torch.dtype":
    """One of DTYPE_NAMES as a torch.dtype. Local."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _check_scheme(name: str) -> None:
    """Raise ValueError for the name of no scheme; names with sizes in them are parsed, which needs torch."""
    if name not in SCHEME_NAMES:
        from ep_moe.quant import get_scheme

        get_scheme(name)


class Layout(str, enum.Enum):
    """Memory layout of the received tokens that the experts compute on; `ep_moe.layout` has the shapes."""

    BATCHED = "batched"
    COMPACT = "compact"
    FLAT = "flat"


class RoutingMethod(enum.IntEnum):
    """How logits become (ids, weights). The values are those of FlashInfer's `RoutingMethodType`."""

    DEFAULT = 0  # softmax over all, then top-k, no renormalization
    RENORMALIZE = 1  # top-k of the logits, then softmax over the chosen
    DEEPSEEK_V3 = 2  # sigmoid, bias for the choice only, top groups, renormalize, scale
    LLAMA4 = 3  # top-k of the logits (FlashInfer: top-1), sigmoid
    RENORMALIZE_NAIVE = 4  # softmax over all, top-k, divide by the sum (Qwen3)
    TOPK = 5  # top-k, the raw logits are the weights
    SIGMOID_RENORM = 6  # sigmoid, top-k, divide by the sum (unless norm_topk_prob is False)
    MINIMAX2 = 7  # sigmoid, bias for the choice only, renormalize, scale
    SIGMOID = 8  # sigmoid, top-k, no renormalization
    TOPK_SIGMOID = 9  # top-k of the logits, sigmoid, no renormalization


class ActivationKind(str, enum.Enum):
    """The function between the two expert GEMMs; `gated` ones take [gate; up] and halve the width."""

    SILU = "silu"  # silu(gate) * up
    GELU = "gelu"  # gelu(gate) * up, the exact erf form
    GELU_TANH = "gelu_tanh"  # the same with gelu's tanh form
    SWIGLU = "swiglu"  # gpt-oss: clamp both halves, gate * sigmoid(alpha * gate) * (up + beta)
    SWIGLU_STEP = "swiglu_step"  # Step-3.5: silu(gate) * up, both clamped
    SITU = "situ"  # Kimi: clamp both halves, alpha * tanh(gate / alpha) * sigmoid(gate) * beta * tanh(up / beta)
    RELU2 = "relu2"  # relu(x)^2, not gated
    IDENTITY = "identity"  # x, not gated
    SILU_NO_MUL = "silu_no_mul"  # silu(x), gelu(x) in both forms, not gated
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"

    @property
    def gated(self) -> bool:
        """True if the first GEMM is 2 * intermediate wide."""
        return self not in (ActivationKind.RELU2, ActivationKind.IDENTITY) and not self.value.endswith("_no_mul")

    @property
    def numbers(self) -> tuple[str, ...]:
        """Those of `ActivationConfig` that it has."""
        if self in (ActivationKind.SWIGLU, ActivationKind.SITU):
            return "alpha", "beta", "limit"
        return ("limit",) if self is ActivationKind.SWIGLU_STEP else ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ActivationConfig:
    """Activation between the expert GEMMs.

    `alpha`, `beta` and `limit` belong to the kinds whose `numbers` they are. A limit clamps gate <= limit and -limit <=
    up <= limit, of `swiglu_step` after silu(gate). gpt-oss: alpha 1.702, beta 1, limit 7 (its model card). Of `situ` a
    beta of 0 leaves up as it is.
    """

    kind: ActivationKind = ActivationKind.SILU
    alpha: float = 1.0
    beta: float = 0.0
    limit: Annotated[float | None, Field(positive=True)] = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, plain in (("alpha", 1.0), ("beta", 0.0), ("limit", None)):
            value = getattr(self, name)
            require(
                value == plain or name in self.kind.numbers,
                f"{name} ({value}) does not belong to '{self.kind.value}'",
            )
        require(
            self.kind is not ActivationKind.SITU or (self.alpha > 0 and self.beta >= 0),
            f"alpha ({self.alpha}) must be positive and beta ({self.beta}) at least 0 for 'situ'",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """How a router's logits choose experts.

    Args:
        method: one of `RoutingMethod`, by number or member; 10 ("unspecified" at FlashInfer) is a ValueError.
        num_topk: K, experts per token.
        num_group, topk_group: groups of experts and how many of them are kept, method 2 only.
        group_best: how many of a group's best scores add up to the group's: 2 as DeepSeek-V3 has it, or 1 as
            DeepSeek-V2, method 2 only.
        scoring: "sigmoid", or for methods 2 and 7 "softmax" over all experts in its place.
        routed_scaling_factor: multiplies the weights of methods 2 and 7; must be 1.0 for any other method.
        norm_topk_prob: False skips the division by the sum, methods 2 and 6 only.
    """

    method: RoutingMethod
    num_topk: Annotated[int, Field(at_least=1)]
    num_group: Annotated[int, Field(at_least=1)] = 1
    topk_group: int = 1
    group_best: Annotated[int, Field(at_least=1)] = 2
    scoring: Annotated[str, Field(choices=("sigmoid", "softmax"))] = "sigmoid"
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            1 <= self.topk_group <= self.num_group,
            f"topk_group ({self.topk_group}) must be in [1, num_group ({self.num_group})]",
        )
        require(self.group_best <= 2, f"group_best ({self.group_best}) must be 1 or 2")
        for names, methods in _OF_METHODS.items():
            for name in names if self.method not in methods else ():
                value, numbers = getattr(self, name), " or ".join(str(method.value) for method in methods)
                fits = value == type(self).__dataclass_fields__[name].default
                require(fits, f"{name} ({value!r}) needs routing method {numbers}, got {self.method.value}")


_OF_METHODS = {  # fields of a `RoutingConfig` that only these methods have
    ("num_group", "group_best"): (RoutingMethod.DEEPSEEK_V3,),
    ("scoring", "routed_scaling_factor"): (RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2),
    ("norm_topk_prob",): (RoutingMethod.DEEPSEEK_V3, RoutingMethod.SIGMOID_RENORM),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """One MoE layer.

    Args:
        hidden: H, a multiple of 16.
        intermediate: I of one expert, a multiple of 16.
        num_experts: E, logical experts of the whole layer.
        routing: how logits choose experts; None if the caller always brings topk_ids and topk_weights.
        activation: between the two GEMMs.
        apply_router_weight_on_input: multiply the experts' input by the router weight, not their output; K must be 1.
        scheme: name of the `ep_moe.quant` scheme of weights and payload, "none" for the model's own dtype.
        layout: of the received tokens, for the experts.
    """

    hidden: Annotated[int, Field(multiple_of=ALIGNMENT)]
    intermediate: Annotated[int, Field(multiple_of=ALIGNMENT)]
    num_experts: Annotated[int, Field(at_least=1)]
    routing: RoutingConfig | None = None
    activation: ActivationConfig = ActivationConfig()
    apply_router_weight_on_input: bool = False
    scheme: str = "none"
    layout: Layout = Layout.COMPACT

    @property
    def w13_rows(self) -> int:
        """W, the rows of an expert's first matrix: 2I if the activation is gated, else I."""
        return self.intermediate * (2 if self.activation.kind.gated else 1)

    def __post_init__(self) -> None:
        check_fields(self)
        _check_scheme(self.scheme)
        if self.routing is not None:
            k = self.routing.num_topk
            require(k <= self.num_experts, f"num_topk ({k}) exceeds num_experts ({self.num_experts})")
            require(
                self.num_experts % self.routing.num_group == 0,
                f"num_experts ({self.num_experts}) is not a multiple of num_group ({self.routing.num_group})",
            )
            kept = self.num_experts // self.routing.num_group * self.routing.topk_group
            require(
                k <= kept,
                f"num_topk ({k}) exceeds the {kept} experts in topk_group ({self.routing.topk_group}) groups",
            )
            require(
                k == 1 or not self.apply_router_weight_on_input,
                f"apply_router_weight_on_input needs num_topk 1, got {k}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransportConfig:
    """Sizes and options of a transport; every rank of the group passes the same.

    Args:
        hidden: H of the tokens.
        max_tokens_per_rank: M, the most tokens that one rank may dispatch in a round.
        dtype: the model's dtype: of tokens that are not quantized, of expert outputs and of the combine wire.
        num_slots: the most rounds that may be open at once. They share the thread blocks that fit on the GPU, so 1 is
            fastest.
        row_alignment: every expert of a COMPACT batch starts at a multiple of this many rows.
        max_topk: the largest K of any round.
        on_peer_loss: "raise" makes every later call raise `PeerLostError`; "mask" continues without the lost ranks and
            their experts, if the transport supports it.
        num_sms: the most SMs that one exchange kernel uses, which leaves the others to other work; 0 chooses the
            fastest. `collective` leaves that to NCCL.
        ranks_per_node: of `hierarchical`: so many consecutive ranks are a node; 0 takes the launcher's nodes.
        chunk_rows: of `hierarchical`: the most rows that travel to a node in one message, while others are forwarded.
        nvshmem_stores: how `nvshmem` reaches the other ranks: "addresses", for GPUs that map each other's memory;
            "puts", by NVSHMEM's put-with-signal; "auto", by addresses inside a node and by puts between nodes.
    """

    hidden: Annotated[int, Field(multiple_of=ALIGNMENT)]
    max_tokens_per_rank: Annotated[int, Field(at_least=1)]
    dtype: Dtype = dataclasses.field(default_factory=lambda: torch_dtype("bfloat16"))
    num_slots: Annotated[int, Field(at_least=1)] = 2
    row_alignment: Annotated[int, Field(at_least=1)] = 16
    max_topk: Annotated[int, Field(at_least=1)] = 32
    on_peer_loss: Annotated[str, Field(choices=("raise", "mask"))] = "raise"
    num_sms: int = 0
    ranks_per_node: Annotated[int, Field(at_least=0)] = 0
    chunk_rows: Annotated[int, Field(at_least=1)] = 1024
    nvshmem_stores: Annotated[str, Field(choices=("auto", "addresses", "puts"))] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        dtypes = [torch_dtype(name) for name in DTYPE_NAMES]
        require(self.dtype in dtypes, f"dtype ({self.dtype}) is not one of {', '.join(DTYPE_NAMES)}")
        require(self.num_sms == 0 or self.num_sms >= 3, f"num_sms ({self.num_sms}) must be 0 or at least 3")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """Deadlines of a group of ranks.

    Args:
        timeout_secs: a longer wait for other ranks is an error that names the missing rank.
        heartbeat_secs: interval between a rank's heartbeats.
    """

    timeout_secs: float = 60.0
    heartbeat_secs: Annotated[float, Field(positive=True)] = 0.5

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.timeout_secs >= 4 * self.heartbeat_secs,
            f"timeout_secs ({self.timeout_secs}) must be at least four heartbeats ({4 * self.heartbeat_secs})",
        )
        require(
            self.timeout_secs <= MAX_TIMEOUT_SECS,
            f"timeout_secs ({self.timeout_secs}) must be at most {MAX_TIMEOUT_SECS:g}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How a whole model runs expert-parallel; the options that every command shares.

    Under torchrun the environment determines `nproc`. With `ray`, `nproc` ranks run on each of `nodes` nodes of a
    cluster. `dtype` "auto" is the checkpoint's on a GPU, float32 on a CPU. `scheme` is "auto" as the checkpoint stores
    experts, "none" in `dtype`, or a name that `ep_moe.quant.get_scheme` knows, into which they are quantized on load.
    `transport`, `experts` and `placement` are names that `create_transport`, `create_experts` and `create_placement`
    check; `placement` may also be a file, whose number of copies `redundant_experts` then has to be if it is not 0.
    """

    model: Annotated[str, Field(help="Hugging Face directory; empty is the shipped model")] = ""
    nproc: Annotated[
        int | None,
        Field(help="Ranks to start, by default one for each GPU, 4 without any; torchrun starts its own", at_least=1),
    ] = None
    ray: Annotated[
        str, Field(help="Ray cluster that ranks run on: auto, HOST:PORT, or local for one that ends with the job")
    ] = ""
    nodes: Annotated[int, Field(help="Nodes of the Ray cluster, --nproc ranks on each", at_least=1)] = 1
    device: Annotated[
        str, Field(help="Device; auto is cuda if every rank has its own GPU", choices=("auto", "cpu", "cuda"))
    ] = "auto"
    dtype: Annotated[
        str,
        Field(help="Dtype of the model; auto is its own on GPUs", choices=("auto", *DTYPE_NAMES)),
    ] = "auto"
    scheme: Annotated[
        str,
        Field(
            help="Number format of experts: of ep-moe formats, none, or auto, the checkpoint's",
            option="--quant",
        ),
    ] = "auto"
    transport: Annotated[str, Field(help="Token exchange")] = "auto"
    experts: Annotated[str, Field(help="Expert implementation")] = "auto"
    placement: Annotated[
        str, Field(help="Which rank owns which expert: linear, round_robin, or a file of `ep-moe balance plan`")
    ] = "linear"
    redundant_experts: Annotated[int, Field(help="Copies of experts in each layer, on all ranks", at_least=0)] = 0
    layout: Annotated[Layout, Field(help="Expert batches: batched, compact, flat")] = Layout.COMPACT
    max_tokens_per_rank: Annotated[int, Field(help="Most tokens of one rank in a forward pass", at_least=1)] = 2048
    timeout_secs: Annotated[float, Field(help="Seconds to wait for a rank until it is lost")] = 60.0
    log_level: Annotated[str, Field(help="Log lines of ranks from this level on", choices=LEVELS)] = "info"

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            not self.model or Path(self.model).is_dir(), f"model ({self.model!r}) is not a directory of this machine"
        )
        require(
            not self.model or (Path(self.model) / "config.json").is_file(),
            f"model ({self.model!r}) has no config.json, so it is not a Hugging Face checkpoint directory",
        )
        if self.scheme != "auto":
            _check_scheme(self.scheme)
        GroupConfig(timeout_secs=self.timeout_secs)
        require(
            self.nodes == 1 or bool(self.ray),
            f"nodes ({self.nodes}) needs --ray; torchrun and srun start one process on each node instead",
        )

    @property
    def torch_dtype(self) -> "torch.dtype":
        """`dtype` as a torch.dtype. Errors: ValueError for "auto", which needs a checkpoint."""
        require(self.dtype != "auto", "dtype ('auto') is a checkpoint's, and there is none")
        return torch_dtype(self.dtype)

    @property
    def group(self) -> GroupConfig:
        """The deadlines of the ranks."""
        return GroupConfig(timeout_secs=self.timeout_secs)


Config = TypeVar("Config")


def config_dir() -> Path:
    """The folder of the TOML files: inside an installed package, next to the package in a source tree."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def from_mapping(config_type: type[Config], values: Mapping[str, Any], source: str) -> Config:
    """Build a flat config dataclass from a mapping of numbers, strings, enum values, lists of these, and None.

    Errors: ValueError names `source` and the key that is unknown, missing, not of the annotated type or out of range.
    """
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(config_type)  # type: ignore[arg-type]
    needed = {field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING}
    wanted = field_types(config_type)
    check_keys(values, wanted, source, optional=set(wanted) - needed)
    given = {name: typed(value, wanted[name], f"{source}: {name}") for name, value in values.items()}
    try:
        return config_type(**given)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def read_toml(config_type: type[Config], path: str | Path, table: str) -> Config:
    """Read one table of a TOML file into a config dataclass.

    Errors: ValueError names the file and the key; FileNotFoundError the path.
    """
    content = read_tables(path)
    require(isinstance(content.get(table), dict), f"{path}: no table [{table}]")
    return from_mapping(config_type, content[table], f"{path} [{table}]")


def read_tables(path: str | Path) -> dict[str, Any]:
    """Read a TOML file. Errors: ValueError names the file; FileNotFoundError the path."""
    with open(path, "rb") as file:
        try:
            return tomllib.load(file)
        except RecursionError:
            raise ValueError(f"{path}: nested too deep to be read") from None
        except ValueError as error:  # not TOML, or not UTF-8
            raise ValueError(f"{path}: {error}") from None
