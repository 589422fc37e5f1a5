"""The machine that `test_protocol` runs the protocol on."""
