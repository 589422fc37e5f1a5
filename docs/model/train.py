"""Train the shipped model: a byte-level Qwen3-MoE of seven million parameters, from scratch.

    python docs/model/train.py --raw kjv.txt --out model

The text is the King James Version, public domain, as `bible -f Gen1:1-Rev22:21` of Debian's packages bible-kjv and
bible-kjv-text prints it: one verse per line after its reference, pure ASCII. docs/MODEL.md has the commands.
Letters: N windows, B windows in a batch, S bytes per window, E experts, K top-k.
"""

import dataclasses
import json
import math
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import tokenizers
import torch
import torch.nn.functional as F
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from ep_moe.fields import check_fields

Model: TypeAlias = Any  # a Qwen3MoeForCausalLM, whose annotations do not pass a type checker

VOCAB_SIZE = 256  # token id = byte

HELDOUT_EVERY = 20  # every 20th chapter is held out
SHIPPED_HELDOUT_BYTES = 65536  # 128 windows of 512: the first bytes of the held-out text, ep_moe/app/heldout.txt
SAMPLE_PROMPT = "And it came to pass"
_VERSE = re.compile(r"([1-3]?[A-Za-z]+\d+):\d+ (.+)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Plain text in two parts: the training text, and the held-out chapters."""

    train: bytes
    heldout: bytes


def parse(listing: str) -> list[str]:
    """The text of each chapter of a listing, in order: a verse per line, without references.

    Errors: ValueError for a line that is not a verse.
    """
    chapters: dict[str, str] = {}
    for line_number, line in enumerate(listing.splitlines(), start=1):
        match = _VERSE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"line {line_number} ({line[:40]!r}) is not a verse like 'Ge1:1 In the beginning ...'")
        chapter, verse = match.groups()
        chapters[chapter] = chapters.get(chapter, "") + " ".join(verse.split()) + "\n"
    return list(chapters.values())


def split(chapters: list[str]) -> Split:
    """Hold out every 20th chapter (index % 20 == 19) and train on the others; a blank line is between chapters."""
    last = HELDOUT_EVERY - 1
    others = [chapter for index, chapter in enumerate(chapters) if index % HELDOUT_EVERY != last]
    return Split(
        train="\n".join(others).encode("ascii"), heldout="\n".join(chapters[last::HELDOUT_EVERY]).encode("ascii")
    )


