"""Progress bars of transformers start a thread."""

from __future__ import annotations

from transformers.utils import logging

logging.disable_progress_bar()
