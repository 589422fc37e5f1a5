"""Benchmarks: each checks its result first, then times it and a baseline in the same run, and can append its rows."""