def windows(text: bytes, length: int) -> torch.Tensor:
    """Cut text into windows that do not overlap, [N, S] int64, token id = byte; a rest shorter than S is dropped.

    Errors: ValueError if the text does not fill one window.
    """
    if len(text) < length:
        raise ValueError(f"text of {len(text)} bytes does not fill one window of {length}")
    count = len(text) // length
    return torch.frombuffer(bytearray(text[: count * length]), dtype=torch.uint8).view(count, length).long()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of a training run. It ends after `steps`, or after `minutes` if `steps` is None."""

    minutes: float = 5.0
    steps: int | None = None
    device: str = "cuda"
    batch_size: int = 64  # windows
    window: int = 512  # bytes
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    dropout: float = 0.1
    max_grad_norm: float = 1.0
    router_aux_loss_coef: float = 1e-3  # small: load stays uneven, and no expert dies
    ema_decay: float = 0.999
    eval_every: int = 250  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps ({self.steps}) is less than 1")
        if self.minutes <= 0:
            raise ValueError(f"minutes ({self.minutes}) is not positive")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout ({self.dropout}) is not in [0, 1)")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of forward and backward; weights and optimizer are float32."""
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """`loss` in nats per byte; `expert_load[layer][expert]` is the share of that layer's (token, choice) pairs."""

    loss: float
    expert_load: list[list[float]]

    @property
    def max_over_mean(self) -> list[float]:
        """The busiest expert's load over the mean load, per layer."""
        return [max(load) * len(load) for load in self.expert_load]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A finished run: the model with its best weights, its steps and its time."""

    model: Model
    steps: int
    best_step: int
    seconds: float


def model_config(config: TrainConfig) -> Qwen3MoeConfig:
    """The shape of the shipped model: 4 layers of 16 experts each, top-4."""
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}
    return Qwen3MoeConfig(
        **heads,
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,  # of dense layers, which this model does not have
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        attention_dropout=config.dropout,
        router_aux_loss_coef=config.router_aux_loss_coef,
        bos_token_id=None,
        eos_token_id=None,
    )


def byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the UTF-8 bytes of the text: byte-level BPE without merges.

    ByteLevel maps a byte to a printable character: itself if printable in Latin-1, else the next one from U+0100.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(VOCAB_SIZE) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=max_length, clean_up_tokenization_spaces=False
    )


def forward(model: Model, input_ids: torch.Tensor, dtype: torch.dtype) -> Any:
    """Run the model with its float32 weights cast to dtype; gradients are float32.

    Not by autocast, which does not cover grouped GEMMs.
    """
    weights = {name: weight.to(dtype) for name, weight in model.named_parameters()}
    inputs = {"input_ids": input_ids, "use_cache": False, "output_router_logits": True}
    return torch.func.functional_call(model, weights, kwargs=inputs)


@torch.inference_mode()
def evaluate(
    model: Model, windows: torch.Tensor, *, batch_size: int = 32, dtype: torch.dtype = torch.float32
) -> Evaluation:
    """Loss over windows [N, S] (S - 1 predictions each) and the load of each expert."""
    model.eval()
    total = 0.0
    load = torch.zeros(model.config.num_hidden_layers, model.config.num_experts, device=model.device)
    for batch in windows.split(batch_size):
        batch = batch.to(model.device)
        output = forward(model, batch, dtype)
        logits = output.logits[:, :-1].float().flatten(0, 1)
        total += F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item()
        for layer, router_logits in enumerate(output.router_logits):
            topk_ids = router_logits.topk(model.config.num_experts_per_tok).indices.flatten()
            load[layer] += torch.bincount(topk_ids, minlength=model.config.num_experts)
    return Evaluation(loss=total / windows[:, 1:].numel(), expert_load=(load / load.sum(dim=1, keepdim=True)).tolist())


def learning_rate(config: TrainConfig, *, step: int, done: float) -> float:
    """Linear warm-up by steps, times a cosine to zero; `done` is the finished share of the run."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.learning_rate * min(1.0, (step + 1) / config.warmup_steps) * cosine


def add_dropout(model: Model, p: float) -> None:
    """Add dropout after the embedding and to each block's output before the residual sum, in training mode only."""
    blocks = [part for layer in model.model.layers for part in (layer.self_attn.o_proj, layer.mlp)]
    for module in [model.model.embed_tokens, *blocks]:
        module.register_forward_hook(lambda module, _, output: F.dropout(output, p, module.training))


def _optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=config.device != "cpu")


def _batches(train: bytes, config: TrainConfig) -> Iterator[torch.Tensor]:
    """Endless batches [B, S] of windows at random offsets."""
    data = torch.frombuffer(bytearray(train), dtype=torch.uint8).to(config.device)
    starts = data.unfold(0, config.window, 1)
    while True:
        offsets = torch.randint(len(starts), (config.batch_size,), device=config.device)
        yield starts[offsets].long()


def train(config: TrainConfig, texts: Split, console: Console) -> Trained:
    """Train from scratch and return the averaged weights with the lowest held-out loss."""
    torch.manual_seed(config.seed)
    model: Model = Qwen3MoeForCausalLM(model_config(config))
    model.to(config.device)
    model.set_experts_implementation("grouped_mm" if config.dtype == torch.bfloat16 else "eager")
    add_dropout(model, config.dropout)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay))
    optimizer = _optimizer(model, config)
    heldout = windows(texts.heldout, config.window)
    best_loss, best_step, best_weights = math.inf, 0, {}
    start, done, step = time.monotonic(), 0.0, 0
    columns = TextColumn("step {task.fields[step]}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=1.0, step=0)
        for batch in _batches(texts.train, config):
            model.train()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step=step, done=done)
            output = forward(model, batch, config.dtype)
            loss = F.cross_entropy(output.logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten())
            (loss + config.router_aux_loss_coef * output.aux_loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
            step += 1
            done = step / config.steps if config.steps else (time.monotonic() - start) / (60 * config.minutes)
            progress.update(task, completed=done, step=step)
            if step % config.eval_every == 0 or done >= 1:
                result = evaluate(ema.module, heldout, dtype=config.dtype)
                if result.loss < best_loss:
                    best_loss, best_step = result.loss, step
                    best_weights = {name: weight.clone() for name, weight in ema.module.state_dict().items()}
                progress.console.print(
                    f"step {step}: train {loss.item():.4f}, held out {result.loss:.4f} nats per byte, "
                    f"max/mean load {max(result.max_over_mean):.2f}, {time.monotonic() - start:.0f} s"
                )
            if done >= 1:
                break
    model.load_state_dict(best_weights)
    return Trained(model=model, steps=step, best_step=best_step, seconds=time.monotonic() - start)


def save(model: Model, out: Path) -> None:
    """Write bf16 weights (one safetensors file), configs and tokenizer files."""
    model.config.attention_dropout = 0.0  # used in training only
    model.to(torch.bfloat16).save_pretrained(out)
    byte_tokenizer(model.config.max_position_embeddings).save_pretrained(out)


def sample(model: Model, *, temperature: float, num_bytes: int = 300) -> str:
    """Text after SAMPLE_PROMPT; temperature 0 is greedy."""
    prompt = torch.tensor([list(SAMPLE_PROMPT.encode())], device=model.device)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    torch.manual_seed(0)
    ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_bytes, **how)
    return bytes(ids[0].tolist()).decode("utf-8", errors="replace")


