"""Runs cells as a notebook does, and prints the text and the error of each: `python run_notebook.py FILE`.

In the file, the cells are separated by lines of `# %%`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

cells = [nbformat.v4.new_code_cell(cell) for cell in Path(sys.argv[1]).read_text().split("# %%\n")]
notebook = nbformat.v4.new_notebook(cells=cells)
NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True).execute()
outputs = [cell["outputs"] for cell in notebook.cells]
print(
    json.dumps(
        [
            {
                "text": "".join(output.get("text", "") for output in of_cell),
                "error": next((output["evalue"] for output in of_cell if output["output_type"] == "error"), None),
            }
            for of_cell in outputs
        ]
    )
)
