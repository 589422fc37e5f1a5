"""The command line: ep-moe run | generate | eval | bench layer | transport | model | experts | report.

Results go to standard output, progress and errors to standard error.

Exit codes: 0 success; 1 the job failed or `run` found a difference; 2 a wrong argument; 130 Ctrl-C; 143 SIGTERM.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import shlex
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ep_moe.app import report
from ep_moe.app.eval import EvalConfig, evaluate
from ep_moe.app.generate import GenerateConfig, generate
from ep_moe.app.run import RunConfig, run
from ep_moe.app.start import is_first_rank, on_ranks, pick_device
from ep_moe.bench.configs import (
    EXPERTS_IMPLEMENTATIONS,
    LAYER_ROUTINGS,
    SUITES,
    ExpertsBenchConfig,
    LayerBenchConfig,
    ModelBenchConfig,
    TransportBenchConfig,
)
from ep_moe.bench.configs import ROUTINGS as TRANSPORT_ROUTINGS
from ep_moe.bench.experts_alone import experts_rank_main
from ep_moe.bench.layer import layer_rank_main
from ep_moe.bench.presets import LAYER_PRESETS, MODEL_PRESETS
from ep_moe.bench.records import Record, append_records, check_commit, check_path, check_writable, flatten, now
from ep_moe.bench.report import make_report
from ep_moe.bench.tables import show_rows
from ep_moe.bench.transport import transport_rank_main
from ep_moe.config import DTYPES, EngineConfig, LaunchEnv, Layout
from ep_moe.experts import EXPERTS
from ep_moe.placement import PLACEMENTS
from ep_moe.quant import SCHEMES, get_scheme
from ep_moe.transport import TRANSPORTS

app = typer.Typer(
    name="ep-moe",
    help="Run Mixture-of-Experts models expert-parallel: their experts spread over ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

bench_app = typer.Typer(
    help="Measure, each result checked first, beside a baseline of the same run.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")

_ENGINE, _EVAL, _GENERATE = EngineConfig(), EvalConfig(), GenerateConfig(prompts=("-",))  # for their defaults
_BENCH_ENGINE = EngineConfig(
    dtype="bfloat16", scheme="none", timeout_secs=120.0
)  # loading and compiling may delay a rank
_ONE_RANK = dataclasses.replace(_BENCH_ENGINE, nproc=1)
_LAYER, _MODEL, _EXPERTS = LayerBenchConfig(), ModelBenchConfig(), ExpertsBenchConfig()
_TRANSPORT = TransportBenchConfig()

_NAMES: dict[str, tuple[str, ...]] = {
    "transport": ("auto", *TRANSPORTS),
    "experts": ("auto", *EXPERTS),
    "placement": tuple(PLACEMENTS),
}

_QUANT = "Of experts and payload"
_ENGINE_OPTIONS: dict[str, Any] = {
    "model": Annotated[str, typer.Option(help="A Hugging Face directory; empty is the model that ships with ep-moe.")],
    "nproc": Annotated[
        int | None,
        typer.Option(help=f"Ranks to start on this machine, {_ENGINE.nproc} if not given; torchrun starts its own."),
    ],
    "device": Annotated[str, typer.Option(help="auto, cpu or cuda; auto is cuda if every rank has its own GPU.")],
    "dtype": Annotated[str, typer.Option(help=f"Dtype of weights and activations: {', '.join(DTYPES)}.")],
    "scheme": Annotated[
        str, typer.Option("--quant", help=f"{_QUANT}; auto is the checkpoint's own: auto, {', '.join(SCHEMES)}.")
    ],
    "transport": Annotated[str, typer.Option(help=f"Token exchange: {', '.join(_NAMES['transport'])}.")],
    "experts": Annotated[str, typer.Option(help=f"Expert implementation: {', '.join(_NAMES['experts'])}.")],
    "placement": Annotated[str, typer.Option(help=f"Which rank owns which expert: {', '.join(_NAMES['placement'])}.")],
    "layout": Annotated[Layout, typer.Option(help="Layout of the expert batch.")],
    "max_tokens_per_rank": Annotated[int, typer.Option(help="Most tokens of one rank in a forward pass.")],
    "timeout_secs": Annotated[float, typer.Option(help="How long a rank waits for another before naming it lost.")],
}
# "auto" takes a checkpoint's scheme, and these commands read none
_NO_CHECKPOINT = {"scheme": Annotated[str, typer.Option("--quant", help=f"{_QUANT}: {', '.join(SCHEMES)}.")]}


def _job(
    show: Callable[[dict[str, Any]], None],
    defaults: EngineConfig = _ENGINE,
    leave_out: Collection[str] = (),
    instead: Mapping[str, Any] = types.MappingProxyType({}),
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Make a command of a function (engine, ...) -> report: add the engine's options and --json, print the report.

    `instead` replaces options of the engine by name.
    An error becomes one line on standard error and an exit code.
    """
    shared = {name: option for name, option in (_ENGINE_OPTIONS | dict(instead)).items() if name not in leave_out}

    def decorate(function: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*, as_json: bool, **options: Any) -> None:
            with _one_line_errors():
                engine = _engine({name: options.pop(name) for name in shared}, defaults)
                result = function(engine, **options)
            if is_first_rank():
                if as_json:
                    typer.echo(json.dumps(_for_json(_as_written(result)), allow_nan=False))
                else:
                    show(result)
            if not result.get("ok", True):
                raise typer.Exit(1)

        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [p.replace(kind=keyword) for p in list(inspect.signature(function).parameters.values())[1:]]
        values = dataclasses.asdict(defaults) | {"nproc": None}  # None: not given
        added = [
            inspect.Parameter(name, keyword, default=values[name], annotation=annotation)
            for name, annotation in shared.items()
        ]
        json_option = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
        parameters = [*own, *added, inspect.Parameter("as_json", keyword, default=False, annotation=json_option)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        _fail(error, 2)
    except (RuntimeError, OSError) as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(130) from None


def _engine(options: dict[str, Any], defaults: EngineConfig) -> EngineConfig:
    for name, known in _NAMES.items():
        if name in options and options[name] not in known:
            raise ValueError(f"{name} ({options[name]!r}) is not one of {', '.join(known)}")
    if options.get("nproc") is None:
        return dataclasses.replace(defaults, **options | {"nproc": defaults.nproc})
    env = LaunchEnv.from_environ()
    if env is not None and env.local_world_size != options["nproc"]:
        raise ValueError(
            f"nproc ({options['nproc']}) is not the number of ranks that are on this machine already "
            f"({env.local_world_size}, by RANK and LOCAL_WORLD_SIZE in the environment); leave it out"
        )
    return dataclasses.replace(defaults, **options)


def _for_json(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _for_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_for_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_written(report: dict[str, Any]) -> dict[str, Any]:
    """A report with its rows, if it is a benchmark's, as they are written to files."""
    if "bench" not in report:
        return report
    return report | {"rows": [flatten(report["bench"], row) for row in report["rows"]]}


def _fail(error: Exception, code: int) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code) from None


@app.command("run")
@_job(report.show_run)
def run_command(
    engine: EngineConfig,
    config: Annotated[
        Path | None, typer.Option(help="A TOML file with a table 'run'; the shipped one if none.")
    ] = None,
) -> dict[str, Any]:
    """Generate with the experts spread over ranks and compare every token and logit with the whole model.

    Every rank loads the whole model for the comparison.
    """
    try:
        chosen = RunConfig.read(config)
    except FileNotFoundError:
        raise ValueError(f"config ({str(config)!r}) is not a file") from None
    return run(engine, chosen)


@app.command("generate")
@_job(report.show_generate)
def generate_command(
    engine: EngineConfig,
    prompts: Annotated[list[str], typer.Argument(help="Texts to continue; - reads one from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = _GENERATE.max_new_tokens,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 takes the likeliest token.")
    ] = _GENERATE.temperature,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest tokens that hold this share of the probability.")
    ] = _GENERATE.top_p,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = _GENERATE.seed,
) -> dict[str, Any]:
    """Continue prompts, which are spread over the ranks."""
    texts = tuple(sys.stdin.read() if prompt == "-" else prompt for prompt in prompts)
    config = GenerateConfig(
        prompts=texts, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    return generate(engine, config)


@app.command("eval")
@_job(report.show_eval)
def eval_command(
    engine: EngineConfig,
    text: Annotated[str, typer.Option(help="A UTF-8 file; empty is the held-out text that ships.")] = _EVAL.text,
    max_bytes: Annotated[int, typer.Option(help="Most bytes of the text that are used; 0 uses all.")] = _EVAL.max_bytes,
    window: Annotated[int, typer.Option(help="Tokens per window.")] = _EVAL.window,
    batch: Annotated[int, typer.Option(help="Windows in one forward pass.")] = _EVAL.batch,
    whole: Annotated[bool, typer.Option(help="Evaluate the whole model on every rank too.")] = _EVAL.whole,
) -> dict[str, Any]:
    """Measure the loss on held-out text in nats per byte, expert-parallel beside the whole model."""
    return evaluate(engine, EvalConfig(text=text, max_bytes=max_bytes, window=window, batch=batch, whole=whole))


_APPEND = Annotated[Path | None, typer.Option(help="Add the measured rows to this .jsonl file; needs --commit.")]
_COMMIT = Annotated[
    str, typer.Option(help="Commit that is measured, as `git rev-parse HEAD` prints it; needs --append.")
]
_SWEEP = Annotated[bool, typer.Option("--sweep", help="Mark the rows as exploratory: the report leaves them out.")]
_NOT_REPEATED = {"--append": 1, "--commit": 1, "--sweep": 0, "--json": 0}  # option -> number of its values


def _measure(run: Callable[[], dict[str, Any]], append: Path | None, commit: str, sweep: bool) -> dict[str, Any]:
    """Run a benchmark and, with --append, write its rows if all results are right; returns the report.

    Reasons why the rows could not be written are raised before the run.
    """
    if append is None:
        if commit or sweep:
            raise ValueError("--commit and --sweep require --append")
        return run()
    check_path(append)
    if not commit:
        raise ValueError("append needs --commit: a row says of which source it is")
    check_commit(commit)
    if not sweep and _is_interpreted():
        raise ValueError("append under TRITON_INTERPRET needs --sweep: what is interpreted has no speed that counts")
    if is_first_rank():
        check_writable(append)
    report = run()
    if report["ok"] and is_first_rank():
        common = {name: report[name] for name in ("bench", "gpu", "world_size", "versions")}
        common |= {"date": now(), "commit": commit, "command": _repeatable(sys.argv[1:]), "sweep": sweep}
        parts = ("shapes", "setup", "figures", "baselines")
        rows = [Record(**common, **{part: row[part] for part in parts}) for row in report["rows"]]
        try:
            append_records(append, rows)
        except OSError as error:
            lines = "\n".join(row.to_line() for row in rows)
            raise RuntimeError(f"append ({str(append)!r}) cannot be written: {error}; the rows are:\n{lines}") from None
    return report


def _is_interpreted() -> bool:
    """True if Triton's kernels run in its interpreter; only Linux has Triton."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


def _device(engine: EngineConfig) -> str:
    """The device type of this machine's ranks."""
    env = LaunchEnv.from_environ()
    return pick_device(engine, engine.nproc if env is None else env.local_world_size)


def _check_graph(engine: EngineConfig) -> None:
    """Raise before ranks start if they have no GPUs, which a CUDA graph needs."""
    if _device(engine) == "cpu":
        kind = ValueError if engine.device == "cpu" else RuntimeError
        raise kind("graph: a CUDA graph needs a GPU for each rank, these ranks compute on the CPU")


def _repeatable(arguments: list[str]) -> str:
    """The command line without options that only direct its output; under torchrun preceded by torchrun's own."""
    kept, skip = ["ep-moe"], 0
    env = LaunchEnv.from_environ()
    if env is not None:
        nodes, local = env.world_size // env.local_world_size, env.local_world_size
        kept = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(local), "-m", "ep_moe"]
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if skip:
            skip -= 1
        elif name in _NOT_REPEATED:
            skip = 0 if equals else _NOT_REPEATED[name]
        else:
            kept.append(argument)
    return shlex.join(kept)


