"""Repeated launches through a fake CUDA driver: the arguments in the memory that the driver would read."""

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import struct
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from ep_moe.kernel_launch import cuda_driver, launch_graph
from ep_moe.kernel_launch.plan_cache import PlanCache

pytest.importorskip("triton")


# as Triton describes a kernel: a tuple with an integer 1, which is a constant, pointers of which one is absent,
# integers, a float, constants
SIGNATURE = {
    "links": (("i64", "constexpr"), "*i64"),
    "size": "i32",
    "tokens": ("*bf16", "constexpr", "*i32"),
    "stride": "i32",
    "timeout_ns": "i64",
    "limit": "fp32",
    "H": "constexpr",
}
SIZES = (8, 8, 4, 8, 8, 4, 8, 4)
SCRATCH = (8, 8)
CAPTURING = threading.Lock()  # held while torch captures a graph


class Driver:
    """Reports a kernel's parameters and records the arguments of launches."""

    def __init__(self, sizes: tuple[int, ...], status: int = 0) -> None:
        self.sizes, self.status, self.launched = sizes, status, []

    def cuFuncGetParamInfo(self, function: int, index: int, offset: Any, size: Any) -> int:  # noqa: N802
        if index >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index]
        return 0

    def cuLaunchKernelEx(self, *given: ctypes.c_void_p) -> int:  # noqa: N802
        config, function, parameters, _ = (pointer.value for pointer in given)
        assert config is not None
        assert parameters is not None
        launch = cuda_driver._Config.from_address(config)
        places = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        kinds = [ctypes.c_int32 if size == 4 else ctypes.c_int64 for size in self.sizes]
        values = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
        early = [(launch.attributes[i].id, launch.attributes[i].value[0]) for i in range(launch.num_attributes)]
        self.launched.append(
            (function, [*launch.grid], [*launch.block], launch.shared_bytes, launch.stream, early, values)
        )
        return self.status


def compiled(**changes: Any) -> Any:
    """A stand-in for Triton's CompiledKernel."""
    metadata = {"num_warps": 4, "shared": 96, "launch_pdl": True, "global_scratch_size": 0, "profile_scratch_size": 0}
    source = SimpleNamespace(signature=SIGNATURE)
    return SimpleNamespace(src=source, function=7, metadata=SimpleNamespace(**metadata | changes))


def stub(monkeypatch: pytest.MonkeyPatch, fake: Driver) -> None:
    """Use the fake driver, and torch's functions without a GPU."""
    monkeypatch.setattr(cuda_driver, "cuda_driver", lambda: fake)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", CAPTURING.locked, raising=False)


def make_kernel(
    monkeypatch: pytest.MonkeyPatch, fake: Driver, tokens: Any = None, kernel: Any = None
) -> cuda_driver.DriverKernel:
    stub(monkeypatch, fake)
    tokens = tokens or (torch.zeros(3), None, torch.ones(2))
    arguments = (((2**46, 1), torch.zeros(1)), 12, tokens, -5, 10**11, 1.5)
    streams = itertools.count(33)
    return cuda_driver.DriverKernel(
        kernel or compiled(),
        (9, 2, 1),
        arguments,
        changing=slice(2, 5),
        device=torch.device("cpu"),
        current_stream=lambda index: next(streams) + index,
    )


def make_launch(monkeypatch: pytest.MonkeyPatch, fake: Driver, tokens: Any = None) -> cuda_driver.Launches:
    return cuda_driver.Launches([(make_kernel(monkeypatch, fake, tokens), range(4))], 4)


def make_launches(monkeypatch: pytest.MonkeyPatch, fake: Driver) -> cuda_driver.Launches:
    """Two kernels; the last argument of the second one is the same value as the one before it."""
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    first, second = (make_kernel(monkeypatch, fake) for _ in range(2))
    return cuda_driver.Launches([(first, (0, 1, 3, 4)), (second.reordered((1, 0, 2, 3)), (1, 2, 3, 3))], 5)


