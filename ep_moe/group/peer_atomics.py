"""Whether two GPUs support atomics on each other's memory: asked of the CUDA driver, as torch has no query for it.

Over PCIe two GPUs may have loads and stores to each other's memory, but no atomics.
"""

import ctypes

from ep_moe.kernel_launch.cuda_driver import cuda_driver

_NATIVE_ATOMIC_SUPPORTED = 3  # of CUdevice_P2PAttribute


def has_peer_atomics(index: int, peer: int) -> bool:
    """Whether all atomics of GPU `index` work on the memory of GPU `peer`; torch's indices, among visible GPUs.

    Errors: RuntimeError if the driver call fails. Local; CUDA must be initialized.
    """
    handles = []
    for ordinal in (index, peer):
        handle = ctypes.c_int()
        _check(cuda_driver().cuDeviceGet(ctypes.byref(handle), ordinal), f"cuDeviceGet of GPU {ordinal}")
        handles.append(handle)
    value = ctypes.c_int()
    status = cuda_driver().cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMIC_SUPPORTED, *handles)
    _check(status, f"cuDeviceGetP2PAttribute of GPUs {index} and {peer}")
    return bool(value.value)


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"the CUDA driver failed in {call} (CUresult {status})")
