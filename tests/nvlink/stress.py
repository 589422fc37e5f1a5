"""Random rounds, each compared bit for bit on the device with its own reference: in the interpreter and on GPUs.

Letters: T tokens on this rank. No host sync between two reads of the error counts.
"""

import dataclasses
import random
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ep_moe.config import Layout, TransportConfig
from ep_moe.group import EPGroup
from ep_moe.kernels.exchange import round_state
from ep_moe.layout import ExpertBatch
from ep_moe.placement import Placement
from ep_moe.quant import get_scheme
from ep_moe.routing import Routing
from ep_moe.transport import Dispatched, create_transport
from ep_moe.transport.one_sided import NvlinkTransport
from nvlink.reference import WRONG, Inputs, compute, count_wrong, expected_output, raw

_RESULT = ("first_wrong_round", "token", "columns", "largest_difference")
BEFORE_THE_WRAP = -3  # the first rounds are -2, -1 and 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StressConfig:
    """Number and kinds of rounds.

    Args:
        rounds: in all. shapes: number of compiled shapes.
        look_every: rounds between two reads of the error counts.
        delay: the longest pause of a rank, in seconds on a CPU, in clock cycles on a GPU.
        num_graphs: CUDA graphs that are replayed between eager rounds.
        room: max_tokens_per_rank, of which rounds with a bound use a part.
        transport: by name: a one-sided one or `hierarchical`, on nodes of one rank. options: of its TransportConfig.
        most_gathered: of `hierarchical`; rounds by relays cannot be in CUDA graphs.
    """

    rounds: int
    transport: str = "peer"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    most_gathered: int = 0
    hidden: int = 16
    max_tokens: int = 3
    room: int = 40
    num_experts: int = 5
    max_topk: int = 3
    shapes: int = 20
    schemes: tuple[str, ...] = ("none", "fp8_block", "fp8_token", "mxfp8")
    look_every: int = 1
    delay: float = 0.003
    num_graphs: int = 0
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The parameters of one set of kernels; tuples are by rank."""

    scheme: str
    num_topk: int
    rows: tuple[int, ...]
    layouts: tuple[Layout, ...]
    counted: bool  # with `num_tokens` on the device
    shared: bool
    id_dtype: torch.dtype
    bound: int | None  # `max_num_tokens`

    @classmethod
    def at_random(cls, config: StressConfig, rng: random.Random, num_ranks: int) -> "Shape":
        """Any shape that the config allows."""
        return cls(
            scheme=rng.choice(config.schemes),
            num_topk=rng.randint(1, config.max_topk),
            rows=tuple(rng.randint(0, config.max_tokens) for _ in range(num_ranks)),
            layouts=tuple(rng.choice(list(Layout)) for _ in range(num_ranks)),
            counted=rng.random() < 0.5,
            shared=rng.random() < 0.3,
            id_dtype=rng.choice((torch.int32, torch.int64)),
            bound=rng.choice((None, rng.randint(config.max_tokens, config.room))),
        )


class Stress:
    """One rank's part."""

    def __init__(self, group: EPGroup, config: StressConfig) -> None:
        self._config, self._rank, self._num_ranks, self._device = config, group.rank, group.num_ranks, group.device
        self._placement = Placement.linear(config.num_experts, group.num_ranks)
        self._first, self._last = self._placement.starts[group.rank : group.rank + 2]
        sizes = TransportConfig(
            hidden=config.hidden,
            max_tokens_per_rank=config.room,
            max_topk=config.max_topk,
            row_alignment=4,
            **config.options,
        )
        self._sizes, self.transport = sizes, create_transport(config.transport, group, self._placement, sizes)
        self._one_sided = isinstance(self.transport, NvlinkTransport)
        if self._one_sided:
            self._begin_before_the_wrap()
        else:
            self.transport.most_gathered = config.most_gathered
        group.barrier()
        rng = random.Random(f"{config.seed}/shapes")
        self.shapes = [Shape.at_random(config, rng, group.num_ranks) for _ in range(config.shapes)]
        self._generator = torch.Generator(group.device)
        self._wrong = torch.zeros(len(WRONG) + 1, dtype=torch.int64, device=group.device)
        self._first_wrong = torch.full((4,), -1.0, dtype=torch.float64, device=group.device)  # as `_RESULT` says
        self._refused = False  # a round since the last look
        self._done: list[tuple[int, Shape]] = []  # since the last look
        self._graphs = [
            Graph(self, slot=index % 2, shape=self._graph_shape(index)) for index in range(config.num_graphs)
        ]

    def _begin_before_the_wrap(self) -> None:
        """Set the epochs of all slots to just before they wrap."""
        for slot in self.transport._states.slots:
            for name in ("DONE", "BEGUN", "RESUME"):
                if hasattr(round_state, name):
                    slot.state_ptr[getattr(round_state, name).value] = BEFORE_THE_WRAP

    def _graph_shape(self, index: int) -> Shape:
        """The most rows, with `num_tokens` on the device; layouts take turns."""
        rng = random.Random(f"{self._config.seed}/graph/{index}")
        layout = list(Layout)[index % len(Layout)]
        return dataclasses.replace(
            Shape.at_random(self._config, rng, self._num_ranks),
            rows=(self._config.max_tokens,) * self._num_ranks,
            layouts=(layout,) * self._num_ranks,
            counted=True,
        )

    def run(self) -> int:
        """Do all rounds; returns how many. Errors: AssertionError says what differs, since when. Collective."""
        number, looked = 0, 0
        while number < self._config.rounds:
            rng = random.Random(f"{self._config.seed}/{number}")  # alike on all ranks
            kind = rng.random()
            if self._graphs and kind < 0.5:
                rng.choice(self._graphs).replay(number)
            elif kind < 0.9:
                culprit = rng.randrange(self._num_ranks) if rng.random() < 0.1 else None
                self.one(number, rng.choice(self.shapes), rng.randrange(2), culprit)
            else:
                self._two_open(number, rng)
                number += 1
            number += 1
            if number - looked >= self._config.look_every or number >= self._config.rounds:
                self.look(looked, number)
                looked = number
        return number

    def look(self, first: int, last: int) -> None:
        """Raise AssertionError if any of rounds `first` to `last` - 1 was wrong. Local, host sync."""
        said = ""
        try:
            self.transport.check()
        except ValueError as error:
            said = str(error)
        assert ("topk_ids has" in said) == self._refused, said
        self._refused = False
        found = dict(zip((*WRONG, "result"), self._wrong.tolist(), strict=True))
        if any(found.values()):
            result = dict(zip(_RESULT, self._first_wrong.tolist(), strict=True))
            rounds = "\n".join(f"round {number}: {shape}" for number, shape in self._done)
            raise AssertionError(f"rounds {first} to {last} on rank {self._rank}: {found}, {result}\n{rounds}")
        self._done.clear()

    def one(self, number: int, shape: Shape, slot: int, culprit: int | None = None) -> None:
        """One round; each rank calls halves or both at once. Collective, no host sync.

        culprit: a rank whose first token, if it has one, makes all ranks refuse the round.
        """
        own = random.Random(f"{number}/{self._rank}")
        inputs = self.make_inputs(number, shape)
        refused = culprit is not None and inputs.tokens[culprit] > 0
        if refused:
            inputs.ids[culprit, 0, 0] = 10**6
            if not self._one_sided:  # which waits for the headers of all ranks
                with pytest.raises(ValueError, match="topk_ids has"):
                    self._dispatch(inputs, shape, slot, own)
                return
        dispatched = self._dispatch(inputs, shape, slot, own)
        if not refused:
            self._check_batch(slot, dispatched.batch, inputs, shape)
        self._pause(own)
        y = compute(dispatched.batch, self._first)
        out = self._out(shape)
        shared = inputs.shared[: shape.rows[self._rank]] if shape.shared else None
        if own.random() < 0.5:
            self.transport.combine(y, dispatched, shared=shared, out=out)
        else:
            self.transport.combine_send(y, dispatched)
            self._pause(own)
            self.transport.combine_recv(dispatched, shared=shared, out=out)
        if refused:
            self._refused = True
            self._wrong[-1] += (~out.isnan()).sum()
        else:
            self.check_result(number, out, inputs, shape)

    def _dispatch(self, inputs: Inputs, shape: Shape, slot: int, own: random.Random) -> Dispatched:
        options = self.call(inputs, shape, slot)
        self._pause(own)
        if own.random() < 0.5:
            return self.transport.dispatch(**options)
        self.transport.dispatch_send(**options)
        self._pause(own)
        return self.transport.dispatch_recv(slot=slot)

    def _two_open(self, number: int, rng: random.Random) -> None:
        """Two rounds on two slots, in opposite order on even and odd ranks if a send never waits."""
        shapes = [rng.choice(self.shapes) for _ in range(2)]
        inputs = [self.make_inputs(number + slot, shape) for slot, shape in enumerate(shapes)]
        order = (1, 0) if self._one_sided and self._rank % 2 else (0, 1)
        own = random.Random(f"{number}/{self._rank}")
        for slot in order:
            self.transport.dispatch_send(**self.call(inputs[slot], shapes[slot], slot))
            self._pause(own)
        opened = {slot: self.transport.dispatch_recv(slot=slot) for slot in order}
        for slot in order:
            self._check_batch(slot, opened[slot].batch, inputs[slot], shapes[slot])
            self.transport.combine_send(compute(opened[slot].batch, self._first), opened[slot])
        for slot in reversed(order):
            out = self._out(shapes[slot])
            self.transport.combine_recv(opened[slot], out=out)
            self.check_result(number + slot, out, inputs[slot], dataclasses.replace(shapes[slot], shared=False))

    def call(self, inputs: Inputs, shape: Shape, slot: int) -> dict[str, Any]:
        """The arguments of a dispatch; rows beyond the tokens hold ids that no rank owns."""
        rank, rows = self._rank, shape.rows[self._rank]
        ids = inputs.ids[rank, :rows].to(shape.id_dtype)
        count = torch.full((1,), inputs.tokens[rank], dtype=torch.int32, device=self._device)
        return {
            "x": inputs.x[rank, :rows],
            "routing": Routing(topk_ids=ids, topk_weights=inputs.weights[rank, :rows]),
            "layout": shape.layouts[rank],
            "scheme": get_scheme(shape.scheme),
            "slot": slot,
            "num_tokens": count if shape.counted else None,
            "max_num_tokens": shape.bound,
        }

    def make_inputs(self, number: int, shape: Shape) -> Inputs:
        """The inputs of a round, by its number."""
        config, (ranks, most) = self._config, (self._num_ranks, self._config.max_tokens)
        rng = random.Random(f"{config.seed}/inputs/{number}")
        self._generator.manual_seed(config.seed * 1_000_003 + number)
        like: dict[str, Any] = {"generator": self._generator, "device": self._device}
        style = rng.choice(("any", "any", "any", "one_expert", "one_rank", "none"))
        bounds = {"any": (-1, config.num_experts), "none": (-1, 0)}
        expert, rank = rng.randrange(config.num_experts), rng.randrange(ranks)
        bounds |= {"one_expert": (expert, expert + 1), "one_rank": tuple(self._placement.starts[rank : rank + 2])}
        ids = torch.randint(*bounds[style], (ranks, most, shape.num_topk), **like)
        tokens = tuple(rng.randint(0, rows) if shape.counted else rows for rows in shape.rows)
        for source, count in enumerate(tokens):
            ids[source, count:] = 10**6
        return Inputs(
            x=torch.randn(ranks, most, config.hidden, **like).to(self._sizes.dtype),
            ids=ids,
            weights=torch.rand(ranks, most, shape.num_topk, **like) + 0.1,
            shared=torch.randn(most, config.hidden, **like).to(self._sizes.dtype),
            tokens=tokens,
        )

    def _out(self, shape: Shape) -> torch.Tensor:
        size = (shape.rows[self._rank], self._config.hidden)
        return torch.full(size, float("nan"), dtype=self._sizes.dtype, device=self._device)

    def _pause(self, own: random.Random) -> None:
        """Sometimes fall behind the other ranks."""
        if own.random() < 0.8:
            return
        length = own.random() * self._config.delay
        if self._device.type == "cuda":
            torch.cuda._sleep(int(length))
        else:
            time.sleep(length)

    def _check_batch(self, slot: int, batch: ExpertBatch, inputs: Inputs, shape: Shape) -> None:
        self._wrong[:-1] += count_wrong(
            batch,
            self.transport._states.slots[slot] if self._one_sided else None,
            inputs,
            first=self._first,
            last=self._last,
            layout=shape.layouts[self._rank],
            alignment=self._sizes.row_alignment,
        )

    def check_result(self, number: int, out: torch.Tensor, inputs: Inputs, shape: Shape) -> None:
        """Count the tokens whose result differs, and keep the first one of them."""
        rows, rank = shape.rows[self._rank], self._rank
        self._done.append((number, shape))
        scheme = get_scheme(shape.scheme)
        expected = expected_output(inputs, rank, self._placement, scheme=scheme, shared=shape.shared)[:rows]
        differs = (raw(out) != raw(expected)).any(1)
        token = torch.arange(rows, device=self._device)
        differs &= token < inputs.tokens[rank]
        self._wrong[-1] += differs.sum()
        if rows:
            first = differs.int().argmax()
            distance = (out[first].double() - expected[first].double()).abs()
            told = torch.stack(
                (torch.full_like(distance[0], number), first.double(), (distance > 0).sum(), distance.max())
            )
            self._first_wrong = torch.where((self._first_wrong[0] < 0) & differs.any(), told, self._first_wrong)


