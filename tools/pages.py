"""The pages of the site that are not in docs/: the API reference, the list of decisions, and files of the root."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lockstep"
# In the order in which a reader meets them. What is not here is not public as a module: calls, cli, diagnostics (whose
# hooks are in hooks), engines, groups, location, masking, output, transport, tree, version, watch.
MODULES = (
    "runner", "session", "hooks", "optim", "dataset", "evaluator", "strategy", "model", "checkpoint", "weights",
    "dist", "device", "config", "registry", "lint", "logging", "visualization", "report", "launch", "topology",
    "testing", "errors",
)  # fmt: skip


def on_config(config: Any) -> Any:
    """Put the pages into the navigation."""
    for section in config.nav:
        if "Reference" in section:
            section["Reference"] += [f"reference/{name}.md" for name in ("lockstep", *MODULES)]
        for entry in section.get("Project", []):
            if "Decisions" in entry:
                entry["Decisions"] = [f"decisions/{path.name}" for path in sorted(_decisions())]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Make the pages."""
    rows = ["# Reference", "", "| module | what it has |", "|---|---|"]
    for name in ("lockstep", *MODULES):
        module = "lockstep" if name == "lockstep" else f"lockstep.{name}"
        rows.append(f"| [`{module}`]({name}.md) | {_summary(name)} |")
        files.append(_page(config, f"reference/{name}.md", _reference(name, module)))
    files.append(_page(config, "reference/index.md", "\n".join(rows) + "\n"))
    changes = (ROOT / "CHANGELOG.md").read_text()
    files.append(_page(config, "changelog.md", changes.replace("](docs/", "](")))
    files.append(_page(config, "security.md", (ROOT / "SECURITY.md").read_text().replace("](docs/", "](")))
    return files


def _reference(name: str, module: str) -> str:
    """Return the page of a module: its public names, also those that griffe takes for modules, and torch's."""
    lines = [f"# `{module}`", "", f"::: {module}", ""]
    for public in _public(_file(name)):
        origin = _origin(_file(name), public)
        if origin.startswith("torch"):
            lines.append(f"`{module}.{public}` is torch's: `{origin}.{public}`.\n")
        elif origin == f"{module}.{public}":
            lines.append(f"::: {origin}.{public}\n    options: {{show_root_heading: true}}\n")
    return "\n".join(lines)


def _public(file: Path) -> list[str]:
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def _origin(file: Path, name: str) -> str:
    """Return the module from which a module has a name, through those that hand it on; empty if it is its own."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            module = node.module or ""
            if not module.startswith("lockstep."):
                return module
            return _origin(_file(module.removeprefix("lockstep.").replace(".", "/")), name) or module
    return ""


def _file(name: str) -> Path:
    package = PACKAGE if name == "lockstep" else PACKAGE / name
    return package / "__init__.py" if package.is_dir() else package.with_suffix(".py")


def _page(config: Any, name: str, text: str) -> File:
    return File.generated(config, name, content=text)


def _decisions() -> list[Path]:
    return list((ROOT / "docs" / "decisions").glob("0*.md"))


def _summary(name: str) -> str:
    return (ast.get_docstring(ast.parse(_file(name).read_text())) or "").split("\n\n")[0].replace("\n", " ")
