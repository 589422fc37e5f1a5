"""Ways to lose a rank, and files in which the other ranks record what they see of it."""

import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any


def be_lost(how: str, secs: float = 1000.0) -> None:
    """Leave this rank's work: by an error ("raises"), a pause of some seconds ("stuck"), or a signal of this name."""
    if how == "raises":
        raise ValueError("7 is too many")
    if how == "stuck":
        time.sleep(secs)
    else:
        os.kill(os.getpid(), signal.Signals[how])


def record(folder: Path, rank: int, outcome: Any) -> None:
    """Save a rank's observations to a file."""
    (folder / str(rank)).write_bytes(pickle.dumps(outcome))


def recorded(folder: Path) -> dict[int, Any]:
    """The saved observations of the ranks."""
    return {int(path.name): pickle.loads(path.read_bytes()) for path in sorted(folder.iterdir())}
