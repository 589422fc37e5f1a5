"""Text generation with a model whose experts are spread over ranks: by passes of fixed shapes, captured as CUDA graphs
where that is possible; models that have no such pass generate by transformers' own loop."""

import logging
from collections.abc import Callable

import torch

from ep_moe.engines.transformers.architectures import KEPT_IN_STEP
from ep_moe.engines.transformers.decoding.decoder import Decoder, decode_transport
from ep_moe.engines.transformers.decoding.fixed_cache import windows_of
from ep_moe.engines.transformers.decoding.loop import FinishRows, by_transformers
from ep_moe.engines.transformers.decoding.options import GenerationOptions, end_ids_of
from ep_moe.engines.transformers.decoding.row_decoder import RowDecoder
from ep_moe.engines.transformers.hooks import Model, Session
from ep_moe.transport import GatheredTransport

_log = logging.getLogger(__name__)
_MASKED_ATTENTION = ("sdpa", "eager")  # these take a mask of cache entries
_ROPE_OF_LENGTHS = ("dynamic", "longrope")  # these read the longest position on the host


def generate(
    model: Model,
    prompts: torch.Tensor,
    options: GenerationOptions,
    *,
    attention_mask: torch.Tensor | None = None,
    decode_graphs: bool | None = None,
    on_step: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """Continue this rank's prompts, in step with the other ranks, whose prompts may differ in number and length.

        ids = tokenizer(texts, padding_side="left", padding=True, return_tensors="pt").to(model.device)
        new = generate(model, ids.input_ids, GenerationOptions(max_new_tokens=64), attention_mask=ids.attention_mask)

    The prefill runs eagerly. A decode pass has a fixed shape, of a bucket of rows and of positions. With decode graphs
    each shape is captured once, and a pass is one replay; without, its operations run eagerly and give the same tokens.
    The host waits for the first token, and then for every 16th. Sampling depends on seed, position and logits alone.
    The graphs read the parameters that the model had when they were captured: call
    `model.ep_moe.decoder.drop_graphs()` after replacing parameters. A model that has no pass of fixed shapes generates
    by transformers' own loop, which samples other tokens; a log line gives the reason.

    Args:
        model: of `from_pretrained` or `shard_experts`.
        prompts: [B, P] int64, B may be 0. A prefill has at most the transport's max_tokens_per_rank tokens: more rows
            take several, a longer prompt several chunks of it. P and new tokens beyond the model's
            max_position_embeddings are an error on every rank, in transformers' own loop P beyond max_tokens_per_rank.
        options: of the generation; `end_ids_of(model)` returns the end tokens that the model and its tokenizer declare.
        attention_mask: [B, P], 0 for padding, which is on the left.
        decode_graphs: None for CUDA graphs on GPUs, unless the transport waits on the host, as "hierarchical" does;
            True also logs a warning if there are none; False for eager passes. The same on all ranks.
        on_step: called after one or more passes with the number of new tokens per row.
    Returns: [B, max_new_tokens] int64 on the CPU, -1 after the end of a sequence.
    Errors: ValueError for bad prompts, on every rank; RuntimeError for logits that are not finite; PeerLostError if a
    rank is lost, before any of its NaN becomes a token. Collective.
    """
    decoder = decoder_of(model, decode_graphs)
    run = by_transformers if decoder is None else decoder.generate
    return run(model, prompts, attention_mask, options, on_step or (lambda count: None))


def decoder_of(model: Model, decode_graphs: bool | None) -> Decoder | None:
    """The decoder that `generate` uses, created on first use and set to use graphs or not; None for transformers' own
    loop. A reason against graphs or passes is logged once. Local."""
    session: Session = model.ep_moe
    reason = why_not_fixed(model) if session.decoder is None else ""
    if reason:
        _log_once(session, decode_graphs, f"decoding runs by transformers' own loop: {reason}")
        return None
    if session.decoder is None:
        session.decoder = Decoder(model, graphs=False)
    decoder: Decoder = session.decoder
    decoder.graphs = uses_graphs(model, decode_graphs)
    return decoder


def uses_graphs(model: Model, decode_graphs: bool | None) -> bool:
    """Whether decode passes are captured, with `decode_graphs` as of `generate`. A reason against it is logged once.
    Local."""
    reason = why_no_graphs(model)
    if reason and decode_graphs is not False:
        _log_once(model.ep_moe, decode_graphs, f"decoding runs without CUDA graphs: {reason}")
    return decode_graphs is not False and not reason


def _log_once(session: Session, decode_graphs: bool | None, message: str) -> None:
    """Log a message once: a warning if graphs are asked for, or are the default on this device."""
    if message not in session.logged and session.group.rank == 0:
        wanted = decode_graphs or (decode_graphs is None and session.group.device.type == "cuda")
        _log.log(logging.WARNING if wanted else logging.INFO, message)
    session.logged.add(message)


def why_no_graphs(model: Model) -> str:
    """The reason why decode passes of fixed shapes cannot be captured, "" if they can. Local."""
    session: Session = model.ep_moe
    if session.group.device.type != "cuda":
        return f"ranks are on {session.group.device.type}"
    from ep_moe.transport.one_sided import NvlinkTransport  # needs Triton, which a machine with GPUs has

    kinds = (NvlinkTransport, GatheredTransport) if session.group.backend == "nccl" else NvlinkTransport
    if not issubclass(decode_transport(session), kinds):
        return f"{type(session.transport).__name__} waits on the host"
    return ""


def why_not_fixed(model: Model) -> str:
    """The reason why a model has no decode pass of fixed shapes, "" if it has. Local."""
    name, text = type(model).__name__, model.config.get_text_config()
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers does not declare that {name} runs without host decisions"
    if any(type(module).__name__ == KEPT_IN_STEP for module in model.modules()):
        return f"{name} decides on the host which experts it calls"
    if text._attn_implementation not in _MASKED_ATTENTION:
        return f"attention {text._attn_implementation!r} takes no mask, {' and '.join(_MASKED_ATTENTION)} do"
    rope = getattr(text, "rope_parameters", None) or {}
    for entry in (rope, *(each for each in rope.values() if isinstance(each, dict))):
        if entry.get("rope_type") in _ROPE_OF_LENGTHS:
            return f"its rotary embedding {entry['rope_type']!r} reads positions on the host"
    try:
        windows_of(model.config)
    except ValueError as error:
        return str(error)
    return ""


__all__ = [
    "Decoder",
    "FinishRows",
    "GenerationOptions",
    "RowDecoder",
    "by_transformers",
    "decoder_of",
    "end_ids_of",
    "generate",
    "uses_graphs",
    "why_no_graphs",
    "why_not_fixed",
]
