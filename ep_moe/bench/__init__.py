"""Benchmarks: each checks its result first, times it beside a baseline of the same run and can be written down."""
