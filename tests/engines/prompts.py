"""The prompts of all engines' tests; no engine and no transformers is imported here."""

import torch

VOCABULARY = 96
LENGTHS = (7, 3, 12, 1)


def prompts() -> list[torch.Tensor]:
    """Token ids of sequences of different length."""
    random = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (length,), generator=random) for length in LENGTHS]