@bench_app.command("layer")
@_job(show_rows, _BENCH_ENGINE, leave_out=("model", "max_tokens_per_rank"), instead=_NO_CHECKPOINT)
def bench_layer_command(
    engine: EngineConfig,
    preset: Annotated[str, typer.Option(help=f"Sizes: {', '.join(LAYER_PRESETS)}.")] = _LAYER.preset,
    tokens: Annotated[list[int], typer.Option(help="Tokens per rank (repeatable).")] = list(_LAYER.tokens),  # noqa: B006
    hidden: Annotated[int, typer.Option(help="Overrides the preset's hidden size, if not 0.")] = _LAYER.hidden,
    intermediate: Annotated[int, typer.Option(help="Overrides the preset's intermediate size.")] = _LAYER.intermediate,
    num_experts: Annotated[int, typer.Option(help="Overrides the preset's number of experts.")] = _LAYER.num_experts,
    num_topk: Annotated[int, typer.Option(help="Overrides the preset's experts per token.")] = _LAYER.num_topk,
    routing: Annotated[str, typer.Option(help=f"Expert popularity: {', '.join(LAYER_ROUTINGS)}.")] = _LAYER.routing,
    seed: Annotated[int, typer.Option(help="Seed of experts, tokens and logits.")] = _LAYER.seed,
    warmup: Annotated[int, typer.Option(help="Warm-up calls.")] = _LAYER.warmup,
    repeats: Annotated[int, typer.Option(help="Timed calls.")] = _LAYER.repeats,
    sample_rows: Annotated[int, typer.Option(help="Tokens per rank whose results are checked.")] = _LAYER.sample_rows,
    graph: Annotated[bool, typer.Option("--graph", help="Time the replay of CUDA graphs too.")] = _LAYER.graph,
    append: _APPEND = None,
    commit: _COMMIT = "",
    sweep: _SWEEP = False,
) -> dict[str, Any]:
    """Check and time one MoE layer, beside all-gather and reduce-scatter with the same experts."""
    config = LayerBenchConfig(
        preset=preset,
        tokens=tuple(tokens),
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        num_topk=num_topk,
        routing=routing,
        seed=seed,
        warmup=warmup,
        repeats=repeats,
        sample_rows=sample_rows,
        graph=graph,
    )
    get_scheme(engine.scheme)  # refuses "auto", which needs a checkpoint
    config.moe(engine)  # sizes that do not fit raise before ranks start
    if graph:
        _check_graph(engine)
    return _measure(lambda: on_ranks(layer_rank_main, engine, config), append, commit, sweep)


