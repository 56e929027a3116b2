"""Which names of `mmengine` do packages use, and which of them does the installed `mmengine` have?

    python compat/mmengine/uses.py mmpretrain-1.2.0-py2.py3-none-any.whl site-packages/mmdet ...

Each argument is a wheel or a folder. Nothing of the packages is run: their files are only parsed. A use is an imported
name (``from mmengine.runner import Runner``) or an attribute of an imported one (``mmengine.mkdir_or_exist``,
``Config.fromfile``); its weight is the number of files that have it. Names are resolved by importing `mmengine`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = "mmengine"


def sources(package: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of a package's Python files."""
    if package.is_dir():
        for file in sorted(package.rglob("*.py")):
            yield str(file), file.read_text(encoding="utf-8")
        return
    with zipfile.ZipFile(package) as wheel:
        for name in wheel.namelist():
            if name.endswith(".py"):
                yield f"{package.name}/{name}", wheel.read(name).decode("utf-8")


class Uses(ast.NodeVisitor):
    """The dotted names of `mmengine` that one file uses."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._bound: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        """``import mmengine.a [as b]``."""
        for alias in node.names:
            if alias.name.split(".")[0] == ROOT:
                self.found.add(alias.name)
                self._bound[alias.asname or ROOT] = alias.name if alias.asname else ROOT

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """``from mmengine.a import b [as c]``."""
        if node.level or (node.module or "").split(".")[0] != ROOT:
            return
        for alias in node.names:
            if alias.name == "*":
                self.found.add(str(node.module))
                continue
            dotted = f"{node.module}.{alias.name}"
            self.found.add(dotted)
            self._bound[alias.asname or alias.name] = dotted

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """``mmengine.a.b``, of which the imports are known."""
        names, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            names.append(base.attr)
            base = base.value
        if isinstance(base, ast.Name) and base.id in self._bound:
            self.found.add(".".join([self._bound[base.id], *reversed(names)]))
        self.generic_visit(node)


def find_uses(packages: list[Path]) -> dict[str, list[str]]:
    """Return the files that use each dotted name."""
    files: dict[str, list[str]] = defaultdict(list)
    for package in packages:
        for name, text in sources(package):
            tree = ast.parse(text, name)
            uses = Uses()
            uses.visit(tree)
            uses.visit(tree)  # a name may be used above the line that imports it, in a function
            for use in uses.found:
                files[use].append(name)
    return files


def resolve(dotted: str) -> tuple[object, str]:
    """Return what a dotted name is, and "" or why there is no such thing."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            found: object = import_module(name)
        except ModuleNotFoundError as error:
            if f"{name}.".startswith(f"{error.name}.") and length > 1:
                continue
            return None, f"{type(error).__name__}: {error}"
        except Exception as error:  # what a module raises when it is imported is what the table tells
            return None, f"{type(error).__name__}: {error}"
        for part in parts[length:]:
            try:
                found = getattr(found, part)
            except AttributeError:
                return None, f"{type(found).__name__} `{name}` has no `{part}`"
            name = f"{name}.{part}"
        return found, ""
    return None, "no such module"


def is_member(dotted: str, names: set[str]) -> bool:
    """Return whether a dotted name is an attribute of a class or function that is itself in `names`."""
    parent = dotted.rpartition(".")[0]
    if parent in names:
        found, _ = resolve(parent)
        return found is not None and not hasattr(found, "__path__") and not hasattr(found, "__spec__")
    return is_member(parent, names) if "." in parent else False


def main() -> int:
    """Print the names by weight, those that are missing first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument("--json", type=Path, help="also write the names, their weights and why each is missing")
    parser.add_argument("--files", action="store_true", help="also print the files that use a missing name")
    options = parser.parse_args()
    files = find_uses(options.packages)
    rows = []
    for name, users in sorted(files.items(), key=lambda item: (-len(item[1]), item[0])):
        with contextlib.redirect_stdout(sys.stderr):
            missing = resolve(name)[1]
        rows.append({"name": name, "files": len(users), "member": is_member(name, set(files)), "missing": missing})
    for row in rows:
        if row["missing"]:
            print(f"{row['files']:5}  {row['name']}: {row['missing']}")
            if options.files:
                print(*(f"         {user}" for user in files[str(row["name"])]), sep="\n")
    for kind, member in (("names", False), ("members of these", True)):
        of_kind = [row for row in rows if row["member"] is member]
        print(f"{sum(not row['missing'] for row in of_kind)} of {len(of_kind)} {kind} resolve")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(row["missing"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
