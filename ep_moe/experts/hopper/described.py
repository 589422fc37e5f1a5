"""A grouped GEMM in Gluon whose kernel takes descriptors of tensors, which TMA reads."""

import abc
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ep_moe.kernel_launch.cuda_driver import DriverKernel
from ep_moe.kernel_launch.kernel import Kernel, Run, mapped, present
from ep_moe.kernels.gemm.arguments import ExpertScalars, Operands, Rows, Stored, TileList

SHARED_BYTES = 232448 - 1024  # of an SM, less barriers
MAXNREG = 168  # times 12 warps fill the register file
REGISTERS = 232  # of a thread of the second warp group; the loading warp takes 40, and the first group what is left
_GLUON_TYPES = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
}


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A TMA descriptor of a matrix in boxes of rows x columns. Local."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], _GLUON_TYPES[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, [rows, columns], layout)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """[..., K] as a matrix of rows. Local."""
    return tensor.flatten(0, -2)


def pairs_of(rows: torch.Tensor) -> torch.Tensor:
    """A gate row and its up row as one: [R, K] as [R / 2, 2 * K], so that boxes have rows of one of them. Local."""
    return rows.view(rows.shape[0] // 2, 2 * rows.shape[1])


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


class DescribedGemm(abc.ABC):
    """One of the GEMMs for calls of one shape; a `GroupedGemm`.

    Args:
        kernel, programs, constants, settings: as of `Kernel`, on `device`.
        early: as of `Kernel`.
        maxnreg: registers of a thread before the partitions divide them anew.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        constants: Mapping[str, Any],
        device: torch.device,
        *,
        settings: tuple[int, ...] = (),
        early: bool = False,
        maxnreg: int = MAXNREG,
    ) -> None:
        made = functools.partial(Kernel, kernel, programs, settings=settings, constants=dict(constants), device=device)
        options = {"num_warps": 4, "maxnreg": maxnreg}
        self._new_launch = functools.partial(made, options=options)
        self._launch = made(options=options, early=early)
        self.run: Run | None = None
        self.driver: DriverKernel | None = None

    @abc.abstractmethod
    def arranged(self, tensors: tuple[Any, ...], describe: Callable[[str, Any], Any]) -> tuple[Any, ...]:
        """The kernel's arguments from those of a `GroupedGemm`; `describe` makes descriptors. Local."""

    @abc.abstractmethod
    def describe(self, name: str, tensor: torch.Tensor) -> TensorDescriptor:
        """The descriptor of one of the tensors. Local."""

    def __call__(self, tensors: tuple[Operands, Stored, ExpertScalars, Rows, TileList], /) -> None:
        """Launch; tensors that are not aligned to 16 bytes are copied. Local, no host sync."""
        found = present(tensors)
        if any(each.data_ptr() % 16 for each in found):
            operands, out, *others = tensors
            aligned = mapped(tensors, _aligned)
            # not early: it would wait for the GEMM before it, but not for the copies
            self._new_launch()(self.arranged(aligned, self.describe))
            if aligned[1].data is not out.data:
                out.data.copy_(aligned[1].data)
            return
        self._launch(self.arranged(tensors, self.describe))
        inner, run = self._launch, self._launch.run
        if run is not None and self.run is None:
            numbers = itertools.count()
            places = mapped(tensors, lambda _: next(numbers))
            order = present(self.arranged(places, lambda name, place: place))
            self.driver = None if inner.driver is None else inner.driver.reordered(order)
            self.run = lambda addresses: run([addresses[place] for place in order])
