"""Check the links of a built site: python tools/links.py SITE.

Every link inside must lead to a file, and to an id in it. What a page loads must be a part of the site, so that it can
be read without a network.
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit


class Page(HTMLParser):
    """The links and ids of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag names."""
        values = {name: value for name, value in attrs if value is not None}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next") and "href" in values:
            self.loads.add(values["href"])
        elif "src" in values:
            self.loads.add(values["src"])


@cache
def _page(path: Path) -> Page:
    return Page(path.read_text())


def faults(site: Path) -> list[str]:
    """Return what is wrong with the links of a site."""
    found = []
    for path in sorted(site.rglob("*.html")):
        page = _page(path)
        found += [
            f"{path}: loads {link} from elsewhere" for link in page.loads if urlsplit(link).scheme in ("http", "https")
        ]
        for link in sorted(page.links | page.loads):
            address, anchor = urldefrag(link)
            if urlsplit(link).scheme or (path.name == "404.html" and link.startswith("/")):
                continue
            target = path if not address else (path.parent / unquote(address.partition("?")[0])).resolve()
            if not target.exists():
                found.append(f"{path}: {link} leads to no file")
            elif anchor and target.suffix == ".html" and unquote(anchor) not in _page(target).ids:
                found.append(f"{path}: {link} leads to no part of {target.name}")
    return found


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]).resolve())
    print("\n".join(wrong), file=sys.stderr)
    sys.exit(bool(wrong))
