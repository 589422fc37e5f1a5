"""`python -m ep_moe` is `ep-moe`."""

from ep_moe.app.interrupts import end_on_interrupt


def main() -> None:
    """Entry point of the `ep-moe` command."""
    end_on_interrupt()
    from ep_moe.cli import main as run

    run()


if __name__ == "__main__":
    main()
