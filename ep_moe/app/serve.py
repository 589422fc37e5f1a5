"""`ep-moe serve`: an OpenAI-compatible server; a process of its own speaks HTTP, the ranks carry out its plans."""

import contextlib
import dataclasses
import importlib.util
import multiprocessing
import os
import pkgutil
import signal
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

from ep_moe import logs
from ep_moe.app.check import check_model
from ep_moe.app.rebalancing import RebalanceConfig
from ep_moe.app.start import PRELOAD, on_ranks, pick_device
from ep_moe.config import EngineConfig
from ep_moe.environment import LaunchEnv, admin_key, server_key
from ep_moe.fields import Field, check_fields

_NEEDED = ("fastapi", "jinja2", "prometheus_client", "uvicorn")  # of the extra `serve`
DRAINED = 143  # exit code of that process after SIGTERM
FAREWELL_SECS = 4.0  # in which the process that speaks HTTP tells its clients why the server has ended
MOST_PASSES = 16  # of a plan: tokens of so many passes are kept on the device


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Address and sizes of `ep-moe serve`.

    Keys and values are reserved for `max_rows` sequences of `max_positions` tokens on each rank, and for as many more
    tokens of prefixes as `prefix_rows` sequences have.
    """

    host: Annotated[str, Field(help="Address to listen at; 0.0.0.0 is all")] = "127.0.0.1"
    port: Annotated[int, Field(help="Port to listen at; 0 picks a free one", at_least=0)] = 8000
    name: Annotated[str, Field(help="Name for clients; by default that of its directory")] = ""
    max_rows: Annotated[int, Field(help="Most sequences that a rank generates at once", at_least=1)] = 16
    max_positions: Annotated[
        int | None,
        Field(help="Most tokens of a prompt and its continuation; by default the model's own limit, up to 4096"),
    ] = None
    prefix_rows: Annotated[
        int,
        Field(help="Memory of so many more sequences on each rank keeps prefixes of prompts; 0 keeps none", at_least=0),
    ] = 4
    max_waiting: Annotated[int, Field(help="Most sequences that wait for a free row", at_least=1)] = 256
    passes_per_plan: Annotated[
        int, Field(help=f"Decode passes, up to {MOST_PASSES}, per scheduling step", at_least=1)
    ] = 4
    decode_graphs: Annotated[
        bool | None,
        Field(help="Decode by CUDA graphs, by default on GPUs where the transport allows it; a log line tells why not"),
    ] = None

    restarts: Annotated[int, Field(help="Times that a dead rank is started again", at_least=0)] = 3
    drain_secs: Annotated[
        float,
        Field(help="Seconds for requests to end on SIGTERM", at_least=0),
    ] = 10.0
    api_keys: Annotated[
        str,
        Field(help="Keys in a file, or EP_MOE_API_KEY; else all may ask"),
    ] = ""
    admin_keys: Annotated[
        str,
        Field(help="File of keys for /admin/ranks, or EP_MOE_ADMIN_KEY"),
    ] = ""
    allowed_origins: Annotated[str, Field(help="Origins (a,b) of pages that may ask; * for all")] = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.port > 65535:
            raise ValueError(f"port ({self.port}) must be at most 65535")
        if self.passes_per_plan > MOST_PASSES:
            raise ValueError(f"passes_per_plan ({self.passes_per_plan}) must be at most {MOST_PASSES}")
        if self.max_positions is not None and self.max_positions < 2:
            raise ValueError(f"max_positions ({self.max_positions}) must be at least 2")

    def read_keys(self) -> tuple[str, ...]:
        """The keys of clients, () if there are none. Errors: ValueError for a file without keys, or unreadable."""
        return _keys(server_key(), self.api_keys, "api_keys")

    def read_admin_keys(self) -> tuple[str, ...]:
        """The keys of administrators, as `read_keys`."""
        return _keys(admin_key(), self.admin_keys, "admin_keys")

    @property
    def origins(self) -> tuple[str, ...]:
        """The allowed origins."""
        return tuple(origin.strip() for origin in self.allowed_origins.split(",") if origin.strip())

    def name_of(self, engine: EngineConfig) -> str:
        """The model's name for clients."""
        return self.name or (Path(engine.model).resolve().name if engine.model else "ep-moe")


