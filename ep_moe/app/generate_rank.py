"""Worker entry point of `ep-moe generate`: a rank continues its prompts, in step with the others."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoConfig

from ep_moe.app.generate import GenerateConfig
from ep_moe.app.placements import model_sizes
from ep_moe.app.rebalancing import RebalanceConfig, start_rebalancing
from ep_moe.app.session import (
    PhaseClock,
    gather_report,
    load_expert_parallel,
    load_of,
    load_tokenizer,
    progress_bar,
    start_task,
)
from ep_moe.app.start import model_dir
from ep_moe.config import EngineConfig
from ep_moe.engines.transformers import GenerationOptions, generate
from ep_moe.engines.transformers.decoding import decoder_of, end_ids_of
from ep_moe.group import EPGroup
from ep_moe.serving.scheduler import LENGTH
from ep_moe.serving.text import TextStream

MOST_ROWS = 64  # prompts in one batch of a rank; by transformers' own loop a batch is one prompt


def generate_rank_main(
    group: EPGroup, engine: EngineConfig, config: GenerateConfig, rebalance: RebalanceConfig
) -> dict[str, Any]:
    """One rank's part of the job. Returns the report, the same on every rank. Collective."""
    clock = PhaseClock(group.device)
    tokenizer = load_tokenizer(engine)
    mine = range(group.rank, len(config.prompts), group.num_ranks)
    ids_of = {index: tokenizer(config.prompts[index])["input_ids"] for index in mine}
    _check_lengths(ids_of.values(), engine, config)
    made: dict[int, tuple[str, int]] = {}
    with progress_bar(group) as progress:
        with clock.phase("load"), group.guard("load"):
            model, session = load_expert_parallel(group, engine)
            start_rebalancing(session, rebalance)
        end_ids = end_ids_of(model, tokenizer)
        decoder = decoder_of(model, config.decode_graphs)
        rows = 1 if decoder is None else MOST_ROWS
        turns = range(0, -(-len(config.prompts) // group.num_ranks), rows)
        with clock.phase("warm_up"), group.guard("warm up"):
            for first in turns:
                indices = mine[first : first + rows]
                longest = max((len(ids_of[index]) for index in indices), default=0)
                if decoder is not None:
                    num_positions = longest + config.max_new_tokens
                    decoder.warmup(model, len(indices), num_positions, sampled=config.temperature > 0)
        task = start_task(progress, "generate", len(turns) * config.max_new_tokens)
        with clock.phase("generate"), group.guard("generate"):
            for turn, first in enumerate(turns):
                progress.update(task, completed=turn * config.max_new_tokens)
                indices = mine[first : first + rows]
                ids, mask = _padded([ids_of[index] for index in indices], group.device)
                options = GenerationOptions(
                    max_new_tokens=config.max_new_tokens,
                    end_ids=end_ids,
                    temperature=config.temperature,
                    top_p=config.top_p,
                    seeds=tuple(config.seed + index for index in indices),
                )
                found = generate(
                    model,
                    ids,
                    options,
                    attention_mask=mask,
                    decode_graphs=config.decode_graphs,
                    on_step=lambda count: progress.advance(task, count),
                )
                for index, row in zip(indices, found, strict=True):
                    tokens = row[row >= 0]
                    piece = TextStream(tokenizer, prompt=ids_of[index]).push(tokens.tolist(), LENGTH)
                    made[index] = (piece.text, piece.num_tokens)
        progress.update(task, completed=len(turns) * config.max_new_tokens)
        load = load_of(session)
        memory = {} if decoder is None else decoder.memory
        session.destroy()
    parts, report = gather_report(group, clock, load, made=made)
    everything = {index: entry for part in parts for index, entry in part["made"].items()}
    new_tokens = sum(count for _, count in everything.values())
    report["times"]["tokens_per_sec"] = new_tokens / report["times"]["generate_secs"]
    return report | {
        "prompts": list(config.prompts),
        "text": [everything[index][0] for index in range(len(config.prompts))],
        "new_tokens": new_tokens,
        "sizes": dataclasses.asdict(model_sizes(engine)),
        "decode_graphs": decoder is not None and decoder.graphs,
        "memory": memory,
    }


def _check_lengths(prompts: Iterable[list[int]], engine: EngineConfig, config: GenerateConfig) -> None:
    """Raise ValueError for a prompt that exceeds the model's positions with its new tokens."""
    found = AutoConfig.from_pretrained(model_dir(engine), local_files_only=True).get_text_config()
    most, longest = getattr(found, "max_position_embeddings", None), max(map(len, prompts), default=0)
    if longest and most is not None and longest + config.max_new_tokens > most:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens ({config.max_new_tokens}) exceed the model's "
            f"max_position_embeddings ({most})"
        )


def _padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts as [rows, longest] with padding on the left, and the mask of their tokens, None without padding."""
    longest = max(map(len, prompts), default=0)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), None if bool(mask.all()) else mask.to(device)
