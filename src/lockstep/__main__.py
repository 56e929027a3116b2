"""`python -m lockstep`: the same as `lockstep`."""

from __future__ import annotations

from lockstep.cli.main import main

if __name__ == "__main__":
    main()