class Graph:
    """A round of one shape in a CUDA graph, replayed with other tokens, counts and ids."""

    def __init__(self, stress: Stress, *, slot: int, shape: Shape) -> None:
        self._stress, self._shape = stress, shape
        inputs = stress.make_inputs(0, shape)
        self._call = stress.call(inputs, shape, slot)
        self._call["x"] = self._call["x"].clone()
        routing = self._call["routing"]
        self._call["routing"] = Routing(topk_ids=routing.topk_ids.clone(), topk_weights=routing.topk_weights.clone())
        self._shared, self._out = inputs.shared.clone(), stress._out(shape)
        self._round()  # compiles
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # NCCL's thread queries events
            self._round()

    def _round(self) -> None:
        transport = self._stress.transport
        dispatched = transport.dispatch(**self._call)
        y = compute(dispatched.batch, self._stress._first)
        transport.combine(y, dispatched, shared=self._shared if self._shape.shared else None, out=self._out)

    def replay(self, number: int) -> None:
        """One round."""
        inputs = self._stress.make_inputs(number, self._shape)
        fresh = self._stress.call(inputs, self._shape, 0)
        self._call["x"].copy_(fresh["x"])
        self._call["routing"].topk_ids.copy_(fresh["routing"].topk_ids)
        self._call["routing"].topk_weights.copy_(fresh["routing"].topk_weights)
        self._call["num_tokens"].copy_(fresh["num_tokens"])
        self._shared.copy_(inputs.shared)
        self._out.fill_(float("nan"))
        self._graph.replay()
        self._stress.check_result(number, self._out, inputs, self._shape)


def stress(group: EPGroup, config: StressConfig) -> int:
    """Do the rounds on this rank; returns how many. Collective."""
    run = Stress(group, config)
    done = run.run()
    group.barrier()
    run.transport.destroy()
    run._graphs.clear()  # NCCL ends a communicator once no graph holds its operations
    return done
