"""Make the pictures of a run in the README: python tools/picture.py. Needs chromium, and a quiet machine.

What `make demo` runs is run in a terminal of its own, and what stands on it at the end is written as SVG by rich. Then
the browser draws the report of that run, in light and in dark colors.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = ("lockstep", "train", "examples/digits/config.py", "--nproc", "2")
RUNS = Path("work_dirs/digits")
IMAGES = Path(__file__).parents[1] / "docs" / "images"
SCHEMES = {"dark": 0, "light": 1}  # as Blink numbers `prefers-color-scheme`
WIDTH = 92
_MOVES = re.compile(r"(\r|\n|\x1b\[\d*[A-HJK]|\x1b\[\?\d+[hl])")  # of the cursor; colors are kept


def main() -> None:
    """Run the demo, and write the pictures."""
    os.environ |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": str(WIDTH)}
    shown = bytearray()

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 4096)
        shown.extend(data)
        return data

    if pty.spawn(COMMAND, read):
        sys.exit("the demo has failed")
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115 - one
    console.print(f"$ {' '.join(COMMAND)}", highlight=False)
    for line in rows_of(shown.decode()):
        console.print(Text.from_ansi(line), overflow="ellipsis", no_wrap=True)
    console.save_svg(str(IMAGES / "demo.svg"), title="make demo")
    subprocess.run(["lockstep", "report", RUNS], check=True)
    run = max(path for path in RUNS.glob("2*") if (path / "report.html").exists())
    for scheme, number in SCHEMES.items():
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=3000"]
        command += ["--window-size=1240,1790", "--force-device-scale-factor=1.5"]
        command += [f"--blink-settings=preferredColorScheme={number}", f"--screenshot={IMAGES}/report-{scheme}.png"]
        subprocess.run([*command, (run / "report.html").absolute().as_uri()], check=True)


def rows_of(output: str) -> list[str]:
    """Return the rows of a terminal at the end, with their colors: a progress bar clears its row, and goes up."""
    rows, row = [""], 0
    for part in _MOVES.split(output):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part.endswith("A") and _MOVES.fullmatch(part):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            rows[row] = ""
        elif not _MOVES.fullmatch(part):
            rows[row] += part
    return [text for text in rows if text]


if __name__ == "__main__":
    main()
