"""Kernels that are launched many times: `repeated`, through `cuda_driver`, with constants in groups (`constants`), and
the memory of such calls (`allocation`).
"""
