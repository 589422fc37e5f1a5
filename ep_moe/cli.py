"""The command line: ep-moe run | generate | eval | serve | quantize | tune | plan | balance, and ep-moe bench layer |
transport | balance | moving | model | experts | formats | calls | serve | report.

Results go to standard output, progress and errors to standard error. torch is imported by the commands that need it,
and transformers by the ranks alone, whose entry points are dotted names: each takes seconds.

Exit codes: 0 success; 1 the job failed or `run` found a difference; 2 a wrong argument; 129 SIGHUP; 130 Ctrl-C;
143 SIGTERM.
"""

import contextlib
import contextvars
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
from ep_moe.app.balance import BalancePlanConfig, RecordConfig, balance_plan, check_load, record
from ep_moe.app.chat import ChatConfig, chat
from ep_moe.app.doctor import EXPECTED, DoctorConfig, diagnose
from ep_moe.app.eval import EvalConfig, evaluate
from ep_moe.app.generate import GenerateConfig, generate
from ep_moe.app.help import COMMON, Command, Group
from ep_moe.app.interrupts import raise_on_interrupt
from ep_moe.app.options import config_of, options_of
from ep_moe.app.plan import PlanConfig, make_plan, show_plan
from ep_moe.app.quantize import quantize_model
from ep_moe.app.rebalancing import JobRebalanceConfig, RebalanceConfig
from ep_moe.app.run import RunConfig, run
from ep_moe.app.serve import ServeConfig, serve
from ep_moe.app.settings import COMMON_OPTIONS, USAGE_ERROR, VARIABLES, given_elsewhere, variable_of
from ep_moe.app.start import (
    SHIPPED_TEXT,
    is_first_rank,
    num_local_ranks,
    on_ranks,
    pick_device,
    speaks,
    start_logs,
)
from ep_moe.bench.configs import (
    BalanceBenchConfig,
    CallsBenchConfig,
    ExpertsBenchConfig,
    FormatsBenchConfig,
    LayerBenchConfig,
    ModelBenchConfig,
    MovingBenchConfig,
    ServeBenchConfig,
    TransportBenchConfig,
)
from ep_moe.config import EngineConfig
from ep_moe.environment import LaunchEnv
from ep_moe.fields import Field, described
from ep_moe.names import DTYPE_NAMES, EXPERTS_NAMES, PLACEMENT_NAMES, TRANSPORT_NAMES
from ep_moe.report.expected import expected_figures
from ep_moe.report.page import make_report
from ep_moe.report.records import Record, RowsFile, append_records, check_writable, flatten, now, read_records
from ep_moe.report.tables import show_rows
from ep_moe.tune.config import TuneConfig

app = typer.Typer(
    name="ep-moe",
    cls=Group,
    help="Run Mixture-of-Experts models expert-parallel: their experts spread over ranks.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": VARIABLES},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # which would take words in brackets for markup
)

bench_app = typer.Typer(
    cls=Group,
    help="Check results, then time them beside a baseline of the run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_RUNNING, _PREPARING, _MACHINE = "Run a model", "Prepare a model", "This machine"
app.add_typer(bench_app, name="bench", rich_help_panel=_MACHINE)
balance_app = typer.Typer(
    cls=Group,
    help="Spread the load of experts evenly over ranks.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(balance_app, name="balance", rich_help_panel=_PREPARING)

_ENGINE = EngineConfig()
_ON_RAY = ("ray", "nodes")
_ENGINE_PANEL = "Ranks and their experts"
_PANELS: dict[Any, str] = {
    RowsFile: "Rows of docs/benchmarks",
    RebalanceConfig: _ENGINE_PANEL,
    JobRebalanceConfig: _ENGINE_PANEL,
}
# loading and compiling may delay a rank
_BENCH_ENGINE = EngineConfig(dtype="bfloat16", scheme="none", timeout_secs=120.0)
_ONE_RANK = dataclasses.replace(_BENCH_ENGINE, nproc=1)
_OF_MODELS = ("model", "redundant_experts")  # no options of benchmarks of one layer
_OF_RANKS = (*_OF_MODELS, "nproc", "transport", "placement", "max_tokens_per_rank", *_ON_RAY)  # nor of one rank

# names of implementations, which the config does not know
_CHOICES = {"transport": ("auto", *TRANSPORT_NAMES), "experts": ("auto", *EXPERTS_NAMES)}
_NAMED = {
    name: dataclasses.replace(described(EngineConfig)[name][1], choices=choices) for name, choices in _CHOICES.items()
}
# "auto" takes a checkpoint's scheme and dtype, and benchmarks read none
_NO_CHECKPOINT = _NAMED | {
    "scheme": Field(help="Number format of experts and payload; `ep-moe formats` lists them", option="--quant"),
    "dtype": Field(help="Dtype of weights and activations", choices=DTYPE_NAMES),
    "placement": Field(help="Which rank owns which expert", choices=PLACEMENT_NAMES),
}


_JSON = inspect.Parameter(
    "as_json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.", rich_help_panel=COMMON)
    ],
)


