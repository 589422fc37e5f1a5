"""Worker entry point of `ep-moe run`: generate expert-parallel, then with the whole model, and compare.

Letters: T tokens, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import torch
from rich.progress import Progress
from transformers import StoppingCriteriaList

from ep_moe.app.rebalancing import RebalanceConfig, start_rebalancing
from ep_moe.app.run import RunConfig
from ep_moe.app.session import (
    Model,
    PhaseClock,
    gather_report,
    load_expert_parallel,
    load_of,
    load_tokenizer,
    load_whole,
    progress_bar,
    start_task,
    with_dtype,
)
from ep_moe.app.start import SHIPPED_TEXT, model_dir
from ep_moe.config import EngineConfig
from ep_moe.engines.transformers import GenerationOptions, Session
from ep_moe.engines.transformers.decoding import FinishRows
from ep_moe.group import EPGroup

LAYER_PHASES = ("route", "dispatch", "experts", "combine")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Trace:
    """Outputs of a model: new tokens [n], the logits [n, V] that chose them, and teacher-forced logits [t, V]."""

    tokens: torch.Tensor
    logits: torch.Tensor
    teacher_logits: torch.Tensor


def run_rank_main(
    group: EPGroup, engine: EngineConfig, config: RunConfig, rebalance: RebalanceConfig
) -> dict[str, Any]:
    """One rank's part of the job. Returns the report, the same on every rank. Collective."""
    clock, layer_clock = PhaseClock(group.device), PhaseClock(group.device)
    engine, tokenizer = with_dtype(engine, group.device), load_tokenizer(engine)
    prompt = config.prompts[group.rank % len(config.prompts)]
    prompt_ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=group.device)
    new_tokens = config.new_tokens[group.rank % len(config.new_tokens)]
    heldout = tokenizer(SHIPPED_TEXT.read_text(), verbose=False)["input_ids"][: config.teacher_tokens]
    windows = _windows(torch.tensor(heldout, device=group.device), config.window, group)
    with progress_bar(group) as progress:
        with clock.phase("load"), group.guard("load"):
            model, session = load_expert_parallel(group, engine)
            start_rebalancing(session, rebalance)
        for layer in session.layers:
            layer.phases = layer_clock
        with group.guard("generate"):
            ours = _trace(model, prompt_ids, new_tokens, windows, progress, clock=clock, session=session)
        load, scheme = load_of(session), session.scheme
        placement = session.placements[0]
        owners = [list(placement.local_experts(rank)) for rank in range(group.num_ranks)]
        session.destroy()
        del model, session, layer
        with clock.phase("whole_model"):
            whole = _trace(load_whole(group, engine), prompt_ids, new_tokens, windows, progress)
    group.wait_for_all("whole model")  # local work takes different times, and the next collective has a timeout
    parts, report = gather_report(
        group,
        clock,
        load,
        rank=group.rank,
        device=str(group.device),
        prompt=prompt,
        text=tokenizer.decode(ours.tokens),
        tokens_equal=torch.equal(ours.tokens, whole.tokens),
        max_logit_diff=_largest_difference(ours, whole),
        new_tokens=ours.tokens.numel(),
        teacher_tokens=sum(window.numel() for window in windows),
        layer_secs={name: layer_clock.secs[name] for name in LAYER_PHASES},
    )
    largest = float(torch.tensor([part["max_logit_diff"] for part in parts], dtype=torch.float64).max())
    tokens_equal = all(part["tokens_equal"] for part in parts)
    keys = ("rank", "device", "prompt", "tokens_equal", "max_logit_diff", "new_tokens")
    return report | {
        "ok": tokens_equal and largest <= config.max_logit_diff,
        "model": str(model_dir(engine)),
        "dtype": engine.dtype,
        "scheme": scheme,
        "tokens_equal": tokens_equal,
        "max_logit_diff": largest,
        "max_logit_diff_allowed": config.max_logit_diff,
        "new_tokens": sum(part["new_tokens"] for part in parts),
        "teacher_tokens": sum(part["teacher_tokens"] for part in parts),
        "text": [part["prompt"] + part["text"] for part in parts],
        "ranks": [
            {key: part[key] for key in keys} | {"experts": experts} for part, experts in zip(parts, owners, strict=True)
        ],
        "layer_times": {f"{name}_secs": max(part["layer_secs"][name] for part in parts) for name in LAYER_PHASES},
    }


def _windows(tokens: torch.Tensor, window: int, group: EPGroup) -> list[torch.Tensor]:
    """This rank's share of the held-out tokens: the same number of windows on every rank, the last may be empty."""
    share = -(-tokens.numel() // group.num_ranks)
    steps = -(-share // window)
    mine = tokens[group.rank * share : (group.rank + 1) * share]
    return [mine[step * window : (step + 1) * window] for step in range(steps)]


def _trace(
    model: Model,
    prompt_ids: torch.Tensor,
    new_tokens: int,
    windows: list[torch.Tensor],
    progress: Progress,
    *,
    clock: PhaseClock | None = None,
    session: Session | None = None,
) -> _Trace:
    """Generate greedily and run the held-out windows; with a session, in step with the other ranks."""
    label = "whole model" if session is None else "expert-parallel"
    timer = clock or PhaseClock(prompt_ids.device)
    task = start_task(progress, f"{label}: generate", new_tokens)
    options: dict[str, Any] = {"max_new_tokens": new_tokens}
    if session is not None:
        on_step = functools.partial(progress.advance, task)
        finish = FinishRows(session, GenerationOptions(max_new_tokens=new_tokens), prompt_ids.shape[1], on_step)
        options["stopping_criteria"] = StoppingCriteriaList([finish])
    with timer.phase("generate"), torch.inference_mode():
        generated = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
            synced_gpus=session is not None and torch.distributed.is_initialized(),
            **options,
        )
    progress.update(task, completed=new_tokens)
    if session is not None and session.rebalancer is not None:
        session.rebalancer.finish()  # the held-out windows are computed where experts are then
    task = start_task(progress, f"{label}: held-out text", len(windows))
    teacher = []
    with timer.phase("teacher_forced"), torch.inference_mode():
        for window in windows:
            if session is not None:
                session.idle = window.numel() == 0
            if window.numel() or session is not None:
                batch = (window if window.numel() else prompt_ids[0, :1]).unsqueeze(0)
                logits = model(batch, use_cache=False).logits[0].float()
                teacher.append(logits[: window.numel()].cpu())
            progress.advance(task)
    if session is not None:
        session.idle = False
    return _Trace(
        tokens=generated.sequences[0, prompt_ids.shape[1] :].cpu(),
        logits=torch.cat(generated.logits).float().cpu(),
        teacher_logits=torch.cat(teacher) if teacher else torch.empty(0),
    )


def _largest_difference(ours: _Trace, whole: _Trace) -> float:
    """Largest difference of teacher-forced logits, and of generated ones up to the first token that differs."""
    steps = min(ours.tokens.numel(), whole.tokens.numel())
    same = ours.tokens[:steps] == whole.tokens[:steps]
    comparable = min(int(same.long().cumprod(0).sum()) + 1, steps)
    pairs = [
        (ours.logits[:comparable], whole.logits[:comparable]),
        (ours.teacher_logits, whole.teacher_logits),
    ]
    differences = [(a - b).abs().max() for a, b in pairs if a.numel()]
    return float(torch.stack(differences).max())  # propagates NaN, unlike Python's max
