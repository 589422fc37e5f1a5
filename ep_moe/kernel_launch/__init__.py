"""Kernels that are launched many times: `repeated`, through `cuda_driver`, with constants in groups (`constants`)."""