@bench_app.command("transport")
@_job(
    show_rows,
    _BENCH_ENGINE,
    leave_out=("model", "scheme", "transport", "experts", "placement", "layout", "max_tokens_per_rank"),
)
def bench_transport_command(
    engine: EngineConfig,
    suite: Annotated[
        str,
        typer.Option(
            help=f"A named set of sizes, which replaces all options below but the transports: {', '.join(SUITES)}."
        ),
    ] = _TRANSPORT.suite,
    tokens: Annotated[list[int], typer.Option(help="Tokens per rank (repeatable).")] = list(_TRANSPORT.tokens),  # noqa: B006
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = _TRANSPORT.hidden,
    num_topk: Annotated[int, typer.Option(help="Experts per token.")] = _TRANSPORT.num_topk,
    num_experts: Annotated[int, typer.Option(help="Experts of all ranks.")] = _TRANSPORT.num_experts,
    layout: Annotated[list[Layout], typer.Option(help="Layout of the expert batch (repeatable).")] = list(  # noqa: B006
        _TRANSPORT.layout
    ),
    payload: Annotated[list[str], typer.Option(help=f"Payload format (repeatable): {', '.join(SCHEMES)}.")] = list(  # noqa: B006
        _TRANSPORT.payload
    ),
    routing: Annotated[
        str, typer.Option(help=f"Expert popularity: {', '.join(TRANSPORT_ROUTINGS)}.")
    ] = _TRANSPORT.routing,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph/--eager", help="Replay CUDA graphs, or call eagerly; collective and local are always called."
        ),
    ] = _TRANSPORT.graph,
    num_sms: Annotated[
        int, typer.Option(help="Most SMs that a kernel of nvlink takes; 0 sets no limit.")
    ] = _TRANSPORT.num_sms,
    transport: Annotated[
        list[str], typer.Option(help=f"Transports (repeatable): {', '.join(_NAMES['transport'])}.")
    ] = list(  # noqa: B006
        _TRANSPORT.transport
    ),
    seed: Annotated[int, typer.Option(help="Seed of tokens, ids and weights.")] = _TRANSPORT.seed,
    warmup: Annotated[int, typer.Option(help="Warm-up replays.")] = _TRANSPORT.warmup,
    repeats: Annotated[int, typer.Option(help="Timed replays.")] = _TRANSPORT.repeats,
    append: _APPEND = None,
    commit: _COMMIT = "",
    sweep: _SWEEP = False,
) -> dict[str, Any]:
    """Check dispatch and combine alone and time them, beside NCCL's collectives; on a CPU, check."""
    config = TransportBenchConfig(
        suite=suite,
        tokens=tuple(tokens),
        layout=tuple(layout),
        payload=tuple(payload),
        hidden=hidden,
        num_topk=num_topk,
        num_experts=num_experts,
        routing=routing,
        graph=graph,
        num_sms=num_sms,
        transport=tuple(transport),
        seed=seed,
        warmup=warmup,
        repeats=repeats,
    )
    env = LaunchEnv.from_environ()
    config.check_ranks(engine.nproc if env is None else env.world_size)
    if append is not None and not sweep and _device(engine) == "cpu":
        raise ValueError("append on a CPU needs --sweep: nothing is timed there")
    return _measure(lambda: on_ranks(transport_rank_main, engine, config), append, commit, sweep)


