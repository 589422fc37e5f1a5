"""`python -m ep_moe` is `ep-moe`."""

from ep_moe.cli import main

if __name__ == "__main__":
    main()
