"""Writing of files."""

import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file whole, or leave the one that is there. Errors: OSError names the path. Local."""
    target = Path(path)
    if target.exists() and not target.is_file():  # such as /dev/stdout, which must stay what it is
        target.write_text(text, encoding="utf-8")
        return
    target = target.resolve()  # a link stays one
    new = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        new.unlink(missing_ok=True)
