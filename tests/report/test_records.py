from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest_names import train_record
