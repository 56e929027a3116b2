"""The report of a run: its records as one HTML page. Only files are read; torch is not imported."""

from __future__ import annotations

from lockstep.report.page import page_html, write_page
from lockstep.report.records import RunRecords, find_run, read_run

__all__ = ["RunRecords", "find_run", "page_html", "read_run", "write_page"]