def test_a_launch_changes_some_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Driver((*SIZES, *SCRATCH))
    tokens = torch.zeros(3), None, torch.ones(2)
    first = [tokens[0].data_ptr(), tokens[2].data_ptr()]
    kept = weakref.ref(tokens[0])
    run = make_launch(monkeypatch, fake, tokens)
    run([*first, -5, 10**11])
    run([4096, 8192, -2, 5])
    (function, grid, block, shared, stream, early, values), second = fake.launched
    assert (function, grid, block, shared, stream) == (7, [9, 2, 1], [128, 1, 1], 96, 33)
    assert early == [(6, 1)]
    half = struct.unpack("<i", struct.pack("<f", 1.5))[0]
    assert values == [2**46, values[1], 12, *first, -5, 10**11, half, 0, 0]
    assert second[4] == 34
    assert second[6] == [2**46, values[1], 12, 4096, 8192, -2, 5, half, 0, 0]
    del tokens
    gc.collect()
    assert kept() is None  # a round's tensors are freed with the round


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        pytest.param((*SIZES, 8), {}, id="fewer"),
        pytest.param((*SIZES, *SCRATCH, 8), {}, id="more"),
        pytest.param((8, 8, 8, *SIZES[3:], *SCRATCH), {}, id="wider"),
        pytest.param((*SIZES, *SCRATCH), {"global_scratch_size": 64}, id="scratch"),
    ],
)
def test_other_arguments_are_left_to_triton(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], changes: dict[str, int]
) -> None:
    with pytest.raises(cuda_driver.LaunchMismatchError, match="takes other arguments"):
        make_kernel(monkeypatch, Driver(sizes), kernel=compiled(**changes))


def test_a_refused_launch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_launch(monkeypatch, Driver((*SIZES, *SCRATCH), status=719))
    with pytest.raises(RuntimeError, match="CUresult 719"):
        run([1, 2, 3, 4])


def arguments_of(values: list[int]) -> list[list[int]]:
    """The changing arguments of both launches of `make_launches` in a call."""
    return [[values[0], values[1], values[3], values[4]], [values[2], values[1], values[3], values[3]]]


def test_launches_read_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Driver((*SIZES, *SCRATCH))
    run, single = make_launches(monkeypatch, fake), make_launch(monkeypatch, fake)
    for values in ([4096, 8192, 12288, -2, 5], [16, 32, 48, 7, 8]):
        fake.launched.clear()
        run(values)
        assert [arguments[3:7] for *_, arguments in fake.launched] == arguments_of(values)
        assert len({stream for *_, stream, _, _ in fake.launched}) == 1  # the stream is asked for once
    single([1, 2, 3, 4])
    assert fake.launched[-1][-1][3:7] == [1, 2, 3, 4]
    fake.status = 719
    with pytest.raises(RuntimeError, match="CUresult 719"):
        run([1, 2, 3, 4, 5])


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """As Triton's TensorDescriptor."""

    base: torch.Tensor
    shape: tuple[int, ...] = (6, 32)
    strides: tuple[int, ...] = (40, 1)
    block_shape: tuple[int, ...] = (2, 16)


