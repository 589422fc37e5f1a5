"""What every engine needs, without importing one: shared transports, weights in our order, load, agreement of ranks."""
