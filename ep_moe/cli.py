"""The command line: ep-moe run | generate | eval. Results go to standard output, progress and errors to standard error.

Exit codes: 0 all is well; 1 the job failed or `run` found a difference; 2 a wrong argument; 130 Ctrl-C; 143 SIGTERM.
"""

import dataclasses
import functools
import inspect
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ep_moe.app import report
from ep_moe.app.eval import EvalConfig, evaluate
from ep_moe.app.generate import GenerateConfig, generate
from ep_moe.app.run import RunConfig, run
from ep_moe.app.session import is_first_rank
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

_ENGINE, _EVAL, _GENERATE = EngineConfig(), EvalConfig(), GenerateConfig(prompts=("-",))  # they hold the defaults

_NAMES: dict[str, tuple[str, ...]] = {
    "transport": ("auto", *TRANSPORTS),
    "experts": ("auto", *EXPERTS),
    "placement": tuple(PLACEMENTS),
}

_ENGINE_OPTIONS: dict[str, Any] = {
    "model": Annotated[str, typer.Option(help="A Hugging Face directory; empty is the model that ships with ep-moe.")],
    "nproc": Annotated[
        int | None,
        typer.Option(help=f"Ranks to start on this machine, {_ENGINE.nproc} if not given; torchrun starts its own."),
    ],
    "device": Annotated[str, typer.Option(help="auto, cpu or cuda; auto is cuda where every rank has its own GPU.")],
    "dtype": Annotated[str, typer.Option(help=f"Of weights and activations: {', '.join(DTYPES)}.")],
    "scheme": Annotated[str, typer.Option("--quant", help=f"Quantise experts and payload: {', '.join(SCHEMES)}.")],
    "transport": Annotated[str, typer.Option(help=f"{', '.join(_NAMES['transport'])}.")],
    "experts": Annotated[str, typer.Option(help=f"{', '.join(_NAMES['experts'])}.")],
    "placement": Annotated[str, typer.Option(help=f"{', '.join(_NAMES['placement'])}.")],
    "layout": Annotated[Layout, typer.Option(help="How tokens lie in memory for the experts.")],
    "max_tokens_per_rank": Annotated[int, typer.Option(help="Most tokens that a rank brings to one forward pass.")],
    "timeout_secs": Annotated[float, typer.Option(help="How long a rank waits for another before naming it lost.")],
}


def _job(show: Callable[[dict[str, Any]], None]) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., None]]:
    """Make a command of a function (engine, ...) -> report: add the engine's options and --json, print the report.

    What goes wrong becomes one line on standard error and an exit code.
    """

    def decorate(function: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*, as_json: bool, **options: Any) -> None:
            try:
                engine = _engine({name: options.pop(name) for name in _ENGINE_OPTIONS})
                result = function(engine, **options)
            except ValueError as error:
                _fail(error, 2)
            except (RuntimeError, OSError) as error:
                _fail(error, 1)
            except KeyboardInterrupt:
                typer.echo("interrupted", err=True)
                raise typer.Exit(130) from None
            if is_first_rank():
                if as_json:
                    typer.echo(json.dumps(_for_json(result), allow_nan=False))
                else:
                    show(result)
            if not result.get("ok", True):
                raise typer.Exit(1)

        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [p.replace(kind=keyword) for p in list(inspect.signature(function).parameters.values())[1:]]
        defaults = dataclasses.asdict(_ENGINE) | {"nproc": None}  # None: not given
        shared = [
            inspect.Parameter(name, keyword, default=defaults[name], annotation=annotation)
            for name, annotation in _ENGINE_OPTIONS.items()
        ]
        json_option = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
        parameters = [*own, *shared, inspect.Parameter("as_json", keyword, default=False, annotation=json_option)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _engine(options: dict[str, Any]) -> EngineConfig:
    for name, known in _NAMES.items():
        if options[name] not in known:
            raise ValueError(f"{name} ({options[name]!r}) is not one of {', '.join(known)}")
    get_scheme(options["scheme"])
    if options["nproc"] is None:
        return EngineConfig(**options | {"nproc": _ENGINE.nproc})
    env = LaunchEnv.from_environ()
    if env is not None and env.local_world_size != options["nproc"]:
        raise ValueError(
            f"nproc ({options['nproc']}) is not the number of ranks that are on this machine already "
            f"({env.local_world_size}, by RANK and LOCAL_WORLD_SIZE in the environment); leave it out"
        )
    return EngineConfig(**options)


def _for_json(value: Any) -> Any:
    """The value with None for numbers that JSON does not have: NaN and the infinities."""
    if isinstance(value, dict):
        return {key: _for_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_for_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
    max_new_tokens: Annotated[int, typer.Option(help="For each prompt.")] = _GENERATE.max_new_tokens,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = _GENERATE.temperature,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this mass.")] = _GENERATE.top_p,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = _GENERATE.seed,
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
    max_bytes: Annotated[int, typer.Option(help="Use no more of the text; 0 uses all.")] = _EVAL.max_bytes,
    window: Annotated[int, typer.Option(help="Tokens that the model sees at once.")] = _EVAL.window,
    batch: Annotated[int, typer.Option(help="Windows in one forward pass.")] = _EVAL.batch,
    whole: Annotated[bool, typer.Option(help="Evaluate the whole model beside it.")] = _EVAL.whole,
) -> dict[str, Any]:
    """Measure the loss on held-out text in nats per byte, expert-parallel beside the whole model."""
    return evaluate(engine, EvalConfig(text=text, max_bytes=max_bytes, window=window, batch=batch, whole=whole))


def main() -> None:
    """Entry point of the `ep-moe` command."""
    app()
