"""Observers of a layer: times of its phases, its kernels, and one trace of all ranks."""
