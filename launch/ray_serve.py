"""A Ray Serve deployment of the server: its replica starts the ranks on the cluster, and passes requests on to them.

    pip install 'ep-moe[ray,serve]' 'ray[serve]'
    serve run launch.ray_serve:build nodes=1 nproc=2 model=DIR

run from the root of the repository; `curl http://127.0.0.1:8000/v1/completions ...` then reaches the model, with
streams passed through. Arguments: `nodes` and any field of `EngineConfig`, `ServeConfig` and `RebalanceConfig`. A lost
rank is started again, as by `ep-moe serve`. The end of the server fails the health check; Serve then replaces the
replica, which starts all ranks anew.
"""

import contextlib
import threading
import time
import types
import typing
import urllib.request
from typing import Any

import aiohttp
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from ep_moe.app.rebalancing import RebalanceConfig
from ep_moe.app.serve import ServeConfig, bind, front_end
from ep_moe.app.start import nodes_of
from ep_moe.config import EngineConfig
from ep_moe.fields import described
from ep_moe.launch import Front
from ep_moe.launch.on_ray import RayRanks

START_SECS = 900.0
END_SECS = 15.0  # of a replica, shorter than Serve's own limit
HOP_HEADERS = {"host", "content-length", "connection", "transfer-encoding"}


@serve.deployment(max_ongoing_requests=1000, health_check_period_s=2.0, ray_actor_options={"num_cpus": 0})
class Server:
    """One server: the process that speaks HTTP, a child of the replica, and the ranks."""

    def __init__(self, engine: EngineConfig, config: ServeConfig, rebalance: RebalanceConfig) -> None:
        self._error: BaseException | None = None
        listener = bind(config.host, config.port)
        self._url = f"http://{config.host}:{listener.getsockname()[1]}"
        self._front: Any = None
        run = threading.Thread(target=self._run, args=(listener, engine, config, rebalance), name="ep_moe-ranks")
        run.daemon = True
        run.start()
        self._running = run
        self._wait_until_it_answers()
        self._session: aiohttp.ClientSession | None = None

    def _run(self, listener: Any, engine: EngineConfig, config: ServeConfig, rebalance: RebalanceConfig) -> None:
        """Run the server until it ends."""
        target = "ep_moe.app.serve_rank:serve_rank_main"
        try:
            with front_end(listener, engine, config, "spawn") as (connection, self._front):
                front = Front(connection=connection, restarts=config.restarts)
                with contextlib.closing(RayRanks(nodes_of(engine), engine.group, front=front)) as ranks:
                    ranks.start(target, engine, config, rebalance, True)
                    ranks.collect()
            self._error = RuntimeError("the server has ended")
        except BaseException as error:  # noqa: BLE001 - the health check raises it
            self._error = error

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + START_SECS
        while time.monotonic() < deadline:
            self.check_health()
            try:
                urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
                return
            except OSError:  # not yet
                time.sleep(0.2)
        raise RuntimeError(f"the server at {self._url} does not answer after {START_SECS:g} s")

    def check_health(self) -> None:
        """Raise the error that has ended the server, if any."""
        if self._error is not None:
            raise RuntimeError(str(self._error))

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on, and its answer back as it comes."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        url = f"{self._url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        answer = await self._session.request(request.method, url, headers=headers, data=await request.body())

        async def body() -> Any:
            try:
                async for chunk in answer.content.iter_any():
                    yield chunk
            finally:
                answer.close()  # a client that goes away frees its row

        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS}
        return StreamingResponse(body(), status_code=answer.status, headers=kept)

    def __del__(self) -> None:
        front = getattr(self, "_front", None)
        if front is not None:
            front.terminate()  # it ends the ranks in order
            self._running.join(END_SECS)


def build(arguments: dict[str, str]) -> serve.Application:
    """The application for `serve run`; arguments are fields of the configs, as text.

    Errors: ValueError names a field that is unknown or wrong.
    """
    given: dict[str, Any] = {"ray": "auto", "port": 0, **arguments}
    engine = _config_of(EngineConfig, given)
    config, rebalance = _config_of(ServeConfig, given), _config_of(RebalanceConfig, given)
    if given:
        raise ValueError(f"{', '.join(given)}: no such field of EngineConfig, ServeConfig or RebalanceConfig")
    return Server.bind(engine, config, rebalance)


def _config_of(config_type: type[Any], given: dict[str, Any]) -> Any:
    """A config of those texts that are fields of it, which are removed from `given`."""
    known = {name: wanted for name, (wanted, _) in described(config_type).items() if name in given}
    return config_type(**{name: _value(given.pop(name), wanted) for name, wanted in known.items()})


def _value(text: Any, wanted: Any) -> Any:
    kinds = [kind for kind in typing.get_args(wanted) or (wanted,) if kind is not types.NoneType]
    if not isinstance(text, str) or str in kinds:
        return text
    return text == "true" if bool in kinds else kinds[0](text)