_CONTEXT = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
_ELSEWHERE = contextvars.ContextVar[tuple[str, ...]]("_ELSEWHERE", default=())  # options that no argument has set


def _give_options(command: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """Make typer see these parameters, and those of every command, instead of the function's own."""
    parameters = [*parameters, *COMMON_OPTIONS]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def _plain(
    show: Callable[[dict[str, Any]], None], config_type: type[Any] | None = None
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Make a command without ranks of a function -> report: its own options, its config's, --json and the common ones.

    An error becomes one line on standard error and an exit code.
    """

    def decorate(function: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [each.replace(kind=keyword) for each in inspect.signature(function).parameters.values()]
        if config_type is not None:
            own = options_of(config_type)

        @functools.wraps(function)
        def command(*, as_json: bool, config_file: Path | None, log_level: str, **given: Any) -> None:
            del config_file
            with _one_line_errors():
                start_logs(log_level)
                result = function(**given) if config_type is None else function(config_of(config_type, given))
            _print(result, show, as_json)
            if not result.get("ok", True):
                raise typer.Exit(1)

        _give_options(command, [*own, _JSON])
        return command

    return decorate


def _job(
    show: Callable[[dict[str, Any]], None] | None,
    defaults: EngineConfig = _ENGINE,
    leave_out: Collection[str] = _ON_RAY,
    fields: Mapping[str, Field] = types.MappingProxyType(_NAMED),
) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Make a command of a function (engine, config, ...) -> report: its configs' options, the engine's, and --json.

    Args:
        show: prints the report; None for a command without one, which has no --json.
        defaults: those of the engine. leave_out: its fields without an option.
        fields: replace the help and limits of its fields.
    An error becomes one line on standard error and an exit code.
    """
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = options_of(
        EngineConfig, defaults, leave_out=(*leave_out, "log_level"), instead=fields, panel=_ENGINE_PANEL
    )

    def decorate(function: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        own: list[inspect.Parameter] = []
        configs: dict[str, type[Any]] = {}
        takes_file = False
        for parameter in list(inspect.signature(function).parameters.values())[1:]:
            if parameter.name == "config_file":
                takes_file = True
            elif isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation):
                configs[parameter.name] = parameter.annotation
                own += options_of(parameter.annotation, panel=_PANELS.get(parameter.annotation))
            else:
                own.append(parameter.replace(kind=keyword))

        @functools.wraps(function)
        def command(
            *, ctx: typer.Context, config_file: Path | None, log_level: str, as_json: bool = False, **given: Any
        ) -> None:
            _ELSEWHERE.set(tuple(given_elsewhere(ctx)))
            with _one_line_errors():
                chosen = {option.name: given.pop(option.name) for option in shared}
                engine = _engine(chosen | {"log_level": log_level}, defaults, fields)
                start_logs(log_level)
                if takes_file:
                    given["config_file"] = config_file
                made = {name: config_of(config_type, given) for name, config_type in configs.items()}
                result = function(engine, **made, **given)
            if show is not None and is_first_rank():
                _print(result, show, as_json)
            if not result.get("ok", True):
                raise typer.Exit(1)

        parameters = [*own, *shared, _CONTEXT]
        if show is not None:
            parameters.append(_JSON)
        _give_options(command, parameters)
        return command

    return decorate


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("ep-moe")
        except PackageNotFoundError:
            found = "of a source tree that is not installed"
        typer.echo(f"ep-moe {found}")
        raise typer.Exit


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


def _fail(error: object, code: int) -> NoReturn:
    if speaks():
        typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code) from None


def _engine(given: dict[str, Any], defaults: EngineConfig, fields: Mapping[str, Field]) -> EngineConfig:
    for name in given.keys() & fields.keys():
        fields[name].check(name, given[name])
    env = LaunchEnv.from_environ()
    if env is not None and given.get("nproc") not in (None, env.local_world_size):
        raise ValueError(
            f"nproc ({given['nproc']}) is not the number of ranks that run on this machine already "
            f"({env.local_world_size}, by RANK and LOCAL_WORLD_SIZE in the environment); leave it out"
        )
    return dataclasses.replace(defaults, **given)


def _print(result: dict[str, Any], show: Callable[[dict[str, Any]], None], as_json: bool) -> None:
    """Show a result, or print it as JSON; rows of a benchmark in the form that files have."""
    try:
        if not as_json:
            show(result)
            return
        if "bench" in result:
            result = result | {"rows": [flatten(result["bench"], row) for row in result["rows"]]}
        typer.echo(json.dumps(_for_json(result), allow_nan=False))
    except BrokenPipeError:  # who reads it has enough: typer ends in silence
        raise
    except OSError as error:
        with contextlib.suppress(OSError):  # else Python tries again to write it, at its end
            sys.stdout.close()
        _fail(f"standard output: {error}", 1)


def _for_json(value: Any) -> Any:
    """The value with None for NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _for_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_for_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@app.command("run", cls=Command, rich_help_panel=_RUNNING)
@_job(report.show_run, dataclasses.replace(_ENGINE, dtype="float32"), leave_out=())
def run_command(engine: EngineConfig, rebalance: JobRebalanceConfig, config_file: Path | None) -> dict[str, Any]:
    """Compare every token and logit of ranks with the whole model.

    Generates with the experts spread over ranks, between which they move once meanwhile. Every rank also loads the
    whole model for the comparison, by default in float32, in which both are almost equal. Table [run] of a --config
    file may also have the prompts and limits of configs/run.toml.
    """
    return run(engine, RunConfig.read(config_file), rebalance)


@app.command("generate", cls=Command, rich_help_panel=_RUNNING)
@_job(report.show_generate, leave_out=())
def generate_command(engine: EngineConfig, config: GenerateConfig, rebalance: RebalanceConfig) -> dict[str, Any]:
    """Continue prompts, which are spread over the ranks."""
    texts = tuple(sys.stdin.read() if prompt == "-" else prompt for prompt in config.prompts)
    return generate(engine, dataclasses.replace(config, prompts=texts), rebalance)


@app.command("eval", cls=Command, rich_help_panel=_RUNNING)
@_job(report.show_eval, leave_out=())
def eval_command(engine: EngineConfig, config: EvalConfig) -> dict[str, Any]:
    """Measure the loss on held-out text, beside the whole model.

    In nats per byte.
    """
    return evaluate(engine, config)


@app.command("serve", cls=Command, rich_help_panel=_RUNNING)
@_job(None, leave_out=())
def serve_command(engine: EngineConfig, config: ServeConfig, rebalance: RebalanceConfig) -> dict[str, Any]:
    """Serve a model by OpenAI's protocol, to many clients at once.

    Completions and chats. Needs ep-moe[serve].
    """
    return serve(engine, config, rebalance)


@app.command("chat", cls=Command, rich_help_panel=_RUNNING)
@_job(None)
def chat_command(engine: EngineConfig, config: ChatConfig) -> dict[str, Any]:
    """Chat with a running server, or with a model that is served meanwhile.

    Each line of standard input is a message.
    """
    raise_on_interrupt()
    return chat(engine, config)


@app.command("quantize", cls=Command, rich_help_panel=_PREPARING)
@_plain(report.show_quantize)
def quantize_command(
    scheme: Annotated[str, typer.Option(help="Number format of the experts' weights, of `ep-moe formats`.")],
    out: Annotated[Path, typer.Option(help="Directory to write, absent or empty.", metavar="DIR")],
    model: Annotated[
        str, typer.Option(help="An unquantized Hugging Face directory; empty is the shipped model.", metavar="DIR")
    ] = "",
) -> dict[str, Any]:
    """Write a model with quantized experts, as others publish them."""
    return quantize_model(model, scheme, str(out))


@app.command("plan", cls=Command, rich_help_panel=_PREPARING)
@_plain(show_plan, PlanConfig)
def plan_command(config: PlanConfig) -> dict[str, Any]:
    """Predict times and memory of MoE layers on many GPUs.

    Chooses EP size, copies of experts, transport and layout.
    """
    return make_plan(config)


@balance_app.command("record", cls=Command)
@_job(report.show_record)
def balance_record_command(engine: EngineConfig, config: RecordConfig) -> dict[str, Any]:
    """Record the load of experts to a file: of prompts, or of a running server.

    The file is what `ep-moe balance plan` and `ep-moe plan --load` read.
    """
    return record(engine, config)


@balance_app.command("plan", cls=Command)
@_plain(report.show_balance_plan, BalancePlanConfig)
def balance_plan_command(config: BalancePlanConfig) -> dict[str, Any]:
    """Plan which rank has which expert, and copies, for a recorded load.

    The file that it writes is a --placement of `ep-moe serve`, `generate`, `run` and `eval`.
    """
    return balance_plan(config)


@app.command("tune", cls=Command, rich_help_panel=_PREPARING)
@_job(report.show_tune, _ONE_RANK, (*_OF_RANKS, "layout", "timeout_secs"), _NO_CHECKPOINT)
def tune_command(engine: EngineConfig, config: TuneConfig) -> dict[str, Any]:
    """Find the fastest kernels of experts on this GPU.

    Checks and times backends and tiles, and writes the table of the fastest. An interrupted run goes on where it was.
    """
    _check_scheme(engine)
    config.moe(engine)
    try:
        from ep_moe.tune.run import tune  # imports Triton, which only Linux has
    except ImportError as error:
        raise RuntimeError(f"tune needs Triton, which is not installed: {error}") from None
    raise_on_interrupt()
    return tune(engine, config)


def _measure(target: str, engine: EngineConfig, config: Any, file: RowsFile) -> dict[str, Any]:
    """Run a benchmark on ranks; if `file` has a path and all results are right, append its rows to it.

    An unwritable file is refused before the run. Returns the report.
    """
    if file.append is None:
        return on_ranks(target, engine, config)
    if not file.sweep and _is_interpreted():
        raise ValueError("append under TRITON_INTERPRET needs --sweep: times of interpreted kernels are not benchmarks")
    if is_first_rank():
        check_writable(file.append, "append")
    report = on_ranks(target, engine, config)
    if report["ok"] and is_first_rank():
        common = {name: report[name] for name in ("bench", "gpu", "world_size", "versions")}
        common |= {
            "date": now(),
            "commit": file.commit,
            "command": _repeatable([*sys.argv[1:], *_ELSEWHERE.get()]),
            "sweep": file.sweep,
        }
        parts = ("shapes", "setup", "figures", "baselines")
        rows = [Record(**common, **{part: row[part] for part in parts}) for row in report["rows"]]
        try:
            append_records(file.append, rows)
        except OSError as error:
            lines = "\n".join(row.to_line() for row in rows)
            raise RuntimeError(
                f"append ({str(file.append)!r}) cannot be written: {error}; the rows are:\n{lines}"
            ) from None
    return report


def _is_interpreted() -> bool:
    """True if Triton's kernels run in its interpreter; only Linux has Triton."""
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


def _check_scheme(engine: EngineConfig) -> None:
    """Refuse the scheme "auto", which needs a checkpoint."""
    from ep_moe.quant import get_scheme

    get_scheme(engine.scheme)


def _on_cpu(engine: EngineConfig) -> bool:
    """True if this machine's ranks compute on its CPU."""
    return pick_device(engine) == "cpu"


def _num_ranks(engine: EngineConfig) -> int:
    """The number of ranks of all machines."""
    env = LaunchEnv.from_environ()
    return num_local_ranks(engine) if env is None else env.world_size


def _repeatable(arguments: list[str]) -> str:
    """The command line without options that only direct its output; under torchrun preceded by torchrun's own."""
    num_values = {"--append": 1, "--commit": 1, "--trace": 1, "--sweep": 0, "--json": 0}  # options to leave out
    num_values |= {"--config": 1, "--log-level": 1}  # options of the file follow
    kept, skip = ["ep-moe"], 0
    env = LaunchEnv.from_environ()
    if env is not None:
        nodes, local = env.world_size // env.local_world_size, env.local_world_size
        kept = ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(local), "-m", "ep_moe"]
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if skip:
            skip -= 1
        elif name in num_values:
            skip = 0 if equals else num_values[name]
        else:
            kept.append(argument)
    return shlex.join(kept)


