"""What the newest releases of serving engines, and of libraries whose calls ours are, change for us.

    python tests/engines/newest.py [--only vllm]

For each of them that pip finds and no test knows, signatures are compared as in `signatures.py`, and an engine's cases
run as in `test_engines.py`, whose environment variables count here too, with the dependencies of the newest release
that is tested. It prints what differs; the exit code is 1 if anything does, or cannot be had. Meant for a weekly job.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from releases import COMPARED, ENGINES, Unavailable, cache_folder, pip, prepare, run, unpacked
from signatures import compared

TESTED = dict((*COMPARED, *ENGINES))  # the newest release of each, which come last


def newest(name: str) -> str:
    """The newest release of a package that pip finds, of any Python. Errors: Unavailable."""
    said = pip("index", "versions", name, "--ignore-requires-python")
    found = re.search(r"\((\S+)\)", said.partition("\n")[0])
    if found is None:
        raise Unavailable(f"pip names no release of {name}: {said[:200]!r}")
    return found[1]


def moved(name: str, version: str, tested: str) -> list[str]:
    """What differs in a release from the one that is tested."""
    cache, wrong = cache_folder(), list[str]()
    try:
        unpacked(name, version, cache)
        wrong += compared(cache, {f"{name} {tested}": version})
        if name in dict(ENGINES):
            with tempfile.TemporaryDirectory() as work:
                wrong += run(name, version, prepare(Path(work)), like=tested)
    except (Unavailable, OSError, SyntaxError) as error:  # a file that is written for a newer Python, among others
        wrong.append(f"{type(error).__name__}: {error}")
    return wrong


def main() -> int:
    """Try them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(TESTED), help="one of them")
    only, code = parser.parse_args().only, 0
    for name, tested in TESTED.items():
        if only not in (None, name):
            continue
        try:
            version = newest(name)
        except Unavailable as error:
            print(f"{name}: {error}")
            code = 1
            continue
        if version == tested:
            print(f"{name} {version} is the newest, and is tested", flush=True)
            continue
        wrong = moved(name, version, tested)
        first = f"{name} {version} in place of {tested}: {len(wrong) or 'no'} difference{'s' * (len(wrong) != 1)}"
        print("\n".join([first, *wrong]), flush=True)
        code |= bool(wrong)
    return code


if __name__ == "__main__":
    sys.exit(main())
