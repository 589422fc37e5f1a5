"""A package of wrong kernels and a few right ones, on which the checker itself is tested."""