@bench_app.command("layer", cls=Command)
@_job(show_rows, _BENCH_ENGINE, (*_OF_MODELS, "max_tokens_per_rank", *_ON_RAY), _NO_CHECKPOINT)
def bench_layer_command(engine: EngineConfig, config: LayerBenchConfig, file: RowsFile) -> dict[str, Any]:
    """Check and time one MoE layer, beside NCCL's collectives.

    The baseline is all-gather and reduce-scatter with the same experts.
    """
    _check_scheme(engine)
    config.moe(engine)  # sizes that do not fit raise before ranks start
    if config.graph and _on_cpu(engine):
        kind = ValueError if engine.device == "cpu" else RuntimeError
        raise kind("graph: a CUDA graph needs a GPU for each rank, these ranks compute on the CPU")
    if config.trace is not None:
        trace = config.trace.absolute()  # ranks may have another working directory
        config = dataclasses.replace(config, trace=trace)
        if is_first_rank():
            check_writable(trace, "trace")
    return _measure("ep_moe.bench.layer:layer_rank_main", engine, config, file)


@bench_app.command("transport", cls=Command)
@_job(
    show_rows,
    _BENCH_ENGINE,
    (*_OF_MODELS, "scheme", "transport", "experts", "placement", "layout", "max_tokens_per_rank", *_ON_RAY),
    _NO_CHECKPOINT,
)
def bench_transport_command(engine: EngineConfig, config: TransportBenchConfig, file: RowsFile) -> dict[str, Any]:
    """Check and time dispatch and combine, beside NCCL's collectives.

    On a CPU they are checked alone.
    """
    config.check_ranks(_num_ranks(engine))
    if file.append is not None and not file.sweep and _on_cpu(engine):
        raise ValueError("append on a CPU needs --sweep: nothing is timed there")
    return _measure("ep_moe.bench.transport:transport_rank_main", engine, config, file)


