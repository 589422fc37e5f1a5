"""Kernels that are launched many times: `repeated`, through `cuda_driver`, with constants in groups (`constants`),
several of them in one call (`sequence`), as a CUDA graph if it repeats (`launch_graph`), and the memory of such calls
(`allocation`).

Threads may share all of these. A launch writes its arguments and calls the driver under its lock, on the stream of the
thread that calls; a sequence has a workspace for each call. What else a call writes to is its caller's: memory that is
kept between calls belongs to one thread.
"""
