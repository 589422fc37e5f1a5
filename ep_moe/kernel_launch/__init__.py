"""Kernels that are launched many times: `kernel` compiles and loads them, `cuda_driver` launches one or several, as a
CUDA graph if a call repeats (`launch_graph`), `sequence` does so by names of tensors, in memory of `allocation`.

Threads may share all of these. A launch writes its arguments and calls the driver under its lock, on the stream of the
thread that calls; a sequence has a workspace for each call. What else a call writes to is its caller's: memory that is
kept between calls belongs to one thread.
"""
