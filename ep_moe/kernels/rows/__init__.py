"""Rows of tokens: quantized, permuted into the experts' order, and written as bytes for the wire."""
