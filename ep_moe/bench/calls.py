"""`ep-moe bench calls`: the calls of `ep_moe.functional` at the sizes of models, checked and timed beside torch.

Torch's way: argsort, two `grouped_mm` in bfloat16 with the activation between them, and `index_add_`, without routing.
Letters: T tokens, H hidden, I intermediate, K top-k, E experts, N rows.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import grouped_mm

from ep_moe.bench import harness
from ep_moe.bench.configs import CALL_CASES, CallsBenchConfig
from ep_moe.bench.grouped import DTYPE, gated
from ep_moe.bench.harness import Contender, Work, field_values
from ep_moe.bench.presets import LAYER_PRESETS
from ep_moe.config import ActivationConfig, ActivationKind, EngineConfig, MoEConfig, RoutingConfig, RoutingMethod
from ep_moe.experts import create_experts
from ep_moe.functional.flashinfer import b12x_fused_moe, trtllm_fp4_block_scale_moe
from ep_moe.functional.sglang import (
    invoke_fused_moe_kernel,
    moe_align_block_size,
    outplace_fused_experts,
    routing_from_topk,
    triton_kernel_fused_experts,
    triton_kernel_fused_experts_with_bias,
    try_get_optimal_moe_config,
)
from ep_moe.functional.vllm import BatchedTritonExperts, invoke_moe_batched_triton_kernel
from ep_moe.group import EPGroup
from ep_moe.local_moe import local_moe
from ep_moe.profiling.timing import medians, spread, time_calls
from ep_moe.quant import StoredMatrix, dequantize_weight, get_scheme
from ep_moe.report.records import OURS
from ep_moe.routing import Routing, route
from ep_moe.weights import ExpertWeights

TORCH = "torch"
PLAIN_LIMIT, FP8_LIMIT, FP4_LIMIT = 2e-2, 1e-1, 3e-1  # of row errors, by the format of tokens: torch's are bfloat16
GROUP = 128  # columns that share a scale and a zero point of 4-bit integers
IN_A_ROW = 8  # calls without a wait between them
SILU = ActivationConfig()
ALPHA, BETA, LIMIT = 1.702, 1.0, 7.0  # of gpt-oss
SWIGLU = ActivationConfig(kind=ActivationKind.SWIGLU, alpha=ALPHA, beta=BETA, limit=LIMIT)
Call = Callable[[], torch.Tensor]


class Case(NamedTuple):
    """A call, and torch's way to compute the same rows."""

    name: str
    ours: Call
    theirs: Call
    limit: float = PLAIN_LIMIT


class Matrix(NamedTuple):
    """A weight [E, N, K] as it is stored, its scales, and the same in bfloat16."""

    values: torch.Tensor
    scale: Any
    plain: torch.Tensor


def calls_rank_main(group: EPGroup, engine: EngineConfig, config: CallsBenchConfig) -> dict[str, Any]:
    """Measure on the only rank. Returns the report: `ok`, and a row for each call.

    Stops at the first wrong result, which is not timed. Host sync.
    """
    del engine
    alone = EPGroup.single(group.device)
    torch.manual_seed(config.seed)

    def cases() -> Iterator[tuple[str, int, Case]]:
        for name in config.case:
            made = _Calls(*CALL_CASES[name], device=group.device)
            for tokens in config.tokens:
                yield from ((name, tokens, case) for case in made.cases(tokens, others=config.others))

    return harness.measure_all("calls", alone, cases(), lambda point, _: _work(alone, config, *point))