@bench_app.command("balance", cls=Command)
@_job(
    report.show_bench_balance,
    _BENCH_ENGINE,
    (*_OF_MODELS, "scheme", "placement", "max_tokens_per_rank", *_ON_RAY),
    _NO_CHECKPOINT,
)
def bench_balance_command(engine: EngineConfig, config: BalanceBenchConfig, file: RowsFile) -> dict[str, Any]:
    """Check and time a layer whose experts are placed for their load.

    Beside the same load on experts in order, and an even load.
    """
    load = None if config.load is None else config.load.absolute()  # ranks may have another working directory
    config = dataclasses.replace(config, load=load)
    if load is not None:
        check_load(load)
    if config.plot is not None and is_first_rank():
        check_writable(config.plot, "plot")
    made = _measure("ep_moe.bench.balance:balance_rank_main", engine, config, file)
    if config.plot is not None and is_first_rank():
        report.draw_bench_loads(config.plot, made)
    return made


@bench_app.command("moving", cls=Command)
@_job(show_rows, _BENCH_ENGINE, (*_OF_MODELS, "placement", "max_tokens_per_rank", *_ON_RAY), _NO_CHECKPOINT)
def bench_moving_command(engine: EngineConfig, config: MovingBenchConfig, file: RowsFile) -> dict[str, Any]:
    """Check and time decode-like steps while experts move.

    Beside the same steps without.
    """
    _check_scheme(engine)
    if _num_ranks(engine) == 1:
        raise ValueError("nproc (1): experts move between 2 ranks or more")
    return _measure("ep_moe.bench.moving:moving_rank_main", engine, config, file)


