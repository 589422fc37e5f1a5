"""Launches of a compiled kernel that is launched many times: `repeated`, and `cuda_driver`, what it calls."""
