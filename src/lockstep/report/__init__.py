"""The report of a run: its records as one HTML page. Only files are read; torch is not imported."""

from __future__ import annotations

from lockstep.report.page import page_html, write_page
from lockstep.report.records import Run, find_run, read_run

__all__ = ["Run", "find_run", "page_html", "read_run", "write_page"]
