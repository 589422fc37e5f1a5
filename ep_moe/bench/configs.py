"""What each benchmark measures: frozen configs, whose fields are the options of `ep-moe bench`.

docs/benchmarks/methods/ says how each is measured.
Letters: T tokens per rank, H hidden, K top-k, E experts, L local experts, R ranks.
"""

import dataclasses
import importlib.metadata
import itertools
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ep_moe.bench.presets import LAYER_PRESETS, MODEL_PRESETS
from ep_moe.config import EngineConfig, Layout, MoEConfig, TransportConfig, torch_dtype
from ep_moe.fields import Field, check_fields
from ep_moe.names import SCHEME_NAMES, TRANSPORT_NAMES

if TYPE_CHECKING:
    import torch

LAYER_ROUTINGS = ("uniform", "skewed")
ROUTINGS = ("uniform", "skewed", "one_rank")
EXPERTS_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
BESIDE = ("none", "deepgemm")
COUNTS = ("uneven", "even", "skewed")  # rows of experts in `bench experts`
RECORDED = "recorded"
LOADS = ("uniform", "zipf", "one_rank", RECORDED)  # of experts in `bench balance`
CALL_CASES = {  # of `bench calls`: preset and scheme
    "gpt-oss-120b": ("gpt-oss-120b", "mxfp4_w4a16"),
    "deepseek-v3-fp4": ("deepseek-v3", "nvfp4_w4a16"),
    "qwen3-30b": ("qwen3-30b", "none"),
    "deepseek-v3": ("deepseek-v3", "fp8_block"),
}
CHECKED_TOKENS = 64  # per rank, input of each MoE block of `bench model` in its check
LEAST_MAX_TOKENS = 8  # max_tokens_per_rank of a point with fewer tokens
SPREADS_DENSE_SINCE = (5, 19)  # of transformers: its expert parallelism also spreads attention and head


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerBenchConfig:
    """Measurements of `ep-moe bench layer`. Errors: ValueError names the value and the limit."""

    preset: Annotated[str, Field(help="Sizes", choices=LAYER_PRESETS)] = "deepseek-v3"
    tokens: Annotated[tuple[int, ...], Field(help="Tokens per rank (repeatable)", at_least=1)] = (128, 4096)
    hidden: Annotated[int, Field(help="Overrides the preset's hidden size, if not 0", at_least=0)] = 0
    intermediate: Annotated[int, Field(help="Overrides the preset's intermediate size", at_least=0)] = 0
    num_experts: Annotated[int, Field(help="Overrides the preset's number of experts", at_least=0)] = 0
    num_topk: Annotated[int, Field(help="Overrides the preset's experts per token", at_least=0)] = 0
    routing: Annotated[str, Field(help="Expert popularity", choices=LAYER_ROUTINGS)] = "uniform"
    seed: Annotated[int, Field(help="Seed of experts, tokens and logits", at_least=0)] = 0
    warmup: Annotated[int, Field(help="Warm-up calls", at_least=1)] = 5
    repeats: Annotated[int, Field(help="Timed calls", at_least=1)] = 20
    sample_rows: Annotated[int, Field(help="Tokens per rank whose results are checked", at_least=1)] = 16
    graph: Annotated[bool, Field(help="Time the replay of CUDA graphs too")] = False
    micro_batches: Annotated[
        int, Field(help="Time the layer in so many micro-batches too, whose exchange runs under experts", at_least=1)
    ] = 1
    num_sms: Annotated[int, Field(help="Most SMs of a kernel that exchanges micro-batches; 0 sets no limit")] = 0
    trace: Annotated[
        Path | None, Field(help="Write a trace of host and device of all ranks to this file, for ui.perfetto.dev")
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_sms and self.micro_batches == 1:
            raise ValueError(f"num_sms ({self.num_sms}) is of the exchange of micro-batches; micro_batches is 1")
        if self.micro_batches > min(self.tokens):
            raise ValueError(f"micro_batches ({self.micro_batches}) exceeds the fewest tokens, {min(self.tokens)}")

    def moe(self, engine: EngineConfig) -> MoEConfig:
        """The preset with the overrides. Errors: ValueError for sizes that do not fit each other."""
        preset, names = LAYER_PRESETS[self.preset], ("hidden", "intermediate", "num_experts")
        changes: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name)}
        if self.num_topk:
            assert preset.sizes.routing is not None
            changes["routing"] = dataclasses.replace(preset.sizes.routing, num_topk=self.num_topk)
        return preset.moe(engine, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsBenchConfig:
    """Measurements of `ep-moe bench experts`. Errors: ValueError names the value and the limit."""

    preset: Annotated[str, Field(help="Sizes", choices=LAYER_PRESETS)] = "deepseek-v3"
    ep_size: Annotated[
        int, Field(help="Ranks that share the preset's experts; one rank's share is measured", at_least=1)
    ] = 8
    rows: Annotated[tuple[int, ...], Field(help="Average rows per expert (repeatable)", at_least=1)] = (4, 16, 64, 512)
    seed: Annotated[int, Field(help="Seed of experts, tokens and rows per expert", at_least=0)] = 0
    warmup: Annotated[int, Field(help="Warm-up calls", at_least=1)] = 5
    repeats: Annotated[int, Field(help="Timed calls", at_least=1)] = 50
    sample_experts: Annotated[int, Field(help="Experts whose rows are all checked", at_least=1)] = 8
    counts: Annotated[
        tuple[str, ...],
        Field(
            help="Rows of experts: 0.7 to 1.3 times the average each; the average; half of all for one, none for a "
            "third of them (repeatable)",
            choices=COUNTS,
        ),
    ] = ("uneven",)
    rest_ms: Annotated[
        float, Field(help="Time calls with rests between them too, of so many milliseconds, if not 0", at_least=0)
    ] = 0.0
    beside: Annotated[str, Field(help="Time each GEMM alone, beside this library's", choices=BESIDE)] = "none"

    def __post_init__(self) -> None:
        check_fields(self)
        experts = LAYER_PRESETS[self.preset].sizes.num_experts
        if self.ep_size > experts:
            raise ValueError(f"ep_size ({self.ep_size}) exceeds the {experts} experts of {self.preset}")

    @property
    def num_local_experts(self) -> int:
        """L."""
        return math.ceil(LAYER_PRESETS[self.preset].sizes.num_experts / self.ep_size)

    def row_counts(self, rows: int, kind: str = "uneven") -> "torch.Tensor":
        """Rows of each expert, [L] int64 on the CPU, `rows` on average; `kind` is one of `counts`. Local.

        "uneven" is `rows` times 0.7 to 1.3, over the mean of these factors, and at least 1. "skewed" is half of all
        rows for the first expert, none for the last third, and the same for the others.
        """
        import torch

        from ep_moe.testing.random_experts import SEED_STRIDE

        num = self.num_local_experts
        if kind == "even":
            return torch.full((num,), rows)
        if kind == "skewed":
            others = max(num - 1 - math.ceil(num / 3), 0)
            shared = num * rows // 2 if others else 0
            counts = torch.zeros(num, dtype=torch.int64)
            counts[1 : 1 + others] = shared // max(others, 1)
            counts[0] = num * rows - counts.sum()
            return counts
        generator = torch.Generator().manual_seed(self.seed * SEED_STRIDE + rows)
        shares = torch.rand(num, generator=generator) * (1.3 - 0.7) + 0.7
        return (shares / shares.mean() * rows).round().clamp(min=1).long()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FormatsBenchConfig(ExpertsBenchConfig):
    """Measurements of `ep-moe bench formats`. Errors: ValueError names the value and the limit."""

    rows: Annotated[tuple[int, ...], Field(help="Rows of each expert (repeatable)", at_least=1)] = (16, 1024)
    counts: Annotated[tuple[str, ...], Field(help="As of `bench experts` (repeatable)", choices=COUNTS)] = ("even",)
    schemes: Annotated[tuple[str, ...], Field(help="Number formats (repeatable), by default all")] = SCHEME_NAMES

    def __post_init__(self) -> None:
        ExpertsBenchConfig.__post_init__(self)
        from ep_moe.quant import get_scheme

        for name in self.schemes:
            get_scheme(name)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallsBenchConfig:
    """Measurements of `ep-moe bench calls`. Errors: ValueError names the value and the limit."""

    case: Annotated[tuple[str, ...], Field(help="Model and format (repeatable)", choices=CALL_CASES)] = tuple(
        CALL_CASES
    )
    tokens: Annotated[tuple[int, ...], Field(help="Tokens (repeatable)", at_least=1)] = (1, 16, 128, 512, 4096)
    others: Annotated[bool, Field(help="Time the calls that engines make less often too")] = False
    seed: Annotated[int, Field(help="Seed of weights and tokens", at_least=0)] = 0
    warmup: Annotated[int, Field(help="Warm-up calls", at_least=1)] = 5
    repeats: Annotated[int, Field(help="Timed calls", at_least=1)] = 50

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeBenchConfig:
    """Measurements of `ep-moe bench serve`. Errors: ValueError names the value and the limit."""

    url: Annotated[str, Field(help="Base address of any server of OpenAI's protocol")] = "http://127.0.0.1:8000/v1"
    model: Annotated[str, Field(help="Model to ask for; by default the server's first")] = ""
    concurrency: Annotated[tuple[int, ...], Field(help="Most requests at a time (repeatable)", at_least=1)] = (1, 4, 16)
    rate: Annotated[
        tuple[float, ...],
        Field(help="Requests per second, Poisson arrivals (repeatable); 0 asks as soon as allowed", at_least=0),
    ] = (0.0,)
    requests: Annotated[int, Field(help="Requests of each level", at_least=1)] = 64
    prompt_chars: Annotated[int, Field(help="Characters of a prompt", at_least=1)] = 512
    text: Annotated[str, Field(help="File that prompts are cut from; by default the held-out text that ships")] = ""
    new_tokens: Annotated[int, Field(help="New tokens of each answer", at_least=1)] = 128
    temperature: Annotated[float, Field(help="Temperature of the sampling", at_least=0)] = 0.0
    ignore_eos: Annotated[
        bool, Field(help="Let no end token end an answer (a parameter of vLLM, SGLang and ep-moe, not of OpenAI)")
    ] = True
    timeout_secs: Annotated[float, Field(help="Seconds after which a request has failed", positive=True)] = 300.0
    seed: Annotated[int, Field(help="Seed of prompts and arrivals", at_least=0)] = 0
    plot: Annotated[Path | None, Field(help="A PNG to draw throughput and times to")] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def levels(self) -> list[tuple[int, float]]:
        """(most requests at a time, rate) of each level."""
        return list(itertools.product(self.concurrency, self.rate))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BalancePoint:
    """One measurement of `ep-moe bench balance`; see the fields of its config."""

    preset: str
    scheme: str
    routing: str
    redundant_experts: int
    tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BalanceBenchConfig:
    """Measurements of `ep-moe bench balance`. Errors: ValueError names the value and the limit."""

    preset: Annotated[tuple[str, ...], Field(help="Sizes (repeatable)", choices=LAYER_PRESETS)] = (
        "deepseek-v3",
        "qwen3-30b",
    )
    scheme: Annotated[
        tuple[str, ...], Field(help="Number format of experts and payload (repeatable)", option="--quant")
    ] = ("fp8_block", "none")
    routing: Annotated[
        tuple[str, ...],
        Field(
            help="Load of experts (repeatable): even, 1/n for the n-th, 70 % on the first rank, or that of --load",
            choices=LOADS,
        ),
    ] = ("zipf", "one_rank")
    load: Annotated[
        Path | None, Field(help="A file of `ep-moe balance record` to measure too, with its number of experts")
    ] = None
    redundant_experts: Annotated[
        tuple[int, ...],
        Field(help="Copies of experts in each layer (repeatable), at most one of each on every other rank", at_least=0),
    ] = (0, 32)
    tokens: Annotated[tuple[int, ...], Field(help="Tokens per rank (repeatable)", at_least=1)] = (128, 1024, 4096)
    seed: Annotated[int, Field(help="Seed of experts, tokens and loads", at_least=0)] = 0
    warmup: Annotated[int, Field(help="Warm-up calls", at_least=1)] = 5
    repeats: Annotated[int, Field(help="Timed calls", at_least=1)] = 20
    sample_rows: Annotated[int, Field(help="Tokens per rank whose results are checked", at_least=1)] = 4
    plot: Annotated[Path | None, Field(help="Draw the load of ranks in each row, before and after, to this file")] = (
        None
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if RECORDED in self.routing and self.load is None:
            raise ValueError("routing 'recorded' needs load, a file of `ep-moe balance record`")
        from ep_moe.quant import get_scheme

        for name in self.scheme:
            get_scheme(name)

    @property
    def points(self) -> tuple[BalancePoint, ...]:
        """The points to measure, in order; the recorded load, of other experts, comes last."""
        routings = [routing for routing in self.routing if routing != RECORDED]
        routings += [] if self.load is None else [RECORDED]
        return tuple(
            BalancePoint(preset=preset, scheme=scheme, routing=routing, redundant_experts=copies, tokens=tokens)
            for preset, scheme, routing, copies, tokens in itertools.product(
                self.preset, self.scheme, routings, self.redundant_experts, self.tokens
            )
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MovingBenchConfig:
    """Measurements of `ep-moe bench moving`. Errors: ValueError names the value and the limit."""

    preset: Annotated[str, Field(help="Sizes", choices=LAYER_PRESETS)] = "deepseek-v3"
    layers: Annotated[int, Field(help="MoE layers of a step", at_least=1)] = 2
    tokens: Annotated[int, Field(help="Tokens per rank in a step", at_least=1)] = 128
    redundant_experts: Annotated[int, Field(help="Copies of experts in each layer", at_least=0)] = 0
    every: Annotated[int, Field(help="Steps from one rebalance, and one load, to the next", at_least=1)] = 50
    steps: Annotated[int, Field(help="Timed steps, with and without moving", at_least=1)] = 500
    seed: Annotated[int, Field(help="Seed of experts and tokens", at_least=0)] = 0
    sample_rows: Annotated[int, Field(help="Tokens per rank whose results are checked", at_least=1)] = 4

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelBenchConfig:
    """Measurements of `ep-moe bench model`. Errors: ValueError names the value and the limit."""

    preset: Annotated[str, Field(help="Sizes", choices=MODEL_PRESETS)] = "qwen3-30b"
    layers: Annotated[int, Field(help="MoE layers of the random model", at_least=1)] = 8
    batch: Annotated[int, Field(help="Sequences per rank", at_least=1)] = 16
    prompt_tokens: Annotated[int, Field(help="Prompt tokens per sequence", at_least=1)] = 128
    new_tokens: Annotated[int, Field(help="New tokens per sequence", at_least=2)] = 64
    repeats: Annotated[int, Field(help="Timed generations", at_least=1)] = 3
    seed: Annotated[int, Field(help="Seed of weights and prompts", at_least=0)] = 0
    baseline_experts: Annotated[
        str, Field(help="Experts implementation of transformers' own", choices=EXPERTS_IMPLEMENTATIONS)
    ] = "grouped_mm"
    hook: Annotated[bool, Field(help="Plug our exchange into transformers' own too")] = False
    decode_graphs: Annotated[
        bool | None,
        Field(help="Our own system decodes by CUDA graphs, by default on GPUs where the transport allows it"),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def max_tokens_per_rank(self) -> int:
        """The most tokens of a rank in a forward pass."""
        return max(self.batch * self.prompt_tokens, CHECKED_TOKENS)

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ValueError for a hook on ranks over which transformers cannot spread the model. Local."""
        if num_ranks == 1 and self.hook:
            raise ValueError("hook with nproc (1): transformers' own expert parallelism needs at least 2 ranks")
        if self.hook and (reason := self.why_no_baseline(num_ranks)):
            raise ValueError(f"hook: {reason}")

    def why_no_baseline(self, num_ranks: int) -> str:
        """Why transformers cannot spread the model over so many ranks, "" if it can. Local."""
        sizes = MODEL_PRESETS[self.preset]
        experts, heads = sizes.get("num_experts") or sizes["num_local_experts"], sizes["num_key_value_heads"]
        if experts % num_ranks:
            return (
                f"nproc ({num_ranks}) does not divide the {experts} experts of {self.preset}, which transformers "
                f"spreads evenly"
            )
        if spreads_dense() and heads % num_ranks:
            return (
                f"nproc ({num_ranks}) does not divide the {heads} KV heads of {self.preset}: transformers "
                f"{importlib.metadata.version('transformers')} spreads attention over all ranks of its expert "
                f"parallelism"
            )
        return ""


def spreads_dense() -> bool:
    """True if the installed transformers spreads attention and head too, from SPREADS_DENSE_SINCE on. Local.

    Older versions replicate everything but the experts, and take a flag in place of a size. The version is read from
    the package's metadata, since importing transformers takes seconds.
    """
    version = re.findall(r"\d+", importlib.metadata.version("transformers"))
    return tuple(map(int, version[:2])) >= SPREADS_DENSE_SINCE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeSizes:
    """Fields that all points of one `ep-moe bench transport` share, without a suite."""

    hidden: Annotated[int, Field(help="Hidden size")] = 7168
    num_topk: Annotated[int, Field(help="Experts per token")] = 8
    num_experts: Annotated[int, Field(help="Experts of all ranks")] = 256
    routing: Annotated[str, Field(help="Expert popularity", choices=ROUTINGS)] = "uniform"
    graph: Annotated[
        bool,
        Field(
            help="Replay CUDA graphs, or call eagerly; collective and local are always called",
            option="--graph/--eager",
        ),
    ] = True
    num_sms: Annotated[int, Field(help="Most SMs that a kernel of peer takes; 0 sets no limit")] = 0
    nvshmem_stores: Annotated[str, Field(help="How nvshmem reaches ranks: auto, addresses or puts")] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransportPoint(ExchangeSizes):
    """One measurement of one transport. Errors: ValueError names the value and the limit."""

    tokens: Annotated[int, Field(at_least=1)] = 128
    layout: Layout = Layout.BATCHED
    payload: str = "fp8_block"

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.num_topk <= self.num_experts:
            raise ValueError(f"num_topk ({self.num_topk}) is not in [1, num_experts ({self.num_experts})]")
        from ep_moe.quant import get_scheme

        get_scheme(self.payload)
        self.config(torch_dtype("bfloat16"))

    def config(self, dtype: "torch.dtype") -> TransportConfig:
        """The transport's config. Errors: ValueError for a hidden size that no transport supports."""
        return TransportConfig(
            hidden=self.hidden,
            max_tokens_per_rank=max(self.tokens, LEAST_MAX_TOKENS),
            dtype=dtype,
            max_topk=self.num_topk,
            num_sms=self.num_sms,
            nvshmem_stores=self.nvshmem_stores,
        )

    def row_bytes(self, dtype: "torch.dtype") -> int:
        """Bytes of a dispatched token: values, scales, ids and weights."""
        from ep_moe.quant import get_scheme, payload_bytes

        return payload_bytes(get_scheme(self.payload), self.hidden, dtype) + 8 * self.num_topk


_COMPACT = {"tokens": 4096, "layout": Layout.COMPACT}
_STANDARD: tuple[dict[str, Any], ...] = (
    *({"tokens": tokens} for tokens in (1, 16, 128, 512)),
    _COMPACT,
    *({"layout": Layout.COMPACT}, {"layout": Layout.FLAT}, {"payload": "none"}),
    *({"hidden": hidden} for hidden in (2048, 2880, 4096)),
    *({"num_topk": num_topk} for num_topk in (1, 4, 6, 10)),
    *({"routing": "skewed"}, {"graph": False}),
    *(_COMPACT | {"num_sms": num_sms} for num_sms in (16, 32, 64, 128)),
)
# Fields of points; "standard": from 1 to 4096 tokens; 128 tokens with one change at a time; 4096 tokens on fewer SMs.
SUITES = {"standard": _STANDARD}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransportBenchConfig(ExchangeSizes):
    """Measurements of `ep-moe bench transport`. Errors: ValueError names the value and the limit."""

    preset: Annotated[str, Field(help="Sizes of a layer whose tokens travel", choices=LAYER_PRESETS)] = "deepseek-v3"
    hidden: Annotated[int, Field(help="Overrides the preset's hidden size, if not 0", at_least=0)] = 0
    num_topk: Annotated[int, Field(help="Overrides the preset's experts per token", at_least=0)] = 0
    num_experts: Annotated[int, Field(help="Overrides the preset's number of experts", at_least=0)] = 0
    tokens: Annotated[tuple[int, ...], Field(help="Tokens per rank (repeatable)")] = (1, 16, 128, 512, 4096)
    layout: Annotated[tuple[Layout, ...], Field(help="Layout of the expert batch (repeatable)")] = (Layout.COMPACT,)
    payload: Annotated[tuple[str, ...], Field(help="Number format of tokens on the way (repeatable)")] = ("fp8_block",)
    suite: Annotated[str, Field(help=f"Named sizes, in place of all options above: {', '.join(SUITES)}")] = ""
    transport: Annotated[tuple[str, ...], Field(help="Transports (repeatable)", choices=("auto", *TRANSPORT_NAMES))] = (
        "auto",
    )
    seed: Annotated[int, Field(help="Seed of tokens, ids and weights", at_least=0)] = 0
    warmup: Annotated[int, Field(help="Warm-up replays", at_least=1)] = 5
    repeats: Annotated[int, Field(help="Timed replays", at_least=1)] = 20

    def __post_init__(self) -> None:
        check_fields(self)
        if self.suite and self.suite not in SUITES:
            raise ValueError(f"suite ({self.suite!r}) is not one of {', '.join(SUITES)}")
        of_suite = {"preset", *(field.name for field in dataclasses.fields(TransportPoint))} if self.suite else set()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in of_suite and value != field.default:
                raise ValueError(f"{field.name} ({value}) is set by suite {self.suite!r}; leave it out")
        _ = self.points  # each checks its sizes

    @property
    def points(self) -> tuple[TransportPoint, ...]:
        """The points to measure, in order: the suite's, or all combinations of layouts, payloads and tokens."""
        if self.suite:
            return tuple(TransportPoint(**changes) for changes in SUITES[self.suite])
        same = {field.name: getattr(self, field.name) for field in dataclasses.fields(ExchangeSizes)}
        sizes = LAYER_PRESETS[self.preset].sizes
        assert sizes.routing is not None
        of_preset = {"hidden": sizes.hidden, "num_experts": sizes.num_experts, "num_topk": sizes.routing.num_topk}
        same |= {name: value for name, value in of_preset.items() if not same[name]}
        return tuple(
            TransportPoint(tokens=tokens, layout=layout, payload=payload, **same)
            for layout, payload, tokens in itertools.product(self.layout, self.payload, self.tokens)
        )

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ValueError if the last of `num_ranks` ranks has too few experts for "one_rank" routing. Local."""
        for point in self.points:
            experts = point.num_experts // num_ranks
            if point.routing == "one_rank" and experts < point.num_topk:
                raise ValueError(
                    f"routing 'one_rank': num_topk ({point.num_topk}) exceeds the {experts} experts of the last of "
                    f"{num_ranks} ranks"
                )
