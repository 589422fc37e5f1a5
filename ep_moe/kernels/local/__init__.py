"""Kernels of one rank alone: what comes before the copy of rows, rows and lists of pairs, rows of zeros."""