def test_tensor_maps_follow_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of several launches has maps of its own, which are moved to the addresses of a call."""
    fake, encoded = Driver((128, 4, 4, 8, 8, 8, 4, *SCRATCH)), list[tuple[int, ...]]()

    def encode(place: int, data_type: int, rank: int, tensor: int, *rest: int) -> int:
        encoded.append((data_type, rank, place % 64, *rest[4:6]))
        return replace(place, tensor)

    def replace(place: int, tensor: int) -> int:
        ctypes.c_int64.from_address(place).value = tensor
        return 0

    fake.cuTensorMapEncodeTiled, fake.cuTensorMapReplaceAddress = encode, replace  # type: ignore[attr-defined]
    described = {"elem_size": 2, "elem_type": 10, "block_size": (2, 16), "swizzle": 3}
    kernel = compiled(tensordesc_meta=[described])
    kernel.src.signature = {"x": "tensordesc<bf16[2, 16]>", "y": "*bf16", "count": "i32"}
    stub(monkeypatch, fake)
    tensor = torch.zeros(6, 40, dtype=torch.bfloat16)
    kept = weakref.ref(tensor)
    loaded = cuda_driver.DriverKernel(
        kernel,
        (1, 1, 1),
        (Descriptor(tensor), tensor, 5),
        changing=slice(0, 2),
        device=torch.device("cpu"),
        current_stream=lambda index: index,
    )
    del tensor
    gc.collect()
    assert kept() is None
    run = cuda_driver.Launches([(loaded, (0, 1)), (loaded.reordered((1, 0)), (0, 2))], 3)
    assert encoded == [(9, 2, 0, 0, 3)] * 2
    for values in ([4096, 8192, 12288], [4096, 16, 32]):
        fake.launched.clear()
        run(values)
        found = [arguments for *_, arguments in fake.launched]
        assert found == [[x, 6, 32, 40, 1, y, 5, 0, 0] for x, y in (values[:2], (values[2], values[0]))]


class Recorder(Driver):
    """Records launches on a stream as a graph, too; a started graph repeats them with the arguments of then."""

    def __init__(self) -> None:
        super().__init__((*SIZES, *SCRATCH))
        self.graphs: dict[int, list[Any]] = {}
        self.started: list[tuple[int, int]] = []
        self.refused = 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        mode._obj.value = {2: 0, 0: 2}[mode._obj.value]
        return 0

    def cuStreamCreate(self, stream: Any, flags: int) -> int:  # noqa: N802
        assert flags == 1
        stream._obj.value = 77
        return 0

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:  # noqa: N802
        assert (stream.value, mode) == (77, 2)
        if not self.refused:
            self.kept, self.launched = self.launched, []
        return self.refused

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:  # noqa: N802
        self.graphs[len(self.graphs) + 1] = self.launched
        graph._obj.value, self.launched = len(self.graphs), self.kept
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> int:  # noqa: N802
        executable._obj.value = graph.value
        return 0

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:  # noqa: N802
        self.started.append((executable.value, stream.value))
        self.launched += self.graphs[executable.value]
        return self.status

    def cuGraphExecDestroy(self, executable: Any) -> int:  # noqa: N802
        del self.graphs[executable.value][:]
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:  # noqa: N802
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:  # noqa: N802
        assert stream.value == 77
        return 0


def test_launches_that_come_again_are_started_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same values alone, on the stream of the call, and not while torch captures."""
    fake = Recorder()
    run = make_launches(monkeypatch, fake)
    direct = cuda_driver._RECORDED_AFTER

    values, others = [4096, 8192, 12288, -2, 5], [16, 32, 48, 7, 8]
    for _ in range(direct):
        run(values)
    assert not fake.started
    for given, graph in ((values, True), (others, False), (values, True)):
        begin, started = len(fake.launched), len(fake.started)
        run(given)
        assert [arguments[3:7] for *_, arguments in fake.launched[begin:]] == arguments_of(given)
        assert len(fake.started) - started == graph
    streams = [stream for _, stream in fake.started]
    assert min(streams) >= 33  # the stream of each call, not the one of the recording
    assert len(set(streams)) == 2
    started = len(fake.started)
    with CAPTURING:
        run(values)
    assert len(fake.started) == started
    monkeypatch.setattr(launch_graph, "_MOST", launch_graph.LaunchGraph._alive)
    for _ in range(2 * direct):
        run([2] * 5)
    run(values)
    assert len(fake.started) == started + 1  # of those that exist
    fake.status = 719
    with pytest.raises(RuntimeError, match="CUresult 719"):
        run(values)