@bench_app.command("model")
@_job(show_rows, _BENCH_ENGINE, leave_out=("model", "scheme", "max_tokens_per_rank"))
def bench_model_command(
    engine: EngineConfig,
    preset: Annotated[str, typer.Option(help=f"Sizes: {', '.join(MODEL_PRESETS)}.")] = _MODEL.preset,
    layers: Annotated[int, typer.Option(help="MoE layers of the random model.")] = _MODEL.layers,
    batch: Annotated[int, typer.Option(help="Sequences per rank.")] = _MODEL.batch,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens per sequence.")] = _MODEL.prompt_tokens,
    new_tokens: Annotated[int, typer.Option(help="New tokens per sequence.")] = _MODEL.new_tokens,
    repeats: Annotated[int, typer.Option(help="Timed generations.")] = _MODEL.repeats,
    seed: Annotated[int, typer.Option(help="Seed of weights and prompts.")] = _MODEL.seed,
    baseline_experts: Annotated[
        str, typer.Option(help=f"Experts implementation of transformers' own: {', '.join(EXPERTS_IMPLEMENTATIONS)}.")
    ] = _MODEL.baseline_experts,
    hook: Annotated[bool, typer.Option("--hook", help="Plug our exchange into transformers' own too.")] = _MODEL.hook,
    append: _APPEND = None,
    commit: _COMMIT = "",
    sweep: _SWEEP = False,
) -> dict[str, Any]:
    """Check and time a model with random weights, beside transformers' own expert parallelism."""
    config = ModelBenchConfig(
        preset=preset,
        layers=layers,
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        repeats=repeats,
        seed=seed,
        baseline_experts=baseline_experts,
        hook=hook,
    )
    env = LaunchEnv.from_environ()
    config.check_ranks(engine.nproc if env is None else env.world_size)
    return _measure(lambda: on_ranks("ep_moe.bench.model:model_rank_main", engine, config), append, commit, sweep)


