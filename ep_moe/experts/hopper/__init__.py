"""Experts on Hopper: grouped GEMMs in Gluon for many rows, Triton's for everything else.

`shapes` says which calls the Hopper kernels take, `gemms` launches them, `gather` packs rows that are not neighbors.
"""
