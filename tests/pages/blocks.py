"""The code blocks of a page of the documentation, and how each is run.

A page is a script: its Python blocks run in the order of the page, in one namespace, in an empty folder.

* ```` ```python ````: run. With `title="NAME"`: written to the file NAME instead.
* ```` ```bash ````: run by bash, so a page shows the files that it has written at work.
* ```` ```shell ````: commands for other machines; only the arguments of `lockstep` are checked.
* ```` ```yaml ````, ```` ```json ````: parsed.
* ```` ```text ````: output.
* `<!-- setup ... -->`, `<!-- bash ... -->`: Python and commands that readers need not see.
* After `<!-- from FILE:NAME -->`: what stands in FILE between `# [start:NAME]` and `# [end:NAME]`; not run here.

`python blocks.py PAGE` runs the Python blocks of a page, on each rank of a job.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_FENCE = re.compile(
    r"^(?:<!-- from (?P<source>\S+) -->\n)?"
    r"(?P<indent> *)```(?P<language>\w*)(?P<options>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$"
    r"|^<!-- (?P<hidden>setup|bash)\n(?P<unseen>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
LANGUAGES = {"python", "bash", "shell", "yaml", "json", "text"}
ROOT = Path(__file__).parents[2]
# Not those that other commands make, or that record what was.
PAGES = [
    page
    for page in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    if page.name not in ("models.md", "parity.md") and "decisions" not in page.parts
]


def copies_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the blocks of a page that are copies: where each is from, and its lines."""
    for found in _FENCE.finditer(page.read_text()):
        if found["source"]:
            yield found["source"], found["code"]


class Block(NamedTuple):
    """One block of code of a page.

    Attributes:
        language: the word after the fence; "setup" for Python that readers don't see.
        code: its lines.
        line: the number of its first line in the page.
        title: the file that it is written to; empty if it is run.
    """

    language: str
    code: str
    line: int
    title: str = ""


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        if found["hidden"] is not None:
            yield Block(found["hidden"], found["unseen"], text.count("\n", 0, found.start("unseen")) + 1)
            continue
        if found["source"] or found["code"].startswith("--8<--"):
            continue  # from a file of the repository, with tests of its own
        code = re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE)
        title = re.search(r'title="([^"]+)"', found["options"])
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(found["language"], code, line, "" if title is None else title[1])


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page shows."""
    for block in blocks_of(page):
        if block.title:
            write_file(block, folder)


def write_file(block: Block, folder: Path) -> None:
    """Write a block to the file that it names."""
    path = folder / block.title
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.code)


def run_python(page: Path) -> None:
    """Run the Python blocks of a page in one namespace; tracebacks show the page's lines."""
    sys.path.insert(0, "")  # for the files that the page shows
    namespace = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.language in ("python", "setup") and not block.title:
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), namespace)


if __name__ == "__main__":
    run_python(Path(sys.argv[1]))