def test_graphs_that_are_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that take turns beyond the limit make no graphs; ones that no longer come give their places to others."""
    fake = Recorder()
    run, most, direct = make_launches(monkeypatch, fake), 4, cuda_driver._RECORDED_AFTER
    monkeypatch.setattr(cuda_driver, "_MOST_COUNTED", most)

    def passes(count: int, *numbers: int) -> tuple[int, float]:
        """Graphs that were made, and started ones a pass."""
        made, started = len(fake.graphs), len(fake.started)
        for _ in range(count):
            for number in numbers:
                run([number] * 5)
        return len(fake.graphs) - made, (len(fake.started) - started) / count

    assert passes(direct, *range(7)) == (0, 0)
    assert passes(1, *range(7)) == (most, most)
    assert passes(50, *range(7)) == (0, most)
    passes(direct * most, 0)  # the others are out of use
    made, _ = passes(4 * direct, 0, 7, 8, 9)
    assert made == 3
    assert passes(10, 0, 7, 8, 9) == (0, 4)
    assert sum(bool(launches) for launches in fake.graphs.values()) == most  # the others are freed
    assert passes(1, *range(10**3, 10**3 + 40 * direct)) == (0, 0)  # values that never come again
    assert len(run._counted) == most


@pytest.mark.parametrize("lacking", [False, True], ids=["refuses", "lacks"])
def test_a_driver_that_records_nothing(monkeypatch: pytest.MonkeyPatch, lacking: bool) -> None:
    """Launches go on one by one, and recording is not tried again."""
    fake = Driver((*SIZES, *SCRATCH)) if lacking else Recorder()
    run = make_launches(monkeypatch, fake)
    if isinstance(fake, Recorder):
        fake.refused = 801
    count = 3 * cuda_driver._RECORDED_AFTER
    for number in range(count):
        run([4096, 8192, 12288, number // 2, 5])
        run([4096, 8192, 12288, -2, 5])
    assert len([values for *_, values in fake.launched if values[5] == -2]) == 2 * count
    assert not run._recordable


def test_threads_share_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches of a call have its arguments, whether they are started one by one or as a graph."""
    fake = Recorder()
    run = make_launches(monkeypatch, fake)
    launch = run._launch

    def slow(*addresses: Any) -> int:
        time.sleep(1e-5)  # lets other threads run
        return launch(*addresses)

    run._launch = slow
    threads = [
        threading.Thread(target=lambda n: [run([n, n, n, n, n]) for _ in range(30)], args=(n,)) for n in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = [set(values[3:7]) for *_, values in fake.launched]
    assert all(len(numbers) == 1 for numbers in found)
    assert [found.count({n}) for n in range(1, 5)] == [2 * 30] * 4
    assert len(fake.started) == 4 * (30 - cuda_driver._RECORDED_AFTER)


def test_threads_share_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that launches while the driver reads another's arguments waits for it."""
    fake, inside, goes_on = Driver((*SIZES, *SCRATCH)), threading.Event(), threading.Event()
    run = make_launch(monkeypatch, fake)
    launch = run._launch

    def read_late(*addresses: Any) -> int:
        inside.set()
        assert goes_on.wait(20)
        return launch(*addresses)

    run._launch = read_late
    threads = [threading.Thread(target=run, args=([number] * 4,)) for number in (1, 2)]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    threads[1].join(0.1)
    goes_on.set()
    for thread in threads:
        thread.join(20)
    assert [values[3:7] for *_, values in fake.launched] == [[1] * 4, [2] * 4]


class Sizes(NamedTuple):
    """Constants of a kernel."""

    rows: int
    name: str


def test_constants_in_groups_are_what_the_compiler_needs() -> None:
    import triton
    import triton.language as tl

    from ep_moe.kernel_launch.kernel import Kernel, as_constants

    @triton.jit
    def kernel(x_ptr: Any, sizes: tl.constexpr) -> None:
        tl.store(x_ptr, sizes.rows)

    group = as_constants(Sizes(3, "a"), kernel, "sizes")
    assert isinstance(group, Sizes)
    assert [(type(field), field.value) for field in group] == [(tl.constexpr, 3), (tl.constexpr, "a")]
    interpreted: Any = SimpleNamespace(fn=kernel.fn)  # is no JITFunction
    assert as_constants(Sizes(3, "a"), interpreted, "sizes") == (3, "a")
    group = as_constants(Sizes(3, "a"), interpreted, "x_ptr")
    assert [type(field) for field in group] == [tl.constexpr, tl.constexpr]
    launch = Kernel(kernel, 1, fixed=(), constants={"sizes": Sizes(3, "a")}, options={}, device=torch.device("cpu"))
    assert isinstance(launch._constants["sizes"].rows, tl.constexpr)
    assert launch.run is None


def test_others_hooks_of_compilations_do_not_fail_on_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    import triton.language as tl
    from compile_check.stub import compile_only

    from ep_moe.kernel_launch.kernel import Kernel

    @triton.jit
    def kernel(x_ptr, sizes: tl.constexpr):
        tl.store(x_ptr, sizes.rows)

    @triton.jit
    def plain(x_ptr, size: tl.constexpr):
        tl.store(x_ptr, size)

    seen = list[Any]()
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **call: seen.append(call["fn"].name))
    monkeypatch.setattr(triton.runtime.driver, "_active", None)  # restored afterwards
    with compile_only(90) as recorder:
        launch = Kernel(kernel, 1, constants={"sizes": Sizes(3, "a")}, device=torch.device("cpu"))
        launch.through_triton((torch.zeros(1),))
        plain.warmup(torch.zeros(1), 3, grid=(1,), enable_fp_fusion=True)
    assert (recorder.failures, len(recorder.launches)) == ([], 2)
    assert len(seen) == 1
    assert "plain" in seen[0]


