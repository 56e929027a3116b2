"""A server that speaks S3, on this machine, with the buckets `weights` and `runs`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import s3fs


@contextmanager
def serving() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server; yield its URL and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session", autouse=True)
def server() -> Iterator[None]:
    """Let variables lead to a server."""
    with serving() as (url, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        s3fs.S3FileSystem().mkdir("weights")  # its threads stay from here on
        s3fs.S3FileSystem().mkdir("runs")
        yield


def run_job(script: str, *words: Any, ranks: int = 2, code: int | None = 0, **env: str) -> str:
    """Run a script on ranks of its own, as the rank pool would blame them for the threads of s3fs.

    Args:
        script: its name in this folder.
        words: its arguments.
        ranks: how many.
        code: the exit code that it must have; None for any but 0.
        env: changes to the environment.

    Returns:
        What it has written to stderr.
    """
    path = Path(__file__).with_name(script)
    job = [sys.executable, "-m", "lockstep", "launch", str(path), "--nproc", str(ranks), "--", *map(str, words)]
    done = subprocess.run(job, env=os.environ | env, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == code) if code is not None else done.returncode, done.stderr[-4000:]
    return done.stderr
