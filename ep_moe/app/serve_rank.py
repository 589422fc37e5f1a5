"""Worker entry point of `ep-moe serve`: rank 0 runs the queue and the HTTP server, the others follow its plans."""

import logging
import sys
from typing import Any

from ep_moe.app.serve import ServeConfig, bind
from ep_moe.app.session import Model, load_expert_parallel, load_tokenizer
from ep_moe.app.start import model_dir
from ep_moe.config import EngineConfig
from ep_moe.engines.transformers.decoding import RowDecoder, end_ids_of, why_no_graphs, why_not_fixed
from ep_moe.group import EPGroup
from ep_moe.serving.core import Leader, follow
from ep_moe.serving.scheduler import Limits

MOST_POSITIONS = 4096  # by default: their keys and values are reserved for every row

_log = logging.getLogger(__name__)


def serve_rank_main(group: EPGroup, engine: EngineConfig, config: ServeConfig) -> dict[str, Any]:
    """One rank's part of the server; returns only under a front end that closes it. Collective."""
    listener = bind(config.host, config.port) if group.rank == 0 else None
    tokenizer = load_tokenizer(engine)
    if group.rank == 0:
        sys.stderr.write(f"loading {model_dir(engine)}\n")
    with group.guard("load"):
        model, session = load_expert_parallel(group, engine)
    reason = why_not_fixed(model)
    if reason:
        raise ValueError(f"{model_dir(engine)} cannot be served: {reason}")
    num_positions = _num_positions(model, config)
    with group.guard("warm up"):
        rows = RowDecoder(
            model,
            num_rows=config.max_rows,
            num_positions=num_positions,
            end_ids=end_ids_of(model),
            graphs=_graphs(model, config),
        )
    if listener is None:
        follow(group, rows)
        session.destroy()
        return {}
    from ep_moe.serving.http import Service, create_app, run_beside  # packages that only rank 0 needs
    from ep_moe.serving.metrics import Metrics

    limits = Limits(
        num_ranks=group.num_ranks,
        num_rows=config.max_rows,
        num_positions=num_positions,
        max_prompt_tokens=session.transport.config.max_tokens_per_rank,
        max_waiting=config.max_waiting,
        passes_per_plan=config.passes_per_plan,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        end_ids=end_ids_of(model),
    )
    leader = Leader(group, rows, limits)
    metrics = Metrics(leader)
    app = create_app(Service(leader=leader, tokenizer=tokenizer, name=config.name_of(engine), metrics=metrics))
    with run_beside(app, listener, leader.close):
        host, port = listener.getsockname()[:2]
        sys.stderr.write(
            f"serving {config.name_of(engine)} at http://{f'[{host}]' if ':' in host else host}:{port}/v1: "
            f"{group.num_ranks} ranks of {config.max_rows} rows, {num_positions} positions\n"
        )
        leader.run()
    session.destroy()
    return {}


def _num_positions(model: Model, config: ServeConfig) -> int:
    """The most positions of a sequence. Errors: ValueError for more than the model has."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    wanted = config.max_positions
    if wanted is None:
        return min(limit or MOST_POSITIONS, MOST_POSITIONS)
    if limit is not None and wanted > limit:
        raise ValueError(f"max_positions ({wanted}) exceeds the model's max_position_embeddings ({limit})")
    return wanted


def _graphs(model: Model, config: ServeConfig) -> bool:
    """Whether decode passes are captured; a log line says why they cannot be."""
    reason, group = why_no_graphs(model), model.ep_moe.group
    if reason and config.decode_graphs is not False and group.rank == 0:
        wanted = config.decode_graphs or group.device.type == "cuda"
        _log.log(logging.WARNING if wanted else logging.INFO, "decoding runs without CUDA graphs: %s", reason)
    return not reason and config.decode_graphs is not False
