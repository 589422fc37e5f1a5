"""Worker entry point of `ep-moe generate`: a rank continues its prompts, one at a time, in step with the others."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteriaList

from ep_moe.app.generate import GenerateConfig
from ep_moe.app.session import (
    FinishRank,
    Model,
    PhaseClock,
    load_expert_parallel,
    load_tokenizer,
    progress_bar,
    start_task,
)
from ep_moe.config import EngineConfig
from ep_moe.engines.transformers import Session
from ep_moe.group import EPGroup


def generate_rank_main(group: EPGroup, engine: EngineConfig, config: GenerateConfig) -> dict[str, Any]:
    """One rank's part of the job. Returns the report, the same on every rank. Collective."""
    clock = PhaseClock(group.device)
    tokenizer = load_tokenizer(engine)
    rounds = -(-len(config.prompts) // group.num_ranks)
    made: dict[int, tuple[str, int]] = {}
    with progress_bar(group) as progress:
        with clock.phase("load"), group.guard("load"):
            model, session = load_expert_parallel(group, engine)
        task = start_task(progress, "generate", rounds * config.max_new_tokens)
        with clock.phase("generate"), group.guard("generate"):
            for turn in range(rounds):
                index = turn * group.num_ranks + group.rank
                spare = index >= len(config.prompts)  # no prompt is left: make one unused token, in step
                session.idle = spare
                prompt = config.prompts[index % len(config.prompts)]
                ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=group.device)
                progress.update(task, completed=turn * config.max_new_tokens)
                tokens = _continue(
                    model,
                    session,
                    ids,
                    config,
                    new_tokens=1 if spare else config.max_new_tokens,
                    seed=config.seed + index,
                    on_step=functools.partial(progress.advance, task),
                )
                if not spare:
                    made[index] = (str(tokenizer.decode(tokens, skip_special_tokens=True)), tokens.numel())
        progress.update(task, completed=rounds * config.max_new_tokens)
        expert_load = session.expert_load.cpu()
        session.destroy()
    parts = group.all_gather_object({"made": made, "expert_load": expert_load, "secs": dict(clock.secs)})
    everything = {index: entry for part in parts for index, entry in part["made"].items()}
    generate_secs = max(part["secs"]["generate"] for part in parts)
    new_tokens = sum(count for _, count in everything.values())
    return {
        "world_size": group.num_ranks,
        "prompts": list(config.prompts),
        "text": [everything[index][0] for index in range(len(config.prompts))],
        "new_tokens": new_tokens,
        "expert_load": torch.stack([part["expert_load"] for part in parts]).sum(0).tolist(),
        "times": {
            "load_secs": max(part["secs"]["load"] for part in parts),
            "generate_secs": generate_secs,
            "tokens_per_sec": new_tokens / generate_secs,
        },
    }


def _continue(
    model: Model,
    session: Session,
    ids: torch.Tensor,
    config: GenerateConfig,
    *,
    new_tokens: int,
    seed: int,
    on_step: Callable[[], None],
) -> torch.Tensor:
    """Return the new tokens [n] after `ids` [1, T]. Collective: ranks step together until all have finished."""
    end = model.generation_config.eos_token_id
    end_ids = tuple(end) if isinstance(end, list) else () if end is None else (end,)
    finish = FinishRank(session, prompt_tokens=ids.shape[1], new_tokens=new_tokens, end_ids=end_ids, on_step=on_step)
    sampling: dict[str, Any] = {"do_sample": False}
    if config.temperature > 0:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p, "top_k": 0}
    with torch.inference_mode():
        sequences = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            stopping_criteria=StoppingCriteriaList([finish]),
            pad_token_id=end_ids[0] if end_ids else 0,
            synced_gpus=torch.distributed.is_initialized(),
            **sampling,
        )
    return sequences[0, ids.shape[1] :].cpu()
