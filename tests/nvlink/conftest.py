"""These files are collected only in Triton's interpreter: on GPUs `test_gpu.py` runs the same checks."""

import os

collect_ignore_glob = ["test_*.py"]
if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import hurry  # imports Triton, which not every machine has

    collect_ignore_glob = []
    hurry()