@bench_app.command("model", cls=Command)
@_job(show_rows, _BENCH_ENGINE, (*_OF_MODELS, "scheme", "max_tokens_per_rank", *_ON_RAY), _NO_CHECKPOINT)
def bench_model_command(engine: EngineConfig, config: ModelBenchConfig, file: RowsFile) -> dict[str, Any]:
    """Check and time a random model, beside transformers' own EP."""
    config.check_ranks(_num_ranks(engine))
    return _measure("ep_moe.bench.model:model_rank_main", engine, config, file)


@bench_app.command("experts", cls=Command)
@_job(show_rows, _ONE_RANK, _OF_RANKS, _NO_CHECKPOINT)
def bench_experts_command(engine: EngineConfig, config: ExpertsBenchConfig, file: RowsFile) -> dict[str, Any]:
    """Check and time one rank's experts, beside torch's grouped GEMM."""
    _check_scheme(engine)
    return _measure("ep_moe.bench.experts_alone:experts_rank_main", engine, config, file)


@bench_app.command("formats", cls=Command)
@_job(show_rows, _ONE_RANK, (*_OF_RANKS, "scheme"), _NO_CHECKPOINT)
def bench_formats_command(engine: EngineConfig, config: FormatsBenchConfig, file: RowsFile) -> dict[str, Any]:
    """Check and time one rank's experts in all number formats.

    As `bench experts` for each of them, beside torch's grouped GEMM.
    """
    return _measure("ep_moe.bench.experts_alone:experts_rank_main", engine, config, file)


