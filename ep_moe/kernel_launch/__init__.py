"""Kernels that are launched many times: `repeated`, through `cuda_driver`, with constants in groups (`constants`),
several of them in one call (`sequence`), as a CUDA graph if it repeats (`launch_graph`), and the memory of such calls
(`allocation`).
"""
