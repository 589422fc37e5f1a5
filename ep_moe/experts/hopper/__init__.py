"""Experts on Hopper: grouped GEMMs in Gluon for many rows, Triton's for everything else.

`shapes` decides which calls the Hopper kernels take, `gemms` launches them.
"""
