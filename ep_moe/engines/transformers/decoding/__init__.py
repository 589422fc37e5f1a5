"""Text generation with a model whose experts are spread over ranks: by CUDA graphs if decode passes can be captured,
else by transformers' own loop."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ep_moe.engines.common.agreement import Agreement
from ep_moe.engines.transformers.architectures import KEPT_IN_STEP
from ep_moe.engines.transformers.decoding.decoder import Decoder
from ep_moe.engines.transformers.decoding.fixed_cache import windows_of
from ep_moe.engines.transformers.decoding.options import GenerationOptions, check_prompts, end_ids_of
from ep_moe.engines.transformers.decoding.rows import RowDecoder
from ep_moe.engines.transformers.decoding.sequences import NONE
from ep_moe.engines.transformers.hooks import Session

_log = logging.getLogger(__name__)
_MASKED_ATTENTION = ("sdpa", "eager")  # these take a mask of slots
_ROPE_OF_LENGTHS = ("dynamic", "longrope")  # these read the longest position on the host

Model = Any  # a transformers model; its mixins are more than a type checker can follow


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

    With decode graphs the prefill runs eagerly; each decode pass is one replay of a CUDA graph, captured at its first
    use for a bucket of rows and capacity. The host waits for the first token, and then for every 16th. Sampling
    depends on seed, position and logits alone. The graphs read the parameters that the model had when they were
    captured: call `model.ep_moe.decoder.drop_graphs()` after replacing parameters.

    Args:
        model: of `from_pretrained` or `shard_experts`.
        prompts: [B, P] int64, B may be 0. A prompt longer than the transport's max_tokens_per_rank is an error on every
            rank; more rows than fit into it are prefilled in several passes.
        options: of the generation; `end_ids_of(model)` returns the end tokens that the model itself declares.
        attention_mask: [B, P], 0 for padding, which is on the left.
        decode_graphs: None for CUDA graphs on GPUs with transport "nvlink"; True also logs a warning if it falls back
            to transformers' own loop; False for that loop, which samples other tokens. The same on all ranks.
        on_step: called after one or more passes with the number of new tokens per row.
    Returns: [B, max_new_tokens] int64 on the CPU, -1 after the end of a sequence.
    Errors: ValueError for bad prompts, on every rank; PeerLostError if a rank is lost, before any of its NaN becomes a
    token. Collective.
    """
    decoder = decoder_of(model, decode_graphs)
    step = on_step or (lambda count: None)
    if decoder is None:
        return _by_transformers(model, prompts, attention_mask, options, step)
    return decoder.generate(model, prompts, attention_mask, options, step)


def decoder_of(model: Model, decode_graphs: bool | None) -> Decoder | None:
    """The decoder that `generate` uses, created on first use; None for transformers' own loop. Local."""
    session: Session = model.ep_moe
    if decode_graphs is False:
        return None
    if session.decoder is None and not session.why_no_graphs:
        session.why_no_graphs = why_no_graphs(model)
        if session.why_no_graphs:
            wanted = decode_graphs or session.group.device.type == "cuda"
            if session.group.rank == 0:
                level = logging.WARNING if wanted else logging.INFO
                _log.log(level, "decoding runs without CUDA graphs: %s", session.why_no_graphs)
        else:
            session.decoder = Decoder(model, graphs=True)
    return session.decoder


def why_no_graphs(model: Model) -> str:
    """The reason why decode passes of a model cannot be captured, "" if they can. Local."""
    session: Session = model.ep_moe
    if session.group.device.type != "cuda":
        return f"ranks are on {session.group.device.type}"
    from ep_moe.transport.one_sided import NvlinkTransport  # needs Triton, which a machine with GPUs has

    if not isinstance(session.transport, NvlinkTransport):
        return f"{type(session.transport).__name__} waits on the host"
    return why_not_fixed(model)


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


class FinishRows(StoppingCriteria):
    """Ends a rank's rows at `options.max_new_tokens` or an end token; once all have ended, the rank sends no tokens.

    Args:
        num_columns: prompt tokens of each row. on_step: called with 1 after each token.
    """

    def __init__(
        self, session: Session, options: GenerationOptions, num_columns: int, on_step: Callable[[int], None]
    ) -> None:
        self._session, self._options, self._num_columns, self._on_step = session, options, num_columns, on_step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Called by transformers after each token. Host sync."""
        del scores, kwargs
        new = input_ids[:, self._num_columns :]
        done = _is_end(new, self._options.end_ids).any(1) | (new.shape[1] >= self._options.max_new_tokens)
        if bool(done.all()):
            self._session.idle = True
        self._on_step(1)
        return done


def _is_end(tokens: torch.Tensor, end_ids: tuple[int, ...]) -> torch.Tensor:
    return torch.isin(tokens, torch.tensor(end_ids, dtype=tokens.dtype, device=tokens.device))


def _by_transformers(
    model: Model,
    prompts: torch.Tensor,
    mask: torch.Tensor | None,
    options: GenerationOptions,
    on_step: Callable[[int], None],
) -> torch.Tensor:
    """`generate` by transformers' loop with its dynamic cache; a rank without rows takes part with a dummy row."""
    session: Session = model.ep_moe
    with Agreement(session.group, "generate"):
        check_prompts(prompts, mask, options, session)
    spare = not prompts.shape[0] or not options.max_new_tokens
    ids = prompts.new_zeros(1, 1) if spare else prompts
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        torch.manual_seed(options.seeds_of(1)[0])
        sampling = {"do_sample": True, "temperature": options.temperature, "top_p": options.top_p, "top_k": 0}
    with torch.inference_mode(), session.sitting_out(spare):
        sequences = model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None or spare else mask,
            max_new_tokens=1 if spare else options.max_new_tokens,
            stopping_criteria=StoppingCriteriaList([FinishRows(session, options, ids.shape[1], on_step)]),
            eos_token_id=list(options.end_ids) or None,
            pad_token_id=options.end_ids[0] if options.end_ids else 0,
            synced_gpus=torch.distributed.is_initialized(),
            **sampling,
        )
    new = sequences[: 0 if spare else None, ids.shape[1] :]
    ended_before = _is_end(new, options.end_ids).long().cumsum(1).roll(1, 1)
    ended_before[:, :1] = 0
    new = new.masked_fill(ended_before > 0, NONE)[:, : options.max_new_tokens].cpu()
    return torch.nn.functional.pad(new, (0, options.max_new_tokens - new.shape[1]), value=NONE).reshape(
        prompts.shape[0], options.max_new_tokens
    )


__all__ = [
    "Decoder",
    "FinishRows",
    "GenerationOptions",
    "RowDecoder",
    "decoder_of",
    "end_ids_of",
    "generate",
    "why_no_graphs",
    "why_not_fixed",
]
