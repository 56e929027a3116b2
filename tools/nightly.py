"""Run each word of the Makefile whole, one after the other; write the results to docs/verified.md, dates to README.md.

``make nightly`` runs all of them, which takes hours on two cores; ``make nightly WORDS="parity test-jobs"`` runs some.
The rows of the words that are not run stay as they were; test-gpu is left out where there is no GPU. Ends with 1 if a
word has failed.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "verified.md"
README = ROOT / "README.md"
WORDS = (
    "check", "test", "demo", "test-checkpoints", "test-layouts", "test-jobs", "faults-page", "test-deepspeed",
    "test-colossalai", "test-models", "parity", "resume-matrix", "test-docs", "test-huggingface", "test-buckets",
    "test-trackers", "test-data-packages", "test-integrations", "dist", "test-mmengine", "mmengine-trainings",
    "mmengine-models", "soak-kills", "soak-preemption", "soak-resume", "soak-numbers", "soak-elastic", "soak-faults",
    "bench-scale", "test-device", "test-models-device", "mutants", "test-gpu",
)  # fmt: skip
HEAD = """# What was verified, when, and on what

`make nightly` runs each word of the Makefile whole and writes this page. CI runs `check`, `test`, `demo`, and of the
long words the part that `.ci/slices.mk` names. *On* says what computed: where no GPU is named, everything ran on the
CPU, over gloo. *Commit* is the newest commit then; a `+` says that source or tests had changed since. What is not in
this table was never run as a whole by this command.

| word | result | ended (UTC) | minutes | commit | on |
|---|---|---|--:|---|---|
"""


def main() -> None:
    words = sys.argv[1:] or [word for word in WORDS if word != "test-gpu" or torch.accelerator.is_available()]
    if unknown := set(words) - set(WORDS):
        sys.exit(f"words must be among {', '.join(WORDS)}, but are {', '.join(sorted(unknown))}")
    failed = []
    for word in words:
        print(f"==> make {word}", flush=True)
        code, row = _run(word)
        print(row, flush=True)
        _write(word, row)
        if code:
            failed.append(word)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _run(word: str) -> tuple[int, str]:
    commit, began = _commit(), time.monotonic()
    lines = []
    environment = {**os.environ, "CI": "true"}  # a launcher that is missing fails its tests, instead of skipping them
    with subprocess.Popen(
        ["make", word], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            lines.append(line.strip())
    minutes = (time.monotonic() - began) / 60
    said = _last_word(lines)
    result = said if process.returncode == 0 else f"**failed** ({said})"
    cells = (f"`make {word}`", result, f"{datetime.now(UTC):%Y-%m-%d %H:%M}", f"{minutes:.1f}", commit, _machine())
    return process.returncode, f"| {' | '.join(cells)} |"


def _last_word(lines: list[str]) -> str:
    """Return pytest's closing lines if there are any, else the last line that is not of make or a run's folder."""
    closing = [
        match[1] for line in lines if (match := re.fullmatch(r"=+ (.*\b(?:passed|failed|error)\b.*) in .*=+", line))
    ]
    last = next((line for line in reversed(lines) if line and not line.startswith(("make", "run "))), "no output")
    text = "; ".join(closing) or last.replace(f"{ROOT}{os.sep}", "")[:120]
    return re.sub(r"\x1b\[[0-9;]*m", "", text).replace("|", "\\|")


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "src", "tests", "compat") else "")


def _machine() -> str:
    cards = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{os.cpu_count()} cores ({platform.machine()}), {', '.join([f'torch {torch.__version__}', *cards])}"


def _write(word: str, row: str) -> None:
    rows = verified() | {word: row}
    PAGE.write_text(HEAD + "".join(f"{rows[one]}\n" for one in WORDS if one in rows))
    README.write_text(dated(README.read_text(), rows))


def verified() -> dict[str, str]:
    """Return the rows of the page by their words."""
    if not PAGE.exists():
        return {}
    return {match[1]: match[0] for match in re.finditer(r"^\| `make ([\w-]+)` \|.*\|$", PAGE.read_text(), re.MULTILINE)}


def dated(text: str, rows: Mapping[str, str]) -> str:
    """Return a text with what the rows say of each word behind it: a date, a failure and its date, or *not yet*."""
    return re.sub(
        r"`make ([\w-]+)` (?:(?:failed )?\d{4}-\d\d-\d\d|not yet)",
        lambda match: f"`make {match[1]}` {_date(rows.get(match[1]))}",
        text,
    )


def _date(row: str | None) -> str:
    if row is None:
        return "not yet"
    _, result, ended, *_ = row.split(" | ")
    return f"{'failed ' if result.startswith('**failed**') else ''}{ended.split()[0]}"


if __name__ == "__main__":
    main()
