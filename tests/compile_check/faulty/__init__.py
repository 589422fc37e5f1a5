"""A package of wrong kernels and a few right ones, for testing the checker itself."""