def _work(group: EPGroup, config: CallsBenchConfig, name: str, tokens: int, case: Case) -> Work:
    preset, scheme = CALL_CASES[name]
    every = torch.arange(len(case.theirs()), device=group.device)
    same: dict[str, Any] = {"sample": every, "expected": lambda: case.theirs().float(), "limit": case.limit}
    contenders = {OURS: Contender(call=case.ours, **same), TORCH: Contender(call=case.theirs, **same)}
    run = field_values(config, "warmup", "repeats")

    def time(system: str) -> dict[str, float]:
        made = contenders[system]
        figures = spread("call", time_calls(made.graph.replay if made.graph else made.call, group, **run))
        if system != OURS:
            return figures
        row = time_calls(lambda: [made.call() for _ in range(IN_A_ROW)], group, **run, by="host")
        host = time_calls(made.call, group, **run, by="host")
        return figures | medians({"host": host, "host_in_a_row": [us / IN_A_ROW for us in row]})

    return Work(
        what=f"{name}, {case.name}, {tokens} tokens",
        shapes={"preset": preset, "call": case.name, "tokens": tokens},
        setup={"scheme": scheme, **field_values(config, "seed", "warmup", "repeats")},
        check=functools.partial(harness.check, group, contenders, graph=group.device.type == "cuda"),
        time=time,
        limit=case.limit,
    )


