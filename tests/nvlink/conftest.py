"""These files are collected in Triton's interpreter alone: on GPUs `test_gpu.py` runs the same checks."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