def figures(config: TrainConfig, trained: Trained, texts: Split, out: Path) -> dict[str, Any]:
    """The content of training.json, measured in float32 on the weights as saved in `out`."""
    model: Model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, experts_implementation="eager")
    model.to(config.device)
    heldout = evaluate(model, windows(texts.heldout, config.window))
    shipped = evaluate(model, windows(texts.heldout[:SHIPPED_HELDOUT_BYTES], config.window))
    seen = evaluate(model, windows(texts.train[: len(texts.heldout)], config.window))
    on_gpu = config.device.startswith("cuda")
    return {
        "heldout_loss": round(heldout.loss, 5),
        "heldout_txt_loss": round(shipped.loss, 5),
        "train_loss": round(seen.loss, 5),
        "unit": f"nats per byte, float32, non-overlapping windows of {config.window} bytes",
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "train_bytes": len(texts.train),
        "heldout_bytes": len(texts.heldout),
        "steps": trained.steps,
        "best_step": trained.best_step,
        "tokens_seen": trained.steps * config.batch_size * config.window,
        "seconds": round(trained.seconds, 1),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": dataclasses.asdict(config),
        "expert_load": [[round(share, 4) for share in load] for load in heldout.expert_load],
        "expert_load_max_over_mean": [round(ratio, 3) for ratio in heldout.max_over_mean],
        "samples": {f"temperature {t}": sample(model, temperature=t) for t in (0.0, 0.7)},
    }


DEFAULTS = TrainConfig()


def main(
    raw: Annotated[Path, typer.Option(help="what `bible -f Gen1:1-Rev22:21` printed", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="folder for the trained model", file_okay=False)],
    minutes: Annotated[float, typer.Option(help="how long to train")] = DEFAULTS.minutes,
    steps: Annotated[int | None, typer.Option(help="train this many steps, however long they take")] = DEFAULTS.steps,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = DEFAULTS.device,
    batch_size: Annotated[int, typer.Option(help="windows of 512 bytes per step")] = DEFAULTS.batch_size,
    dropout: Annotated[float, typer.Option(help="of attention and of the residual stream")] = DEFAULTS.dropout,
    seed: Annotated[int, typer.Option(help="of weights, windows and dropout")] = DEFAULTS.seed,
) -> None:
    """Train the model that ships with ep_moe and write it to OUT, with its figures in training.json."""
    console = Console(stderr=True)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {device}: no CUDA GPU here; --device cpu trains slowly")
    try:
        config = TrainConfig(
            minutes=minutes, steps=steps, device=device, batch_size=batch_size, dropout=dropout, seed=seed
        )
        texts = split(parse(raw.read_text(encoding="ascii")))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    trained = train(config, texts, console)
    save(trained.model, out)
    result = figures(config, trained, texts, out)
    (out / "training.json").write_text(json.dumps(result, indent=2) + "\n", encoding="ascii")
    console.print(f"held out {result['heldout_loss']} nats per byte; saved in {out}")


if __name__ == "__main__":
    typer.run(main)
