"""Try the wheel in `dist/` as a stranger would: python tools/try_wheel.py.

It is installed into a fresh environment, by the constraints of this repository, with what it requires alone. There the
commands run, and the first page of the documentation on two ranks; then the page *First steps*, block by block, in an
empty folder. The time of each is printed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).parents[1]
BLOCKS = ROOT / "tests" / "pages" / "blocks.py"
sys.path.insert(0, str(BLOCKS.parent))
from blocks import blocks_of, write_file  # noqa: E402 - of the tests, which are not installed

COMMANDS = (
    "lockstep --version",
    "lockstep --help > help.txt",
    "lockstep doctor",
    "lockstep --show-completion bash > completion.bash",
)


def main() -> None:
    """Install the wheel, and run what a stranger would run first."""
    wheels = sorted((ROOT / "dist").glob("*.whl"))
    if len(wheels) != 1:
        sys.exit(f"dist/ must hold one wheel, but holds {len(wheels)}: run make dist")
    with tempfile.TemporaryDirectory() as place:
        environment, folder = Path(place) / "venv", Path(place) / "work"
        folder.mkdir()
        began = perf_counter()
        venv.create(environment, with_pip=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        pip += ["--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, str(wheels[0])], check=True)
        print(f"{perf_counter() - began:6.1f} s  pip install {wheels[0].name}", flush=True)
        for command in (*COMMANDS, f"lockstep launch {BLOCKS} --nproc 2 -- {ROOT / 'docs' / 'index.md'}"):
            run(command, environment, folder)
        subprocess.run([*pip, "scikit-learn"], check=True)
        for block in blocks_of(ROOT / "docs" / "first-steps.md"):
            if block.title:
                write_file(block, folder)
            elif block.language == "bash":
                run(block.code, environment, folder)
        print(f"{perf_counter() - began:6.1f} s  in all", flush=True)


def run(command: str, environment: Path, folder: Path) -> None:
    """Run a command in the fresh environment; if it fails, show what it printed, and end."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{variables['PATH']}"
    began = perf_counter()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{perf_counter() - began:6.1f} s  {' && '.join(command.strip().splitlines())}", flush=True)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nexit code {done.returncode}")


if __name__ == "__main__":
    main()