class _Calls:
    """The weights of a preset's layer in a scheme, and the calls that compute them."""

    def __init__(self, preset: str, scheme: str, *, device: torch.device) -> None:
        self._sizes, self._scheme, self._device = LAYER_PRESETS[preset].sizes, scheme, device
        hidden, inner = self._sizes.hidden, self._sizes.intermediate
        self._w1, self._w2 = self._stored(2 * inner, hidden), self._stored(hidden, inner)

    def cases(self, tokens: int, *, others: bool) -> Iterator[Case]:
        """The call that an engine makes for these weights; with `others` also less usual ones."""
        logits = torch.rand(tokens, self._sizes.num_experts, device=self._device)
        self._factors, ids = logits.topk(_routing(self._sizes).num_topk)
        self._ids, self._x = ids.int(), self._normal(tokens, self._sizes.hidden)
        fp4 = "fp4" in self._scheme
        yield self._trtllm() if fp4 else self._fused()
        if not others:
            return
        if self._scheme.startswith("nvfp4"):
            yield from (self._b12x(mode) for mode in ("w4a16", "nvfp4"))
        if not self._scheme.startswith(("nvfp4", "fp8")):
            yield self._with_bias()
        if self._scheme == "none":
            yield from self._paths()
            yield from self._local()
            yield from self._single_gemms()

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).to(DTYPE)

    def _stored(self, rows: int, columns: int) -> Matrix:
        """A random weight."""
        experts, device, scale = self._sizes.num_experts, self._device, None
        plain = torch.empty(experts, rows, columns, dtype=DTYPE, device=device)
        if self._scheme == "none":
            return Matrix(plain.normal_(std=0.03), None, plain)
        if self._scheme.startswith("fp8"):
            values = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=device)
            scale = torch.rand(experts, -(-rows // 128), -(-columns // 128), device=device) * 1e-3 + 1e-3
            for expert in range(experts):
                values[expert] = (30 * torch.randn(rows, columns, device=device)).to(values.dtype)
        else:
            values = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
            if self._scheme.startswith("mxfp4"):
                codes = torch.randint(119, 123, (experts, rows, columns // 32), dtype=torch.uint8, device=device)
                scale = codes.view(torch.float8_e8m0fnu)
            else:
                scale = torch.rand(experts, rows, columns // 16, device=device) * 0.02 + 0.01
                scale = scale.to(torch.float8_e4m3fn)
        one = torch.ones(experts, device=device) if self._scheme.startswith("nvfp4") else None
        matrix = StoredMatrix(values, scale=scale, global_scale=one)
        for expert in range(experts):
            plain[expert] = dequantize_weight(matrix[expert], get_scheme(self._scheme))
        return Matrix(values, scale, plain)

    def _expected(
        self,
        between: Callable[[torch.Tensor], torch.Tensor] = lambda rows: gated(rows.chunk(2, dim=-1), SILU),
        *,
        plain: tuple[torch.Tensor, torch.Tensor] | None = None,
        routing: Routing | None = None,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        on_input: bool = False,
        combined: bool = True,
    ) -> torch.Tensor:
        """Two grouped GEMMs of routed tokens, and the weighted sum [T, H] or all weighted rows [T * K, H]."""
        w1, w2 = plain or (self._w1.plain, self._w2.plain)
        ids, factors = (routing.topk_ids, routing.topk_weights) if routing else (self._ids, self._factors)
        flat = ids.reshape(-1)
        order = torch.argsort(flat)
        token, expert = order // ids.shape[1], flat[order]
        counts = torch.zeros(len(w1), dtype=torch.int32, device=flat.device)
        ends = counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int32)).cumsum(0).int()
        factor = factors.reshape(-1)[order].to(DTYPE)[:, None]
        first = grouped_mm(self._x[token] * factor if on_input else self._x[token], w1.transpose(1, 2), offs=ends)
        if biases is not None:
            first += biases[0][expert]
        y = grouped_mm(between(first), w2.transpose(1, 2), offs=ends)
        if biases is not None:
            y += biases[1][expert]
        y = y if on_input else y * factor
        if combined:
            return torch.zeros_like(self._x).index_add_(0, token, y)
        return torch.empty_like(y).index_copy_(0, order, y)

    def _trtllm(self) -> Case:
        """FlashInfer's FP4 call: biases and a limit for gpt-oss, output scales for DeepSeek-V3."""
        sizes, config, device = self._sizes, _routing(self._sizes), self._device
        experts, inner = sizes.num_experts, sizes.intermediate
        logits, one = torch.randn(len(self._x), experts, device=device), torch.ones(experts, device=device)
        none: Any = (None, None, None)
        vector, biases, numbers, scales, groups, factor = none[0], none[:2], none, none, none[:2], none[0]
        deepseek = config.method is RoutingMethod.DEEPSEEK_V3
        if deepseek:
            scales, vector = (0.9 * one, 1.1 * one, 0.8 * one), torch.rand(experts, device=device)
            groups, factor = (config.num_group, config.topk_group), config.routed_scaling_factor
        else:
            biases = tuple(torch.randn(experts, rows, device=device) for rows in (2 * inner, sizes.hidden))
            numbers = ALPHA * one, BETA * one, LIMIT * one
        w1, w2 = self._w1, self._w2
        ours = functools.partial(
            trtllm_fp4_block_scale_moe,
            *(logits, vector, self._x, None, w1.values, w1.scale, biases[0], *numbers, w2.values, w2.scale, biases[1]),
            *(*scales, experts, config.num_topk, *groups, inner, 0, experts, factor, int(config.method)),
        )
        routing = route(logits, config, routing_bias=vector)
        narrow = None if biases[0] is None else tuple(bias.to(DTYPE) for bias in biases)
        if deepseek:
            routing = Routing(topk_ids=routing.topk_ids, topk_weights=routing.topk_weights * 0.8)

        def between(rows: torch.Tensor) -> torch.Tensor:
            up, gate = rows.chunk(2, dim=-1)
            return gated((gate * 1.1, up), SILU).mul_(0.9) if deepseek else gated((gate, up), SWIGLU)

        return Case(
            "trtllm_fp4_block_scale_moe",
            lambda: ours()[0],
            lambda: self._expected(between, routing=routing, biases=narrow),
        )

    def _fused(self, what: str = "fused_experts", theirs: Call | None = None, **options: Any) -> Case:
        """SGLang's fused experts."""
        flags, limit = dict(options), PLAIN_LIMIT
        w1, w2 = flags.pop("w1", self._w1.values), flags.pop("w2", self._w2.values)
        if self._scheme.startswith("fp8"):
            flags |= {"use_fp8_w8a8": True, "block_shape": [128, 128]}
            flags |= {"w1_scale": self._w1.scale, "w2_scale": self._w2.scale}
            limit = FP8_LIMIT
        ours = functools.partial(outplace_fused_experts, self._x, w1, w2, self._factors, self._ids, **flags)
        return Case(what, lambda: ours().flatten(0, -2), theirs or self._expected, limit)

    def _paths(self) -> Iterator[Case]:
        """SGLang's fused experts with less usual arguments."""
        swiglu = functools.partial(self._expected, _alternating)
        yield self._fused("fused_experts, gemm1_alpha", swiglu, gemm1_alpha=ALPHA, gemm1_limit=LIMIT)
        rows = functools.partial(self._expected, combined=False)
        yield self._fused("fused_experts, no_combine", rows, no_combine=True, no_combine_keep_router_weight=True)
        on_input = functools.partial(self._expected, on_input=True)
        yield self._fused("fused_experts, weights on the input", on_input, apply_router_weight_on_input=True)
        flags: dict[str, Any] = {"use_int4_w4a16": True, "block_shape": [0, GROUP]}
        plain = []
        for name, matrix in (("w1", self._w1), ("w2", self._w2)):
            flags[name], flags[f"{name}_scale"], flags[f"{name}_zp"], values = self._zero_points(matrix.plain.shape)
            plain.append(values)
        integers = functools.partial(self._expected, plain=(plain[0], plain[1]))
        yield self._fused("fused_experts, zero points", integers, **flags)

    def _zero_points(self, shape: torch.Size) -> tuple[torch.Tensor, ...]:
        """A weight [E, N, K] of 4 bits around zero points of groups, as SGLang has it; last the same in bfloat16."""
        experts, rows, columns = shape
        values, zero = (
            torch.randint(0, 256, size, dtype=torch.uint8, device=self._device)
            for size in ((experts, rows, columns // 2), (experts, rows // 2, columns // GROUP))
        )
        scale = (torch.rand(experts, rows, columns // GROUP, device=self._device) * 0.01 + 0.002).to(DTYPE)
        codes = torch.stack([values & 15, values >> 4], 3).view(shape)
        points = torch.stack([zero & 15, zero >> 4], 2).view(experts, rows, -1)
        centered = codes.to(DTYPE) - points.to(DTYPE).repeat_interleave(GROUP, 2)
        return values, scale, zero, centered * scale.repeat_interleave(GROUP, 2)

    def _b12x(self, mode: str) -> Case:
        """FlashInfer's call for SM120, which takes NVFP4 weights and rounds tokens by `mode`."""
        one = torch.ones(self._sizes.num_experts, device=self._device)
        given: dict[str, Any] = {"w1_alpha": one, "w2_alpha": one, "fc2_input_scale": one[:1], "quant_mode": mode}
        weights = self._w1.values, self._w1.scale, self._w2.values, self._w2.scale
        routed = self._ids, self._factors, self._sizes.num_experts, self._ids.shape[1]
        expected = functools.partial(self._expected, lambda rows: gated(rows.chunk(2, dim=-1)[::-1], SILU))
        limit = FP4_LIMIT if mode == "nvfp4" else PLAIN_LIMIT
        ours = functools.partial(b12x_fused_moe, self._x, *weights, *routed, **given)
        return Case(f"b12x_fused_moe, {mode}", ours, expected, limit)

    def _with_bias(self) -> Case:
        """triton_kernels' call with biases, of weights in bfloat16 or MXFP4."""

        class Precision(NamedTuple):  # of triton_kernels' PrecisionConfig what is read
            b_mx_scale: torch.Tensor

        matrices = self._w1, self._w2
        biases = self._normal(*self._w1.plain.shape[:2]), self._normal(*self._w2.plain.shape[:2])
        weights: list[Any] = []
        for matrix, bias in zip(matrices, biases, strict=True):
            scale = None if matrix.scale is None else Precision(matrix.scale.view(torch.uint8).transpose(1, 2))
            weights += [matrix.values.transpose(1, 2), scale, bias]
        data = routing_from_topk(self._factors, self._ids, self._sizes.num_experts)
        options = {"gemm1_alpha": ALPHA, "gemm1_clamp_limit": LIMIT}
        call: Any = triton_kernel_fused_experts_with_bias
        ours = functools.partial(call, self._x, *weights, *data, **options)
        expected = functools.partial(self._expected, _alternating, biases=biases, combined=False)
        return Case("triton_kernel_fused_experts_with_bias", lambda: ours().flatten(0, -2), expected)

    def _local(self) -> Iterator[Case]:
        """`local_moe`, and triton_kernels' call without biases."""
        own = ExpertWeights(w13=StoredMatrix(self._w1.values), w2=StoredMatrix(self._w2.values))
        kernels = create_experts("auto", self._sizes.activation, self._device)
        routing = Routing(topk_ids=self._ids, topk_weights=self._factors)
        yield Case("local_moe", lambda: local_moe(self._x, routing, own, kernels), self._expected)
        data: Any = routing_from_topk(self._factors, self._ids, self._sizes.num_experts)
        turned = self._w1.values.transpose(1, 2), self._w2.values.transpose(1, 2)
        ours = functools.partial(triton_kernel_fused_experts, self._x, *turned, *data)
        rows = functools.partial(self._expected, combined=False)
        yield Case("triton_kernel_fused_experts", lambda: ours().flatten(0, -2), rows)

    def _single_gemms(self) -> Iterator[Case]:
        """SGLang's call of one GEMM, and vLLM's calls, in which each expert has a batch of rows, half of them used."""
        x, ids, w1, w2, experts = self._x, self._ids, self._w1.values, self._w2.values, self._sizes.num_experts
        config = try_get_optimal_moe_config(w1.shape, w2.shape, ids.shape[1], None, len(x))
        lists = moe_align_block_size(ids, config["BLOCK_SIZE_M"], experts)
        out = torch.empty(*ids.shape, w1.shape[1], dtype=DTYPE, device=x.device)

        def one_gemm() -> torch.Tensor:
            factors = (None, None, None, self._factors, ids, *lists, False, ids.shape[1], config)
            invoke_fused_moe_kernel(x, w1, None, out, *factors, DTYPE, False, False, False, False, False)
            return out[0]

        rows_of = lambda: torch.einsum("h,knh->kn", x[0].float(), w1[ids[0].long()].float())  # noqa: E731
        yield Case("invoke_fused_moe_kernel", one_gemm, rows_of)

        height = max(4 * len(x) // experts, 2)
        used = height // 2
        rows, counts = self._normal(experts, height, x.shape[1]), torch.full_like(ids.new_empty(experts), used)
        y, wide = torch.zeros_like(rows), rows.new_zeros(experts, height, w1.shape[1])
        batched = BatchedTritonExperts(height, 1)
        given: dict[str, Any] = {"output": y, "hidden_states": rows, "w1": w1, "w2": w2, "activation": "silu"}
        given |= {"topk_ids": ids.new_zeros(experts * used, 1), "global_num_experts": experts, "workspace13": y}
        given |= dict.fromkeys(("expert_map", "w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1q_scale", "a2_scale"))

        def both() -> torch.Tensor:
            batched.apply(**given, workspace2=y, expert_num_tokens=counts)
            return y[0, :used]

        def first() -> torch.Tensor:
            flags = (None, None, None, False, False, False, config, False)
            invoke_moe_batched_triton_kernel(rows, w1, wide, counts, DTYPE, *flags)
            return wide[0, :used]

        of_one = lambda: rows[0, :used] @ w1[0].t()  # noqa: E731
        yield Case("BatchedTritonExperts", both, lambda: gated(of_one().chunk(2, dim=-1), SILU) @ w2[0].t())
        yield Case("invoke_moe_batched_triton_kernel", first, of_one)


def _routing(sizes: MoEConfig) -> RoutingConfig:
    assert sizes.routing is not None  # every preset has one
    return sizes.routing


def _alternating(rows: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation of gate and up in alternating columns."""
    return gated((rows[:, ::2].contiguous(), rows[:, 1::2].contiguous()), SWIGLU)
