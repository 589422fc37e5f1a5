"""`python -m ep_moe` and the `ep-moe` command."""

import sys


def main() -> None:
    """Run the command line. Its imports take seconds, and Ctrl-C means the same in them as later."""
    try:
        from ep_moe import cli
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None
    cli.main()


if __name__ == "__main__":
    main()
