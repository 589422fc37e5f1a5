"""Generation by transformers' own loop, with its dynamic cache, while the ranks stay in step."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ep_moe.engines.common.model import Agreement
from ep_moe.engines.transformers.decoding.finite import not_finite
from ep_moe.engines.transformers.decoding.options import GenerationOptions, check_prompts
from ep_moe.engines.transformers.decoding.sequences import NONE
from ep_moe.engines.transformers.hooks import Model, Session

LEAST_TEMPERATURE = 1e-30  # of transformers' loop: logits divided by less may be beyond float32


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


class _CheckFinite(LogitsProcessor):
    """Raises RuntimeError for logits whose largest is not finite. Host sync."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Called by transformers before each token."""
        del input_ids
        if not bool(scores.amax(-1).isfinite().all()):
            raise RuntimeError(not_finite())
        return scores


def _is_end(tokens: torch.Tensor, end_ids: tuple[int, ...]) -> torch.Tensor:
    return torch.isin(tokens, torch.tensor(end_ids, dtype=tokens.dtype, device=tokens.device))


def by_transformers(
    model: Model,
    prompts: torch.Tensor,
    mask: torch.Tensor | None,
    options: GenerationOptions,
    on_step: Callable[[int], None],
) -> torch.Tensor:
    """`generate` by transformers' loop with its dynamic cache; a rank without rows takes part with a dummy row."""
    session: Session = model.ep_moe
    with Agreement(session.group, "generate"):
        check_prompts(prompts, mask, options, model, whole=True)
    spare = not prompts.shape[0] or not options.max_new_tokens
    ids = prompts.new_zeros(1, 1) if spare else prompts
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        torch.manual_seed(options.seeds_of(1)[0])
        temperature = max(options.temperature, LEAST_TEMPERATURE)
        sampling = {"do_sample": True, "temperature": temperature, "top_p": options.top_p, "top_k": 0}
    with torch.inference_mode(), session.sitting_out(spare):
        sequences = model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None or spare else mask,
            max_new_tokens=1 if spare else options.max_new_tokens,
            logits_processor=LogitsProcessorList([_CheckFinite()]),
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
