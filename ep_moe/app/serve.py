"""`ep-moe serve`: an OpenAI-compatible server; rank 0 speaks HTTP, the others follow every generation in step."""

import dataclasses
import importlib.util
import socket
from pathlib import Path
from typing import Annotated, Any

from ep_moe.app.start import on_ranks, open_model
from ep_moe.config import EngineConfig
from ep_moe.environment import LaunchEnv
from ep_moe.fields import Field, check_fields

_NEEDED = ("fastapi", "jinja2", "prometheus_client", "uvicorn")  # of the extra `serve`
MOST_PASSES = 16  # of a plan: tokens of so many passes are kept on the device


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Address and sizes of `ep-moe serve`.

    A prompt has at most `max_tokens_per_rank` tokens. Keys and values are reserved for `max_rows` sequences of
    `max_positions` tokens on each rank.
    """

    host: Annotated[str, Field(help="Address to listen at; 0.0.0.0 is every interface of this machine")] = "127.0.0.1"
    port: Annotated[int, Field(help="Port to listen at; 0 picks a free one", at_least=0)] = 8000
    name: Annotated[str, Field(help="Name of the model for clients; by default that of its directory")] = ""
    max_rows: Annotated[int, Field(help="Most sequences that a rank generates at once", at_least=1)] = 16
    max_positions: Annotated[
        int | None,
        Field(help="Most tokens of a prompt and its continuation; by default the model's own limit, up to 4096"),
    ] = None
    max_waiting: Annotated[int, Field(help="Most sequences that wait for a free row", at_least=1)] = 256
    passes_per_plan: Annotated[
        int, Field(help=f"Decode passes, up to {MOST_PASSES}, between two looks at the queue", at_least=1)
    ] = 4
    decode_graphs: Annotated[
        bool | None,
        Field(help="Decode by CUDA graphs, by default on GPUs with transport nvlink or local; a log line says if not"),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.port > 65535:
            raise ValueError(f"port ({self.port}) must be at most 65535")
        if self.passes_per_plan > MOST_PASSES:
            raise ValueError(f"passes_per_plan ({self.passes_per_plan}) must be at most {MOST_PASSES}")
        if self.max_positions is not None and self.max_positions < 2:
            raise ValueError(f"max_positions ({self.max_positions}) must be at least 2")

    def name_of(self, engine: EngineConfig) -> str:
        """The model's name for clients."""
        return self.name or (Path(engine.model).resolve().name if engine.model else "ep-moe")


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address, which does not listen yet. Errors: RuntimeError names the address. Local."""
    try:
        [(family, kind, number, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, number)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise RuntimeError(f"host ({host!r}) and port ({port}) cannot be listened at: {error}") from None
    return listener


def serve(engine: EngineConfig, config: ServeConfig) -> dict[str, Any]:
    """Serve until a signal or an error ends it.

    Errors: ValueError for an unreadable model directory and RuntimeError for missing packages or a port in use, before
    ranks start; RankFailedError names a lost rank.
    """
    open_model(engine)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"ep-moe serve needs {', '.join(missing)}; install: pip install 'ep-moe[serve]'")
    if LaunchEnv.from_environ() is None:
        bind(config.host, config.port).close()  # rank 0 binds for itself; this error comes before the model is loaded
    return on_ranks("ep_moe.app.serve_rank:serve_rank_main", engine, config)
