"""The machine that `tests/test_protocol.py` runs the protocol on."""