def test_kernels_are_compiled_ahead_without_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    import triton.language as tl
    from compile_check.stub import compile_only

    from ep_moe.kernel_launch.kernel import Kernel, compiling_ahead

    @triton.jit
    def kernel(x_ptr, SIZE: tl.constexpr):
        tl.store(x_ptr, SIZE)

    @triton.jit
    def wrong(x_ptr, SIZE: tl.constexpr):
        tl.store(x_ptr, tl.missing)

    monkeypatch.setattr(triton.runtime.driver, "_active", None)  # restored afterwards
    x, compilers = torch.zeros(1), set[int]()
    compiling = triton.compiler.compile

    def noted(*arguments: Any, **options: Any) -> Any:
        compilers.add(threading.get_ident())
        return compiling(*arguments, **options)

    monkeypatch.setattr(triton.compiler, "compile", noted)
    with compile_only(90):
        launches = [Kernel(kernel, 1, constants={"SIZE": size}, device=x.device) for size in range(4)]
        with compiling_ahead():
            for launch in launches:
                launch((x,))
        assert len(kernel.device_caches[triton.runtime.driver.active.get_current_device()][0]) == len(launches)
        assert compilers
        assert threading.get_ident() not in compilers
        assert (x.item(), launches[0].run) == (0, None)
        with pytest.raises(Exception, match="missing"), compiling_ahead():
            Kernel(wrong, 1, constants={"SIZE": 1}, device=x.device)((x,))
        launches[0].compile((x,))  # as before


def test_numbers_in_tuples_are_not_specialized(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    import triton.language as tl

    from ep_moe.kernel_launch.kernel import Kernel

    @triton.jit(do_not_specialize=["sizes"])
    def kernel(x_ptr: Any, sizes: Any, others: Any) -> None:
        tl.store(x_ptr, sizes[0] + sizes[1] + others[0])

    seen = list[Any]()
    monkeypatch.setattr(type(kernel), "warmup", lambda self, *arguments, **options: seen.append(arguments))
    launch = Kernel(kernel, 1, fixed=(torch.zeros(1),), constants={}, device=torch.device("cpu"))
    limits = -(2**63), -(2**31), 0, 2**31, 2**63  # between which Triton's types of integers are
    values = (1, 16, -32, 0, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 16, 2**40)
    for value in values:
        launch.compile((), ((value, None), (value,)))
    for value, (_, (number, absent), others) in zip(values, seen, strict=True):
        assert (absent, others) == (None, (value,))  # which the kernel may be specialized for
        assert number != 1
        assert number % 16
        assert [number >= limit for limit in limits] == [value >= limit for limit in limits]


def test_a_plan_ends_with_its_owner_or_when_it_was_not_used() -> None:
    plans, owner, other, kept = PlanCache[str](4), torch.zeros(1), torch.zeros(1), torch.zeros(1)
    alive = weakref.ref(kept)
    assert plans.keep("owned", "a", owners=(owner, other)) == plans.get("owned") == "a"
    plans.keep("kept", "b", alive=(kept,))
    del owner, kept
    gc.collect()
    assert plans.get("owned") is None
    assert alive() is not None
    for key in "123":
        plans.keep(key, key)
    assert (plans.get("kept"), plans.get("1")) == ("b", "1")
    plans.keep("4", "4")
    assert [plans.get(key) for key in ("kept", "1", "2", "3", "4")] == ["b", "1", None, None, "4"]
    plans.clear()
    assert len(plans) == 0
    assert alive() is None
