"""`lockstep`, and `python -m lockstep`, which is the same."""

from __future__ import annotations

from lockstep.cli.first_process import leave_first_process


def main() -> None:
    """Run the command line of this process."""
    leave_first_process()  # before what follows is imported, which takes a second

    from lockstep.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
