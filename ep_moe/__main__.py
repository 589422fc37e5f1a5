"""`python -m ep_moe` is `ep-moe`."""

import sys


def main() -> None:
    """Entry point of the `ep-moe` command."""
    try:
        from ep_moe.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
