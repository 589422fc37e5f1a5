"""These files are collected only in Triton's interpreter: on GPUs `test_gpu.py` runs the same checks."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
