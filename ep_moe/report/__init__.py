"""Measured rows: what a row says, the files that hold them, and the page that is made of them."""
