"""Worker entry point of `ep-moe eval`: a rank's share of the windows, expert-parallel and with the whole model."""

import math
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from ep_moe.app.eval import EvalConfig
from ep_moe.app.rounded import load_rounded
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
from ep_moe.engines.transformers import Session
from ep_moe.group import EPGroup


def evaluate_rank_main(group: EPGroup, engine: EngineConfig, config: EvalConfig) -> dict[str, Any]:
    """One rank's part of the job. Returns the report, the same on every rank. Collective."""
    clock, engine = PhaseClock(group.device), with_dtype(engine, group.device)
    text = Path(config.text or SHIPPED_TEXT).read_bytes()
    text = text[: config.max_bytes] if config.max_bytes else text
    tokens = torch.tensor(load_tokenizer(engine)(text.decode(errors="ignore"), verbose=False)["input_ids"])
    batches = _batches(tokens, config)
    steps = -(-len(batches) // group.num_ranks)
    mine = [
        batches[i] if i < len(batches) else None for i in range(group.rank, steps * group.num_ranks, group.num_ranks)
    ]
    with progress_bar(group) as progress:
        with clock.phase("load"), group.guard("load"):
            model, session = load_expert_parallel(group, engine)
        with clock.phase("expert_parallel"), group.guard("eval"):
            nats = _total_nats(model, mine, group.device, progress, session)
        load, scheme = load_of(session), session.scheme
        quantized = any(layer.scheme.weight.quantized for layer in session.layers)
        session.destroy()
        del model, session
        whole_nats, rounded_nats = 0.0, 0.0
        if config.whole:
            with clock.phase("whole_model"):
                whole_nats = _total_nats(load_whole(group, engine), mine, group.device, progress)
        if config.whole and quantized:
            with clock.phase("rounded_model"):
                rounded_nats = _total_nats(load_rounded(group, engine), mine, group.device, progress)
    group.wait_for_all("whole model")  # local work takes different times, and the next collective has a timeout
    parts, report = gather_report(group, clock, load, nats=nats, whole_nats=whole_nats, rounded_nats=rounded_nats)
    predicted = sum(batch.numel() - batch.shape[0] for batch in batches)
    predicted_bytes = predicted * len(text) / tokens.numel()
    loss = sum(part["nats"] for part in parts) / predicted_bytes
    report |= {
        "model": str(model_dir(engine)),
        "dtype": engine.dtype,
        "scheme": scheme,
        "text_bytes": len(text),
        "predicted_tokens": predicted,
        "nats_per_byte": loss,
        "bits_per_byte": loss / math.log(2),
    }
    if config.whole:
        whole_loss = sum(part["whole_nats"] for part in parts) / predicted_bytes
        report |= {"whole_nats_per_byte": whole_loss, "difference": loss - whole_loss}
    if config.whole and quantized:
        rounded_loss = sum(part["rounded_nats"] for part in parts) / predicted_bytes
        report |= {"rounded_nats_per_byte": rounded_loss, "rounded_difference": loss - rounded_loss}
    return report


def _batches(tokens: torch.Tensor, config: EvalConfig) -> list[torch.Tensor]:
    """Cut [N] tokens into [<= batch, window] pieces; the remaining tokens make a last, shorter window."""
    full = tokens.numel() // config.window * config.window
    batches = list(tokens[:full].reshape(-1, config.window).split(config.batch)) if full else []
    rest = tokens[full:]
    if rest.numel() > 1:
        batches.append(rest.unsqueeze(0))
    if not batches:
        raise ValueError(f"the text has {tokens.numel()} tokens; at least 2 are needed")
    return batches


def _total_nats(
    model: Model,
    batches: list[torch.Tensor | None],
    device: torch.device,
    progress: Progress,
    session: Session | None = None,
) -> float:
    """Sum of -log p over all predicted tokens of this rank, in float64. A rank without a batch is idle."""
    task = start_task(progress, "whole model" if session is None else "expert-parallel", len(batches))
    total = 0.0
    with torch.inference_mode():
        for batch in batches:
            if session is not None:
                session.idle = batch is None
            if batch is not None:
                ids = batch.to(device)
                log_probs = model(ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
                total -= float(log_probs.gather(-1, ids[:, 1:, None]).double().sum())
            elif session is not None:
                model(torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
            progress.advance(task)
    return total
