"""Options of a generation, and checks of its prompts. Letters: B rows of this rank, P prompt tokens."""

import contextlib
import dataclasses
from typing import Any

import torch
from transformers import AutoTokenizer

from ep_moe.engines.transformers.decoding.sequences import MOST_END_IDS
from ep_moe.engines.transformers.hooks import Model
from ep_moe.fields import check_fields, shown
from ep_moe.tensors import check_tensor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions:
    """How many tokens are generated, and how they are chosen.

    Args:
        max_new_tokens: for each prompt, 0 or more; ranks may differ.
        end_ids: tokens that end a sequence earlier; the end token is the last one that is returned.
        temperature: 0 takes the likeliest token; above 0 samples from logits / temperature.
        top_p: sample among the likeliest tokens that together reach this probability.
        seeds: one for each row; an empty tuple stands for 0 to B - 1.
    Errors: ValueError names the value and the limit.
    """

    max_new_tokens: int
    end_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seeds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens ({self.max_new_tokens}) must not be negative")
        if len(self.end_ids) > MOST_END_IDS:
            raise ValueError(f"end_ids are {len(self.end_ids)}, the limit is {MOST_END_IDS}")
        if self.temperature < 0:
            raise ValueError(f"temperature ({self.temperature}) must not be negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p}) is not in (0, 1]")
        wrong = [seed for seed in self.seeds if not -(2**63) <= seed < 2**63]
        if wrong:
            raise ValueError(f"seeds have {shown(wrong[0])}, which is not a number of 64 bits")

    def seeds_of(self, num_rows: int) -> tuple[int, ...]:
        """One seed for each of B rows."""
        return self.seeds or tuple(range(num_rows))


def end_ids_of(model: Model, tokenizer: Any = None) -> tuple[int, ...]:
    """The end tokens of a model's generation config, and that of its tokenizer, which may be another one.

    Args:
        tokenizer: of transformers; by default that of the model's directory, if it has one.
    Local.
    """
    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    if tokenizer is None and model.name_or_path:
        with contextlib.suppress(OSError, ValueError):  # it has none
            tokenizer = AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
    ends = [*ends, getattr(tokenizer, "eos_token_id", None)]
    return tuple(dict.fromkeys(token for token in ends if token is not None))


def check_prompts(
    prompts: torch.Tensor, mask: torch.Tensor | None, options: GenerationOptions, model: Model, *, whole: bool
) -> None:
    """Raise ValueError for prompts that are not [B, P] int64 on the model's device, are too long, have tokens that the
    model's embedding has not, or are padded otherwise than on the left.

    Args:
        whole: a prompt is computed in one pass and has at most max_tokens_per_rank tokens; else, in chunks, as many as
            the model's max_position_embeddings.
    Host sync.
    """
    session = model.ep_moe
    rank, device = session.group.rank, session.group.device
    check_tensor(prompts, "prompts")
    if prompts.dim() != 2 or prompts.dtype != torch.int64 or prompts.device != device:
        found = f"{tuple(prompts.shape)} {prompts.dtype} on {prompts.device}"
        raise ValueError(f"prompts are {found} on rank {rank}, expected [rows, tokens] int64 on {device}")
    num_rows, num_columns = prompts.shape
    most = limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    name = "max_position_embeddings"
    if whole:
        limit, name = session.transport.config.max_tokens_per_rank, "max_tokens_per_rank"
    if num_rows and not num_columns:
        raise ValueError(f"prompts are {tuple(prompts.shape)} on rank {rank}: a prompt needs at least one token")
    if num_rows and limit is not None and num_columns > limit:
        raise ValueError(f"a prompt of {num_columns} tokens exceeds {name} ({limit}) on rank {rank}")
    new = options.max_new_tokens
    if num_rows and most is not None and num_columns + new > most:
        what = f"a prompt of {num_columns} tokens and max_new_tokens ({new}) exceed max_position_embeddings ({most})"
        raise ValueError(f"{what} on rank {rank}")
    if options.seeds and len(options.seeds) != num_rows:
        raise ValueError(f"seeds are {len(options.seeds)} on rank {rank}, prompts are {num_rows}")
    vocab_size = model.get_input_embeddings().weight.shape[0]
    unknown = prompts[(prompts < 0) | (prompts >= vocab_size)][:1].tolist()
    if unknown:
        raise ValueError(f"a prompt has token {unknown[0]} on rank {rank}, tokens are in [0, {vocab_size})")
    if mask is None:
        return
    check_tensor(mask, "attention_mask")
    if mask.shape != prompts.shape or mask.device != device:
        raise ValueError(f"attention_mask is {tuple(mask.shape)} on {mask.device}, prompts {tuple(prompts.shape)}")
    taken = mask.bool()
    if num_rows and not bool(taken[:, -1:].all() & (taken[:, 1:] | ~taken[:, :-1]).all()):
        raise ValueError(f"attention_mask on rank {rank} is not that of prompts with padding on the left alone")
