"""Code shared by engines, which imports none: transports, weights in our order, expert load, agreement of ranks."""
