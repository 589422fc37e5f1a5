"""A stand-in for the module `deep_ep`, over gloo: real signatures and checks, and data that arrives in any order.

Signatures are those of DeepEP 2.1's `buffers/legacy.py` and `buffers/elastic.py`, which `test_deepep_sources` compares
with the real files. Checks are the conditions that the library asserts on the host, or traps on in its kernels, as far
as they can be seen on a CPU. What the library leaves undefined is NaN here; rows that it may deliver in any order are
shuffled. Operations run in a thread of their own on a process group of their own, as kernels run beside the host:
`low_latency_*` with a hook return at once, and their tensors are filled when the hook is called.

Letters: T tokens on this rank, N received rows, K top-k, H hidden, R ranks, E experts, L = E / R, M tokens of a rank.
"""

import concurrent.futures
import math
import zlib
from typing import Any

import torch
import torch.distributed as dist

__version__ = "2.1.0"
topk_idx_t = torch.int64
WIDTHS = (2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192)
calls: list[tuple[str, dict[str, Any]]] = []  # operations of this process, for tests


class HostAssertionError(RuntimeError):
    """What the library raises for a condition that does not hold."""


def require(condition: bool, text: str) -> None:
    """EP_HOST_ASSERT."""
    if not condition:
        raise HostAssertionError(f"DeepEP: {text}")


def check_torch_deterministic() -> None:
    """The library's check of the same name."""
    settings: Any = torch.utils.deterministic
    assert not (torch.are_deterministic_algorithms_enabled() and settings.fill_uninitialized_memory)


