"""The experts: the list of row tiles, grouped GEMMs, activation and requantization."""