@bench_app.command("experts")
@_job(
    show_rows,
    _ONE_RANK,
    leave_out=("model", "nproc", "transport", "placement", "max_tokens_per_rank"),
    instead=_NO_CHECKPOINT,
)
def bench_experts_command(
    engine: EngineConfig,
    preset: Annotated[str, typer.Option(help=f"Sizes: {', '.join(LAYER_PRESETS)}.")] = _EXPERTS.preset,
    ep_size: Annotated[
        int, typer.Option(help="Ranks that share the preset's experts; one rank's share is measured.")
    ] = _EXPERTS.ep_size,
    rows: Annotated[list[int], typer.Option(help="Average rows per expert (repeatable).")] = list(_EXPERTS.rows),  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of experts, tokens and rows per expert.")] = _EXPERTS.seed,
    warmup: Annotated[int, typer.Option(help="Warm-up calls.")] = _EXPERTS.warmup,
    repeats: Annotated[int, typer.Option(help="Timed calls.")] = _EXPERTS.repeats,
    sample_experts: Annotated[int, typer.Option(help="Experts whose rows are all checked.")] = _EXPERTS.sample_experts,
    append: _APPEND = None,
    commit: _COMMIT = "",
    sweep: _SWEEP = False,
) -> dict[str, Any]:
    """Check and time the experts of one rank alone, without an exchange, beside torch's grouped GEMM."""
    config = ExpertsBenchConfig(
        preset=preset,
        ep_size=ep_size,
        rows=tuple(rows),
        seed=seed,
        warmup=warmup,
        repeats=repeats,
        sample_experts=sample_experts,
    )
    get_scheme(engine.scheme)  # refuses "auto", which needs a checkpoint
    return _measure(lambda: on_ranks(experts_rank_main, engine, config), append, commit, sweep)


@bench_app.command("report")
def bench_report_command(
    directory: Annotated[Path, typer.Option("--dir", help="Holds the .jsonl files and notes/.")] = Path(
        "docs/benchmarks"
    ),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 if the page differs.")] = False,
    plots: Annotated[bool, typer.Option(help="Draw the plots; needs matplotlib.")] = True,
) -> None:
    """Make BENCHMARKS.md, beside the directory, and its plots from the measured rows."""
    with _one_line_errors():
        report = make_report(directory, check=check, plots=plots and not check)
        if not report["ok"]:
            raise RuntimeError(f"{report['page']} is not what the rows make; write it by: ep-moe bench report")
    for path in report["written"] or [f"{report['page']} is up to date"]:
        typer.echo(path)


def main() -> None:
    """Entry point of the `ep-moe` command."""
    app()
