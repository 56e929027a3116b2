"""Chromium without a window, driven over two pipes by its DevTools protocol: one process for all pages."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

OPTIONS = """
    --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update
    --disable-sync --disable-extensions --disable-default-apps --remote-debugging-pipe
"""
SECONDS = 60.0
# After all that the page's script has put off.
SETTLED = "new Promise(done => setTimeout(done, 50)).then(() => document.documentElement.outerHTML)"


class Chromium:
    """A browser that opens pages, one after the other."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # It reads from descriptor 3 and writes to 4.
        words = ["bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "", program, *OPTIONS.split()]
        self._process = subprocess.Popen(
            [*words, f"--user-data-dir={profile}"], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._received, self._events, self._number = b"", [], 0

    def page(self, url: str) -> tuple[str, list[str]]:
        """Return a page as its script has left it, and what it has written to the console."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        size = {"width": 1200, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", session, **size)
        for domain in ("Runtime", "Log", "Page"):
            self._call(f"{domain}.enable", session)
        self._events.clear()
        self._call("Page.navigate", session, url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())
        dom = self._call("Runtime.evaluate", session, expression=SETTLED, awaitPromise=True)["result"]["value"]
        complaints = [json.dumps(event["params"]) for event in self._events if _is_complaint(event["method"])]
        self._call("Target.closeTarget", targetId=target)
        return dom, complaints

    def close(self) -> None:
        """End it, and its own processes with it."""
        self._call("Browser.close")
        self._process.wait(SECONDS)
        os.close(self._to)
        os.close(self._from)

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        request = {"id": self._number, "method": method, "params": params}
        os.write(self._to, json.dumps(request | ({"sessionId": session} if session else {})).encode() + b"\0")
        while "id" not in (message := self._message()):
            self._events.append(message)
        assert message["id"] == self._number
        assert "error" not in message, message
        return message["result"]

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"chromium has said nothing for {SECONDS:g} s"
            part = os.read(self._from, 2**20)
            assert part, "chromium has ended"
            self._received += part
        first, _, self._received = self._received.partition(b"\0")
        return json.loads(first)


def _is_complaint(method: str) -> bool:
    return method in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