def _matrix(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    require(tensor.dim() == 2 and tensor.is_contiguous(), f"{name} must be 2-D and contiguous")
    require(tensor.dtype == dtype, f"{name} is {tensor.dtype}, not {dtype}")


def _nan(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    fill = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(shape, fill, dtype=torch.float32 if dtype.itemsize == 1 else dtype).to(dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[n, ...] as [n, bytes]."""
    count = tensor.shape[0]
    width = tensor[:1].numel() * tensor.element_size() if count else 0
    return (
        tensor.contiguous().reshape(-1).view(torch.uint8).reshape(count, width)
        if count
        else torch.empty(0, 0, dtype=torch.uint8)
    )


class Config:
    """Sizes of the normal kernels' queues."""

    def __init__(self, num_sms: int, nvl_send: int, nvl_recv: int, rdma_send: int, rdma_recv: int) -> None:
        self.num_sms, self.nvl_recv = num_sms, nvl_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the queues of a node."""
        ids, weights, scales = 128 * 8, 128 * 4, 128 * 4
        return (self.num_sms // 2) * num_ranks * self.nvl_recv * (hidden_bytes + ids + weights + scales)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the queues between nodes."""
        require(num_ranks % 8 == 0, "ranks are whole nodes")
        return hidden_bytes * num_ranks


class EventOverlap:
    """An event; `fill` completes the tensors of an operation that it stands behind."""

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Wait for the operation."""
        assert self.event is not None
        self.event()


class _Wire:
    """Rows between ranks, in the order of calls, in a thread."""

    def __init__(self, group: Any) -> None:
        self.rank, self.num_ranks = group.rank(), group.size()
        self.group = dist.new_group(backend="gloo")
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.alive = True
        self.random = torch.Generator().manual_seed(self.rank)

    def begin(self, name: str, sizes: tuple[int, ...], rows: torch.Tensor, rank: torch.Tensor) -> Any:
        """Send `rows` [n, bytes] to `rank` [n]; returns the future of rows and their source ranks.

        Ranks must be in the same operation with the same sizes.
        """
        require(self.alive, "the buffer is destroyed")
        calls.append((name, {"sizes": sizes, "rows": len(rows)}))
        order = torch.argsort(rank, stable=True)
        return self.thread.submit(self._swap, zlib.crc32(repr((name, sizes)).encode()), rows[order], rank[order])

    def _swap(self, operation: int, rows: torch.Tensor, rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.bincount(rank, minlength=self.num_ranks)
        width = torch.full_like(counts, rows.shape[1])
        mine = torch.stack([torch.full_like(counts, operation), counts, width], dim=1)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        require(bool((theirs[:, 0] == operation).all()), "ranks are in different operations, or of different sizes")
        width = int(torch.cat([theirs[:, 2], width]).max())
        received = torch.empty(int(theirs[:, 1].sum()), width, dtype=torch.uint8)
        outgoing = rows if len(rows) else torch.empty(0, width, dtype=torch.uint8)
        dist.all_to_all_single(received, outgoing, theirs[:, 1].tolist(), counts.tolist(), group=self.group)
        return received, torch.repeat_interleave(torch.arange(self.num_ranks), theirs[:, 1])

    def destroy(self) -> None:
        """End the thread."""
        self.alive = False
        self.thread.shutdown()


def _take(rows: torch.Tensor, *parts: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
    """Split rows of bytes into tensors [n, *shape]."""
    found, place = [], 0
    for shape, dtype in parts:
        size = torch.Size(shape).numel() * dtype.itemsize
        piece = (
            rows[:, place : place + size].clone(memory_format=torch.contiguous_format)
            if len(rows)
            else torch.empty(0, size, dtype=torch.uint8)
        )
        found.append(piece.reshape(-1).view(dtype).reshape(len(rows), *shape))
        place += size
    return found


def _check_ids(topk_idx: torch.Tensor, num_experts: int, most: int) -> None:
    _matrix(topk_idx, topk_idx_t, "topk_idx")
    require(topk_idx.shape[1] <= most, f"num_topk {topk_idx.shape[1]} exceeds {most}")
    require(bool(((topk_idx >= -1) & (topk_idx < num_experts)).all()), "ids are not in [-1, num_experts)")


def _check_once(topk_idx: torch.Tensor) -> None:
    for column in range(topk_idx.shape[1]):
        ids = topk_idx[:, column : column + 1]
        require(not bool(((topk_idx[:, :column] == ids) & (ids >= 0)).any()), "an expert repeats in a token's ids")


class Buffer:
    """V1: low-latency and normal kernels."""

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: Any = None,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        self.rank, self.group_size = group.rank(), group.size()
        self.low_latency_mode, self.num_rdma_bytes, self.num_nvl_bytes = low_latency_mode, num_rdma_bytes, num_nvl_bytes
        self.explicitly_destroy, self.num_qps = explicitly_destroy, num_qps_per_rank
        require(low_latency_mode or self.group_size in (2, 4, 8), "Unsupported ranks")
        if low_latency_mode:
            assert num_qps_per_rank > 0
            self.nvshmem_qp_depth = 1024
        self.wire = _Wire(group)
        self._pending = False  # an operation whose hook is not called yet
        self._clean: tuple[int, ...] | None = None  # the sizes that the two buffers are laid out for

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self.wire.destroy()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        message = 16 + 2 * hidden + 4 * (hidden // 128)
        return 4 * num_experts * num_max_dispatch_tokens_per_rank * message

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        config_map = {2: Config(Buffer.num_sms, 24, 256, 6, 128), 4: Config(Buffer.num_sms, 6, 256, 6, 128)}
        assert num_ranks in config_map, f"Unsupported number of EP ranks: {num_ranks}"
        return config_map[num_ranks]

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        config_map = {2: Config(Buffer.num_sms, 10, 256, 6, 128), 4: Config(Buffer.num_sms, 9, 256, 6, 128)}
        assert num_ranks in config_map, f"Unsupported number of EP ranks: {num_ranks}"
        return config_map[num_ranks]

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        check_torch_deterministic()  # else the library's counts may be filled behind its kernel
        _matrix(topk_idx, topk_idx_t, "topk_idx")
        require(num_experts % self.group_size == 0, "num_experts % num_ranks == 0")
        owner = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.group_size), -1)
        in_rank = (owner.unsqueeze(2) == torch.arange(self.group_size)).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, EventOverlap()

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        check_torch_deterministic()
        require(not self.low_latency_mode, "a low-latency buffer has no queues of the normal kernels")
        config = self.get_dispatch_config(self.group_size) if config is None else config
        values, scales = x if isinstance(x, tuple) else (x, None)
        num_experts = num_tokens_per_expert.shape[0]
        self._check_rows(values, scales, topk_idx.shape[0], config)
        _check_ids(topk_idx, num_experts, 32)
        _matrix(topk_weights, torch.float32, "topk_weights")
        require(topk_weights.shape == topk_idx.shape, "topk_weights are not of topk_idx's shape")
        per_rank, _, per_expert, in_rank, _ = self.get_dispatch_layout(topk_idx, num_experts)
        for given, expected in ((num_tokens_per_rank, per_rank), (num_tokens_per_expert, per_expert)):
            require(given.dtype == torch.int32 and torch.equal(given, expected), "counts are not of this topk_idx")
        require(is_token_in_rank.dtype == torch.bool and torch.equal(is_token_in_rank, in_rank), "is_token_in_rank")
        token, rank = torch.nonzero(in_rank, as_tuple=True)
        num_topk, num_local = topk_idx.shape[1], num_experts // self.group_size
        shapes = [(values.shape[1:], values.dtype)] + ([] if scales is None else [(scales.shape[1:], scales.dtype)])
        shapes += [((num_topk,), torch.int64), ((num_topk,), torch.float32), ((1,), torch.int32)]
        local = topk_idx[token] - (rank * num_local).unsqueeze(1)
        local = torch.where((local >= 0) & (local < num_local), local, -1)
        parts = [values[token]] + ([] if scales is None else [scales[token]])
        parts += [local, torch.where(local >= 0, topk_weights[token], 0.0), token.int().unsqueeze(1)]
        sizes = (num_experts, values.shape[1], values.element_size(), num_topk)
        future = self.wire.begin("dispatch", sizes, torch.cat([_bytes(part) for part in parts], dim=1), rank)
        rows, source = future.result()
        *found, ids, weights, index = _take(rows, *shapes)
        counts = torch.bincount(ids[ids >= 0], minlength=num_local)
        prefix = torch.bincount(source, minlength=self.group_size).cumsum(0).int()
        made = (prefix, None, source, index.squeeze(1), is_token_in_rank, torch.where(in_rank, 0, -1).int())
        recv = found[0] if scales is None else tuple(found)
        return recv, ids, weights, counts.tolist(), made, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: Any = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        check_torch_deterministic()
        _, _, source, index, in_rank, _ = handle
        _matrix(x, torch.bfloat16, "x")
        require(x.shape[0] == index.shape[0], "src_idx.size(0) == num_tokens")
        require(x.shape[1] * 2 % 16 == 0, "rows are whole 16-byte vectors")
        rows = torch.cat([_bytes(index.unsqueeze(1)), _bytes(x)], dim=1)
        future = self.wire.begin("combine", (x.shape[1],), rows, source)
        combined = _nan(in_rank.shape[0], x.shape[1])

        def fill() -> None:
            back, owner = future.result()
            token, value = _take(back, ((1,), torch.int32), (tuple(x.shape[1:]), torch.bfloat16))
            total = torch.zeros(combined.shape)
            for rank in range(self.group_size):
                mine = owner == rank
                total[token[mine].squeeze(1).long()] += value[mine].float()
            combined.copy_(total)

        if async_finish:
            return combined, None, EventOverlap(fill)
        fill()
        return combined, None, EventOverlap()

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        self._clean = (num_max_dispatch_tokens_per_rank, hidden, num_experts)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Any = None,
        dispatch_wait_recv_cost_stats: Any = None,
        x_global_scale: Any = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_nvfp4: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:
        check_torch_deterministic()
        most, hidden, ranks = num_max_dispatch_tokens_per_rank, x.shape[1], self.group_size
        assert self.nvshmem_qp_depth >= (most + 1) * 2
        self._begin_low_latency(most, hidden, num_experts, async_finish and return_recv_hook)
        _matrix(x, torch.bfloat16, "x")
        _check_ids(topk_idx, num_experts, 11)
        require(x.shape[0] == topk_idx.shape[0] and x.shape[0] <= most, "x.size(0) <= num_max_dispatch_tokens_per_rank")
        require(not use_fp8 or ranks * most % 4 == 0, "TMA requires the number of tokens to be multiple of 4")
        num_local, height, groups = num_experts // ranks, ranks * most, hidden // 128
        token, column = torch.nonzero(topk_idx >= 0, as_tuple=True)
        expert = topk_idx[token, column]
        shuffled = torch.randperm(len(token), generator=self.wire.random)
        token, expert = token[shuffled], expert[shuffled]
        values, scales = _cast(x) if use_fp8 else (x, torch.zeros(x.shape[0], groups))
        index = torch.stack([expert % num_local, token], dim=1)
        parts = [values[token], scales[token], index]
        sizes = (most, hidden, num_experts, topk_idx.shape[1], int(use_fp8))
        bytes_ = torch.cat([_bytes(part) for part in parts], dim=1)
        future = self.wire.begin("low_latency_dispatch", sizes, bytes_, expert // num_local)
        recv = _nan(num_local, height, hidden, dtype=values.dtype)
        recv_scales = _nan(num_local, groups, height, dtype=torch.float32).transpose(1, 2)
        count, src_info = torch.zeros(num_local, dtype=torch.int32), _nan(num_local, height, dtype=torch.int32)
        ranges = torch.zeros(num_local, ranks, dtype=torch.int64)

        def fill() -> None:
            self._end_low_latency()
            rows, source = future.result()
            kinds = [((hidden,), values.dtype), ((groups,), torch.float32), ((2,), torch.int64)]
            got, got_scales, got_index = _take(rows, *kinds)
            for local in range(num_local):
                for rank in torch.randperm(ranks, generator=self.wire.random).tolist():
                    mine = torch.nonzero((source == rank) & (got_index[:, 0] == local)).squeeze(1)
                    begin = int(count[local])
                    place = slice(begin, begin + len(mine))
                    recv[local].view(torch.uint8).view(height, -1)[place] = _bytes(got)[mine] if len(mine) else 0
                    recv_scales[local, place] = got_scales[mine]
                    src_info[local, place] = got_index[mine, 1].int()
                    ranges[local, rank] = begin << 32 | len(mine)
                    count[local] += len(mine)

        received = (recv, recv_scales) if use_fp8 else recv
        handle = (src_info, ranges, most, hidden, num_experts)
        return received, count, handle, EventOverlap(), self._finish(fill, return_recv_hook)

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Any = None,
        combine_wait_recv_cost_stats: Any = None,
        overlap: bool = False,
        src_signals: Any = None,
        src_signal_expect_value: int = 0,
    ) -> Any:
        check_torch_deterministic()
        src_info, ranges, most, hidden, num_experts = handle
        ranks = self.group_size
        num_local, height = num_experts // ranks, ranks * most
        require(x.dim() == 3 and x.is_contiguous() and x.dtype == torch.bfloat16, "x must be 3-D, contiguous, bfloat16")
        require(tuple(x.shape) == (num_local, height, hidden), "x.size(1) == num_ranks * num_max_dispatch_tokens")
        _check_ids(topk_idx, num_experts, 11)
        _matrix(topk_weights, torch.float32, "topk_weights")
        require(topk_weights.shape == topk_idx.shape and len(topk_idx) <= most, "topk_weights.size(0)")
        _matrix(src_info, torch.int32, "src_info")
        _matrix(ranges, torch.int64, "layout_range")
        self._begin_low_latency(most, hidden, num_experts, async_finish and return_recv_hook)
        rows, index, rank = [], [], []
        for local in range(num_local):
            for source in range(ranks):
                begin, size = int(ranges[local, source]) >> 32, int(ranges[local, source]) & 0xFFFFFFFF
                rows.append(x[local, begin : begin + size])
                tokens = src_info[local, begin : begin + size].long()
                index.append(torch.stack([torch.full_like(tokens, self.rank * num_local + local), tokens], dim=1))
                rank += [source] * size
        parts = torch.cat([_bytes(torch.cat(index)), _bytes(torch.cat(rows))], dim=1)
        sizes = (most, hidden, num_experts)
        future = self.wire.begin("low_latency_combine", sizes, parts, torch.tensor(rank, dtype=torch.int64))
        combined = _nan(topk_idx.shape[0], hidden)

        def fill() -> None:
            self._end_low_latency()
            back, _ = future.result()
            key, value = _take(back, ((2,), torch.int64), ((hidden,), torch.bfloat16))
            table = torch.full((num_experts, most), -1)
            table[key[:, 0], key[:, 1]] = torch.arange(len(key))
            total = torch.zeros(combined.shape)
            for column in range(topk_idx.shape[1]):  # the compiler fuses the product into the sum
                token = torch.nonzero(topk_idx[:, column] >= 0).squeeze(1)
                row = table[topk_idx[token, column], token]
                require(bool((row >= 0).all()), "a row of topk_idx was never sent")
                product = topk_weights[token, column].double().unsqueeze(1) * value[row].double()
                total[token] = (total[token].double() + product).float()
            combined.copy_(total)

        return combined, EventOverlap(), self._finish(fill, return_recv_hook)

    def _begin_low_latency(self, most: int, hidden: int, num_experts: int, both: bool) -> None:
        require(self.low_latency_mode, "low_latency_mode")
        require(not both, "async_finish and return_recv_hook exclude each other")
        require(not self._pending, "the flags of an operation whose hook was not called would be cleared")
        sizes = (most, hidden, num_experts)
        require(
            self._clean in (None, sizes), f"the buffers are laid out for {self._clean}, not for {sizes}: clean them"
        )
        self._clean, self._pending = sizes, True
        require(hidden in WIDTHS and hidden % 128 == 0, "Unsupported hidden")
        require(num_experts % self.group_size == 0, "num_experts % num_ranks == 0")
        require(num_experts > 1, "num_sms > 1")
        require(self.num_qps == num_experts // self.group_size, "as many QPs as local experts")
        needed = self.get_low_latency_rdma_size_hint(most, hidden, self.group_size, num_experts)
        require(needed <= self.num_rdma_bytes, "layout.total_bytes <= num_rdma_bytes")

    def _end_low_latency(self) -> None:
        require(self._pending, "a hook was called twice, or after that of a later operation")
        self._pending = False

    @staticmethod
    def _finish(fill: Any, return_recv_hook: bool) -> Any:
        if return_recv_hook:
            return fill
        fill()
        return None

    def _check_rows(self, values: torch.Tensor, scales: Any, num_tokens: int, config: Config) -> None:
        require(values.dim() == 2 and values.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
        row_bytes = values.shape[1] * values.element_size()
        require(row_bytes % 32 == 0 and row_bytes // 2 + 8 <= 8192, "a row is two halves of 16-byte vectors")
        require(values.shape[0] == num_tokens, "x.size(0) == topk_idx.size(0)")
        require((scales is None) == (values.dtype == torch.bfloat16), "x is bfloat16, or bytes with scales")
        queues = (config.num_sms // 2) * self.group_size * config.nvl_recv * row_bytes
        require(queues <= self.num_nvl_bytes, "the queues exceed num_nvl_bytes")
        if scales is not None:
            _matrix(scales, torch.float32, "x_scales")
            require(values.element_size() == 1 and len(scales) == len(values), "x.element_size() == 1")


def _cast(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The low-latency kernel's own cast: multiplied by 448 / amax, with amax times a rounded 1 / 448 as the scale."""
    groups = x.float().view(x.shape[0], -1, 128)
    amax = groups.abs().amax(2).clamp(min=1e-4)
    values = (groups * (448.0 / amax).unsqueeze(2)).view(x.shape).to(torch.float8_e4m3fn)
    return values, amax * torch.tensor(1 / 448.0)


class EPHandle:
    """What V2's dispatch returns, as far as the combine needs it."""

    def __init__(self, topk_idx: torch.Tensor, num_experts: int, source: torch.Tensor, index: torch.Tensor) -> None:
        self.topk_idx, self.num_experts, self.source, self.index = topk_idx, num_experts, source, index
        self.num_recv_tokens_per_expert_list: list[int] = []
        self.recv_src_metadata = torch.empty(0)


class ElasticBuffer:
    """V2."""

    def __init__(
        self,
        group: Any,
        num_bytes: Any = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        require(num_max_tokens_per_rank > 0 and hidden > 0, "num_max_tokens_per_rank > 0 and hidden > 0")
        require(type(num_cpu_timeout_secs) is int and type(num_gpu_timeout_secs) is int, "timeouts are integers")
        self.most, self.hidden, self.num_topk = num_max_tokens_per_rank, hidden, num_topk
        self.deterministic, self.explicitly_destroy = deterministic, explicitly_destroy
        self.num_ranks, self.rank_idx = group.size(), group.rank()
        self.wire = _Wire(group)

    def destroy(self) -> None:
        assert self.explicitly_destroy
        self.wire.destroy()

    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        cumulative_local_expert_recv_stats: Any = None,
        num_experts: Any = None,
        num_max_tokens_per_rank: Any = None,
        expert_alignment: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: Any = None,
        do_handle_copy: bool = True,
        do_cpu_sync: Any = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Any:
        check_torch_deterministic()
        values, scales = x if isinstance(x, tuple) else (x, None)
        require(values.dim() == 2 and values.is_contiguous(), "x.is_contiguous()")
        row_bytes = values.shape[1] * values.element_size()
        require(row_bytes % 16 == 0 and row_bytes <= 2 * self.hidden, "a row is whole vectors and fits the buffer")
        require(values.shape[0] == topk_idx.shape[0] <= num_max_tokens_per_rank <= self.most, "too many tokens")
        require(num_experts % self.num_ranks == 0, "num_experts % num_ranks == 0")
        _check_ids(topk_idx, num_experts, self.num_topk or 32)
        _check_once(topk_idx)
        assert num_sms or math.comb(num_experts, topk_idx.shape[1]), "the estimate of SMs divides by zero"
        _matrix(topk_weights, torch.float32, "topk_weights")
        require(scales is None or (scales.dim() == 2 and scales.element_size() == 4), "sf is 2-D, of 4 bytes")
        num_topk, num_local = topk_idx.shape[1], num_experts // self.num_ranks
        owner = torch.where(topk_idx >= 0, topk_idx // num_local, -1)
        token, rank = torch.nonzero((owner.unsqueeze(2) == torch.arange(self.num_ranks)).any(1), as_tuple=True)
        shuffled = torch.randperm(len(token), generator=self.wire.random)
        token, rank = token[shuffled], rank[shuffled]
        parts = [values[token]] + ([] if scales is None else [scales[token]])
        parts += [topk_idx[token], topk_weights[token], token.int().unsqueeze(1)]
        shapes = [(values.shape[1:], values.dtype)] + ([] if scales is None else [(scales.shape[1:], scales.dtype)])
        shapes += [((num_topk,), torch.int64), ((num_topk,), torch.float32), ((1,), torch.int32)]
        sizes = (num_experts, values.shape[1], values.element_size(), num_topk)
        future = self.wire.begin("v2_dispatch", sizes, torch.cat([_bytes(part) for part in parts], dim=1), rank)
        rows, source = future.result()
        order = torch.argsort(source * self.most + _take(rows[:, -4:], ((1,), torch.int32))[0].squeeze(1), stable=True)
        order = order if self.deterministic else torch.randperm(len(rows), generator=self.wire.random)
        *found, ids, weights, index = _take(rows[order], *shapes)
        local = ids - self.rank_idx * num_local
        local = torch.where((local >= 0) & (local < num_local), local, -1)
        made = EPHandle(topk_idx.clone(), num_experts, source[order], index)
        made.num_recv_tokens_per_expert_list = torch.bincount(local[local >= 0], minlength=num_local).tolist()
        return (found[0] if scales is None else tuple(found)), local, weights, made, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: Any = None,
        bias: Any = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Any = None,
        previous_event_before_epilogue: Any = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        check_torch_deterministic()
        _matrix(x, torch.bfloat16, "x")
        require(x.shape[0] == handle.index.shape[0], "as many rows as were received")
        require(x.shape[1] % 256 == 0 and x.shape[1] <= self.hidden, "a lane of a warp has 16 bytes")
        rows = torch.cat([_bytes(handle.index), _bytes(x)], dim=1)
        future = self.wire.begin("v2_combine", (x.shape[1],), rows, handle.source)
        combined = _nan(handle.topk_idx.shape[0], x.shape[1])

        def fill() -> None:
            back, source = future.result()
            token, value = _take(back, ((1,), torch.int32), ((x.shape[1],), torch.bfloat16))
            table = torch.full((self.num_ranks, combined.shape[0]), -1)
            table[source, token.squeeze(1).long()] = torch.arange(len(token))
            num_local = handle.num_experts // self.num_ranks
            owner = torch.where(handle.topk_idx >= 0, handle.topk_idx // num_local, -1)
            total = torch.zeros(combined.shape)
            for column in range(owner.shape[1]):
                last = (owner[:, column + 1 :] != owner[:, column : column + 1]).all(1) & (owner[:, column] >= 0)
                mine = torch.nonzero(last).squeeze(1)
                total[mine] += value[table[owner[mine, column], mine]].float()
            combined.copy_(total)

        if async_with_compute_stream:
            return combined, None, EventOverlap(fill)
        fill()
        return combined, None, EventOverlap()


class OnDevice:
    """Calls a buffer of this file, whose tensors are on the CPU, with tensors on a device, and returns such, as copies.

    Tensors that an operation fills later are copied when its hook or event is waited for.
    """

    def __init__(self, buffer: Any, device: torch.device) -> None:
        self._buffer, self._device = buffer, device

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._buffer, name)
        if name not in ("get_dispatch_layout", "dispatch", "combine", "low_latency_dispatch", "low_latency_combine"):
            return found

        def call(**options: Any) -> Any:
            results = found(**_each(options, torch.Tensor.cpu))
            pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

            def mirror(tensor: torch.Tensor) -> torch.Tensor:
                pairs.append((tensor.to(self._device, copy=True), tensor))
                return pairs[-1][0]

            def complete(wait: Any) -> None:
                wait()
                for mine, filled in pairs:
                    mine.copy_(filled)

            *tensors, last = _each(results, mirror)
            if callable(last):
                return (*tensors, lambda: complete(last))
            if isinstance(last, EventOverlap) and last.event is not None:
                event = last.event
                last = EventOverlap(lambda: complete(event))
            return (*tensors, last)

        return call


def _each(value: Any, change: Any) -> Any:
    """The same tuple or dict with its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _each(part, change) for name, part in value.items()}
    return tuple(_each(part, change) for part in value) if isinstance(value, tuple) else value
