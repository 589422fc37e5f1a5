"""Every kernel against its torch twin: in Triton's interpreter (`tests/test_interpreted.py`), or on a GPU (-m gpu)."""