def _keys(of_environment: str, file: str, option: str) -> tuple[str, ...]:
    keys = [of_environment] if of_environment else []
    if file:
        try:
            found = [line.strip() for line in Path(file).read_text().splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise ValueError(f"{option} ({file!r}) cannot be read: {error}") from None
        if not found:
            raise ValueError(f"{option} ({file!r}) has no keys")
        keys += found
    return tuple(keys)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens at an address. Errors: RuntimeError names the address. Local."""
    try:
        [(family, kind, number, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()  # at once: until one listens, several can bind the same port
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise RuntimeError(f"host ({host!r}) and port ({port}) cannot be listened at: {error}") from None
    return listener


def serve(engine: EngineConfig, config: ServeConfig, rebalance: RebalanceConfig | None = None) -> dict[str, Any]:
    """Serve until a signal or an error ends it.

    The process that speaks HTTP starts before the ranks; under torchrun, which starts them, rank 0 starts it.
    SIGTERM to the launcher of the ranks drains the server first.
    Errors: ValueError for an unreadable model directory or file of keys and RuntimeError for missing packages or a port
    in use, before ranks start; RankFailedError names a lost rank.
    """
    check_model(engine)
    config.read_keys()
    config.read_admin_keys()
    rebalance = rebalance or RebalanceConfig()
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"ep-moe serve needs {', '.join(missing)}; install: pip install 'ep-moe[serve]'")
    target = "ep_moe.app.serve_rank:serve_rank_main"
    if LaunchEnv.from_environ() is not None:
        return on_ranks(target, engine, config, rebalance)
    from ep_moe.launch import Front, RankFailedError, start_server  # which imports torch
    from ep_moe.launch.signals import ending_of, first_sigterm

    start_server(PRELOAD if engine.ray or pick_device(engine) == "cpu" else ())
    with front_end(bind(config.host, config.port), engine, config, "forkserver") as (connection, process):
        asked: list[bool] = []

        def drain() -> None:
            asked.append(True)
            process.terminate()

        try:
            with first_sigterm(drain):
                on_ranks(
                    target,
                    engine,
                    config,
                    rebalance,
                    True,
                    front=Front(connection=connection, restarts=config.restarts),
                )
        except RankFailedError:
            if asked:  # the ranks had the signal too, as some service managers send it
                raise SystemExit(128 + signal.SIGTERM) from None
            raise
        process.join(FAREWELL_SECS)
    if process.exitcode == DRAINED:
        raise SystemExit(128 + signal.SIGTERM)
    code = process.exitcode
    how = "has not ended" if code is None else ending_of(code)
    raise RuntimeError(f"the process that speaks HTTP {how}; an error of its own is on stderr")


@contextlib.contextmanager
def front_end(
    listener: socket.socket, engine: EngineConfig, config: ServeConfig, start: str
) -> Iterator[tuple[Connection, Any]]:
    """Run the process that speaks HTTP while the block runs; yields this end of its connection, and the process.

    If the block raises, requests are answered with its error for a moment longer.

    Args:
        listener: of `bind`; the process takes it over. start: "forkserver", or "spawn" in a process that has threads.
    """
    context = multiprocessing.get_context(start)
    ours, theirs = context.Pipe()
    stderr = Connection(os.dup(2), readable=False)  # the fork server has the stderr of its own start
    process: Any = context.Process(  # type: ignore[attr-defined]
        target=_front_end_main, args=(stderr, listener, theirs, engine, config), name="ep_moe-http", daemon=True
    )
    process.start()
    for each in (stderr, listener, theirs):
        each.close()
    try:
        yield ours, process
    except Exception as error:
        with contextlib.suppress(OSError):  # it has ended
            ours.send(str(error))
        ours.close()
        process.join(FAREWELL_SECS)
        raise
    finally:
        ours.close()
        process.kill()
        process.join()


def _front_end_main(stderr: Connection, listener: socket.socket, starter: Connection, engine: Any, config: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends this process
    os.dup2(stderr.fileno(), 2)
    logs.configure(engine.log_level, "http")
    pkgutil.resolve_name("ep_moe.app.serve_rank:serve_front_main")(listener, starter, engine, config)
