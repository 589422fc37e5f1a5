"""What `run`, `generate` and `eval` share: starting ranks, loading the model, watching progress and time."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, StoppingCriteria
from transformers.utils import logging as transformers_logging

from ep_moe.config import EngineConfig, LaunchEnv
from ep_moe.engines.transformers import Session, from_pretrained, loading
from ep_moe.group import EPGroup
from ep_moe.launch import launch, run_rank
from ep_moe.weights import Checkpoint

Model = Any  # a transformers model; its mixins are more than a type checker can follow

SHIPPED_MODEL = Path(__file__).parent / "model"
PRELOAD = ("ep_moe.app.run", "ep_moe.app.generate", "ep_moe.app.eval")  # what ranks run, and transformers with it


def model_dir(engine: EngineConfig) -> Path:
    """The directory of the model: the shipped one where the config names none."""
    return Path(engine.model) if engine.model else SHIPPED_MODEL


def open_model(engine: EngineConfig) -> Checkpoint:
    """Read the headers of the model's directory, before ranks start: what is not read in it is the caller's mistake.

    Errors: ValueError as of `Checkpoint.open`. Local.
    """
    return Checkpoint.open(model_dir(engine))


def pick_device(engine: EngineConfig, num_local_ranks: int) -> str:
    """Return "cuda" or "cpu" for the ranks of this machine.

    Errors: RuntimeError where CUDA is asked for and this machine has fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count()
    if engine.device == "auto":
        return "cuda" if num_gpus >= num_local_ranks else "cpu"
    if engine.device == "cuda" and num_gpus < num_local_ranks:
        raise RuntimeError(f"device cuda needs a GPU for each of {num_local_ranks} ranks, this machine has {num_gpus}")
    return engine.device


def on_ranks(target: Callable[..., dict[str, Any]], engine: EngineConfig, *args: Any) -> dict[str, Any]:
    """Run `target(group, engine, *args)` on every rank and return rank 0's report.

    Starts `engine.nproc` ranks on this machine; under torchrun this process is one of them and gets its own report,
    which `target` makes the same on all ranks.
    """
    env = LaunchEnv.from_environ()
    if env is None:
        device = pick_device(engine, engine.nproc)
        preload = PRELOAD if device == "cpu" else ()  # CUDA that an import has touched would not survive the fork
        return launch(
            target, engine, *args, num_ranks=engine.nproc, config=engine.group, device=device, preload=preload
        )[0]
    device = pick_device(engine, env.local_world_size)
    return run_rank(target, engine, *args, config=engine.group, device=device)


def is_first_rank() -> bool:
    """True in the one process that prints: not under torchrun, or rank 0 of it."""
    env = LaunchEnv.from_environ()
    return env is None or env.rank == 0


def load_expert_parallel(group: EPGroup, engine: EngineConfig) -> tuple[Model, Session]:
    """Load the model with this rank's experts only; returns the model and what spreads its experts. Collective."""
    model: Model = from_pretrained(
        model_dir(engine),
        group,
        dtype=engine.torch_dtype,
        transport=engine.transport,
        experts=engine.experts,
        placement=engine.placement,
        scheme=None if engine.scheme == "auto" else engine.scheme,
        layout=engine.layout,
        max_tokens_per_rank=engine.max_tokens_per_rank,
    )
    session = model.ep_moe
    assert isinstance(session, Session)
    return model, session


def load_whole(group: EPGroup, engine: EngineConfig) -> Model:
    """Load the whole model with transformers' own eager experts, what expert parallelism is compared with. Local.

    What is fp8 on disk is dequantised to the model's dtype by our own reader; else transformers reads it too.
    """
    checkpoint = open_model(engine)
    if checkpoint.scheme is not None:
        return loading.load_whole(checkpoint, engine.torch_dtype, group.device)
    transformers_logging.disable_progress_bar()  # of each rank, one over the other
    model: Model = AutoModelForCausalLM.from_pretrained(
        model_dir(engine), experts_implementation="eager", dtype=engine.torch_dtype
    )
    return model.to(group.device).eval()


def load_tokenizer(engine: EngineConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer. Errors: ValueError names a directory that has none."""
    try:
        return AutoTokenizer.from_pretrained(model_dir(engine))
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{model_dir(engine)} has no tokenizer that transformers can load: {reason}") from error


class PhaseClock:
    """Adds up the seconds of named phases. On CUDA each phase ends with a device sync, so it slows what it measures."""

    def __init__(self, device: torch.device) -> None:
        self.secs: dict[str, float] = collections.defaultdict(float)
        self._device = device

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.secs[name] += time.perf_counter() - start


class FinishRank(StoppingCriteria):
    """Stops a rank after its own number of new tokens or at an end token, and has it send no tokens from then on."""

    def __init__(
        self,
        session: Session,
        *,
        prompt_tokens: int,
        new_tokens: int,
        end_ids: tuple[int, ...] = (),
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self._session = session
        self._prompt_tokens, self._new_tokens, self._end_ids = prompt_tokens, new_tokens, end_ids
        self._on_step = on_step

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Tell transformers which rows are done; one row is all that a rank generates at a time."""
        del scores, kwargs
        made = input_ids.shape[1] - self._prompt_tokens
        done = made >= self._new_tokens or int(input_ids[0, -1]) in self._end_ids
        if done:
            self._session.idle = True
        if self._on_step is not None:
            self._on_step()
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)


def progress_bar(group: EPGroup) -> Progress:
    """A progress display on standard error, shown by rank 0 alone."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=group.rank != 0,
    )


def start_task(progress: Progress, label: str, total: int) -> TaskID:
    """Add a task of `total` steps; where no terminal shows a bar, a log gets a line."""
    if not progress.disable and not progress.console.is_terminal:
        progress.console.print(label)
    return progress.add_task(label, total=total)
