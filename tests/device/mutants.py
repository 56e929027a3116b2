"""Five faults that only an accelerator shows, each put into a copy of the source: which tests find it.

``make mutants`` prints them for each fault; it ends with 1 if a fault is not found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A fault: the module under src/lockstep, what stands there, what is put in its place, and the tests that should fail.
FAULTS = {
    "a synchronous call's None is waited for": (
        "transport/handles.py", "tuple([work for work in works if work is not None])", "tuple(works)", "test_device.py",
    ),
    "a batch is copied while the host waits": (
        "model/preprocessor.py",
        'return _moved(data, device, non_blocking and device.type != "cpu")',
        "return _moved(data, device, False)",
        "test_loop.py",
    ),
    "an average on the CPU is read before its copy is complete": (
        "model/averaged.py", "torch.accelerator.current_stream(device).synchronize()", "pass", "test_loop.py",
    ),
    "headers travel on the device": (
        "transport/control.py",
        "    slots = [every[start",
        "    moved = torch.frombuffer(every, dtype=torch.uint8).to(torch.accelerator.current_accelerator())\n"
        "    with in_backend(comm):\n"
        "        torch_dist.broadcast(moved, group_src=0, group=comm.pg)\n"
        "    every = bytes_of(moved.cpu())\n"
        "    slots = [every[start",
        "test_device.py",
    ),
    "a call that hangs is not seen, since `wait` returned": (
        "transport/handles.py", "calls.running = (calls.number, monotonic(), last)", "return", "test_watch.py",
    ),
}  # fmt: skip


def main() -> None:
    """Run the tests with each fault, or with those whose numbers are given."""
    numbers = [int(word) for word in sys.argv[1:]] or range(1, len(FAULTS) + 1)
    found = [_is_found(number, name) for number, name in enumerate(FAULTS, 1) if number in numbers]
    print(f"{sum(found)} of {len(found)} faults are found")
    sys.exit(not all(found))


def _is_found(number: int, name: str) -> bool:
    """Return whether tests fail with a fault; print which."""
    module, old, new, tests = FAULTS[name]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True)
        file = Path(folder, "lockstep", module)
        source = file.read_text()
        if source.count(old) != 1:
            sys.exit(f"{module} has no place of its own for the fault {name!r}: {old!r}")
        file.write_text(source.replace(old, new))
        path = os.pathsep.join([folder, str(ROOT)])
        options = ("-q", "--tb=no", "--maxfail=5", "-p", "no:cacheprovider")
        command = [sys.executable, "-m", "pytest", *options, f"tests/device/{tests}"]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::\w+)(?:\[(.*?)\](?: - .*)?)?$", done.stdout, re.MULTILINE)
    print(f"{number}. {name} ({module}): {done.stdout.strip().splitlines()[-1]}")
    for test in dict.fromkeys(test for test, _ in failed):
        cases = [case for one, case in failed if one == test]
        print(f"   {test}, as with {', '.join(cases[:4])}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    main()