@bench_app.command("calls", cls=Command)
@_job(show_rows, _ONE_RANK, (*_OF_RANKS, "scheme", "dtype", "experts", "layout"), _NO_CHECKPOINT)
def bench_calls_command(engine: EngineConfig, config: CallsBenchConfig, file: RowsFile) -> dict[str, Any]:
    """Check and time the calls of other libraries, beside torch."""
    return _measure("ep_moe.bench.calls:calls_rank_main", engine, config, file)


@bench_app.command("serve", cls=Command)
@_plain(report.show_bench_serve, ServeBenchConfig)
def bench_serve_command(config: ServeBenchConfig) -> dict[str, Any]:
    """Measure a server of OpenAI's protocol by its clients.

    Times to the first text and per token, and throughput. Needs ep-moe[bench]. A key is read from EP_MOE_API_KEY or
    OPENAI_API_KEY.
    """
    config = dataclasses.replace(config, text=config.text or str(SHIPPED_TEXT))
    if config.plot is not None:
        check_writable(config.plot, "plot")
    try:
        from ep_moe.bench.serve import bench_serve, plot_serve
    except ImportError as error:
        raise RuntimeError(f"bench serve needs openai; install: pip install 'ep-moe[bench]' ({error})") from None
    raise_on_interrupt()
    result = bench_serve(config)
    if config.plot is not None:
        plot_serve(result, config.plot)
    return result


@bench_app.command("report", cls=Command)
@_plain(report.show_paths)
def bench_report_command(
    directory: Annotated[
        Path, typer.Option("--dir", help="Holds the .jsonl files, methods/ and topics/.", metavar="DIR")
    ] = Path("docs/benchmarks"),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 if the page differs.")] = False,
    plots: Annotated[bool, typer.Option(help="Draw the plots; needs matplotlib.")] = True,
) -> dict[str, Any]:
    """Make BENCHMARKS.md, its plots and the pages of results from the measured rows."""
    made = make_report(directory, check=check, plots=plots and not check)
    if not made["ok"]:
        raise RuntimeError(
            f"{made['page']} differs from the page made from the rows; write it with: ep-moe bench report"
        )
    return made


@bench_app.command("expected", cls=Command)
@_plain(report.show_paths)
def bench_expected_command(
    directory: Annotated[Path, typer.Option("--dir", help="Holds the .jsonl files.", metavar="DIR")] = Path(
        "docs/benchmarks"
    ),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 if the file differs.")] = False,
) -> dict[str, Any]:
    """Make the figures that `ep-moe doctor` expects from the measured rows."""
    text = json.dumps(expected_figures(read_records(directory)), indent=1) + "\n"
    same = EXPECTED.is_file() and EXPECTED.read_text() == text
    if check and not same:
        raise RuntimeError(f"{EXPECTED} differs from the rows; write it with: ep-moe bench expected")
    if not same:
        EXPECTED.write_text(text)
    return {"ok": True, "page": str(EXPECTED), "written": [] if same else [str(EXPECTED)]}


@app.command("doctor", cls=Command, rich_help_panel=_MACHINE)
@_plain(report.show_findings, DoctorConfig)
def doctor_command(config: DoctorConfig) -> dict[str, Any]:
    """Tell what this machine can do, and what mends it.

    On GPUs an exchange and GEMMs are timed too, and compared with docs/benchmarks. Exit code 1 if a line has failed.
    """
    raise_on_interrupt()
    return diagnose(config)


@app.command("formats", cls=Command, rich_help_panel=_PREPARING)
@_plain(report.show_formats)
def formats_command() -> dict[str, Any]:
    """List the number formats of experts and tokens, for --quant."""
    from ep_moe.app.formats import list_formats  # imports torch

    return list_formats()


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Show the version and exit.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    del version


def main() -> None:
    """Run the command line; a wrong argument is one line. Ends the process."""
    try:
        code = app(prog_name="ep-moe", standalone_mode=False)
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
        elif speaks():
            message = " ".join(error.format_message().split()).removesuffix(".")
            variable = variable_of(error)
            message += f" (variable {variable})" if variable else ""
            typer.echo(f"error: {message}; see {error.ctx.command_path} --help", err=True)
        code = 2
    sys.exit(code)
