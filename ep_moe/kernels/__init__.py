"""Device code in Triton, and nothing else: launchers are in the packages that use them.

Every kernel runs on a GPU and, with TRITON_INTERPRET=1 in the environment before Triton is imported, on a CPU.
"""
