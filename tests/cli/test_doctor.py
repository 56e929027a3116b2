"""The doctor finds real causes: each is made, in a process of its own, before the doctor looks."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from lockstep.cli.doctor import Doctor, machine
from lockstep.cli.doctor.finding import Finding, print_table, run_check
from lockstep.cli.doctor.over_ranks import _devices, _threads
from lockstep.testing.pool import free_port

DOCTOR = (sys.executable, "-m", "lockstep", "doctor", "--json")
_OF_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "GLOO_",
    "NCCL_",
    "OMP_",
)


def look(*words, before=(), **options):
    """Return the exit code of `lockstep doctor --json` and what it has found, by name; of one name, the worst."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    env |= options.pop("env", {})
    done = subprocess.run(
        [*before, *DOCTOR, *words], env=env, capture_output=True, text=True, timeout=180, check=False, **options
    )
    told = json.loads(done.stdout) if done.stdout.startswith("{") else pytest.fail(done.stdout + done.stderr)
    order = {"ok": 0, "warning": 1, "fault": 2}
    assert told["status"] == max((one["status"] for one in told["findings"]), key=order.__getitem__)
    assert done.returncode == (1 if told["status"] == "fault" else 0)
    return told, {one["name"]: one for one in sorted(told["findings"], key=lambda one: order[one["status"]])}


def needs_root(*command):
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"needs root, and `{' '.join(command)}`")


def test_alone_it_tells_all_in_json_with_keys_that_stay():
    told, found = look()
    assert set(told) == {"format", "lockstep", "status", "world_size", "findings"}
    assert (told["format"], told["world_size"]) == (1, 1)
    assert {tuple(one) for one in told["findings"]} == {("name", "text", "status", "remedy", "facts", "ranks")}
    assert {
        *("lockstep", "python", "torch", "optional", "cores", "launcher", "variables", "host", "interfaces", "port"),
        *("shared memory", "limits", "accelerators", "backends"),
    } == set(found)
    assert found["torch"]["facts"]["version"] == version("torch")
    assert found["limits"]["facts"]["nofile"] == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert "lo" in [each["name"] for each in found["interfaces"]["facts"]["interfaces"]]
    assert found["cores"]["facts"]["affinity"] == sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(("files", "status"), [(100, "fault"), (600, "warning")])
def test_few_open_files(files, status):
    _, found = look(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files)))
    assert found["limits"]["status"] == status
    assert f"only {files} files may be open" in found["limits"]["text"]
    assert "limits.conf" in found["limits"]["remedy"]


def test_a_limit_of_open_files_that_init_dist_raises():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    _, found = look(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard)))
    assert found["limits"]["status"] == "ok"


def test_more_threads_than_cores():
    one = min(os.sched_getaffinity(0))
    _, found = look(env={"OMP_NUM_THREADS": "2"}, preexec_fn=lambda: os.sched_setaffinity(0, [one]))
    assert found["cores"]["status"] == "warning"
    assert found["cores"]["facts"]["affinity"] == [one]
    assert "OMP_NUM_THREADS to 1" in found["cores"]["remedy"]


def test_one_thread_is_not_too_many_for_half_a_core(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "usable_cores", lambda: 0.5)
    assert machine.cores({"OMP_NUM_THREADS": "1"}).status == "ok"
    assert machine.cores({"OMP_NUM_THREADS": "2"}).status == "warning"


def test_gpus_that_torch_counts_but_cannot_use_are_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for env in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}):
        found = machine.accelerators(env)
        assert found.status == "fault"
        assert "torch finds 8, but can't use them: Torch not compiled with CUDA" in found.text


def of_several_nodes(node: int, **others: str) -> dict[str, str]:
    ranks = {"RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "node0", "MASTER_PORT": "1", **others}


def test_a_host_name_that_is_a_loopback_address_keeps_gloo_from_other_nodes(monkeypatch: pytest.MonkeyPatch):
    """As Debian writes it to /etc/hosts: 127.0.1.1 for the host's own name."""
    monkeypatch.setattr(machine, "addresses_of", lambda _: ["127.0.1.1"])
    found = machine.interfaces(of_several_nodes(1))
    assert found.status == "fault"
    assert "which is 127.0.1.1 here: no other node reaches it" in found.text
    assert "Set GLOO_SOCKET_IFNAME" in found.remedy
    # Rank 0 listens at all its addresses, and gloo takes the interface that is named.
    with_interface = {"GLOO_SOCKET_IFNAME": "eth0"}
    assert machine.host(of_several_nodes(0, **with_interface)).status == "ok"
    assert machine.host(of_several_nodes(0)).status == "fault"
    assert machine.host(of_several_nodes(1, **with_interface)).status == "fault"
    monkeypatch.setattr(machine, "addresses_of", lambda _: ["10.0.0.1"])
    assert machine.interfaces(of_several_nodes(1)).status == "ok"


def test_an_interface_is_up_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(machine, "_INTERFACES", tmp_path / "none")
    assert machine.interfaces({"GLOO_SOCKET_IFNAME": "lo"}).status == "ok"


def test_a_number_of_thousands_of_digits_is_no_traceback():
    finding = run_check(machine.port, {"MASTER_PORT": "1" * 5000})
    assert (finding.name, finding.status) == ("port", "warning")


def test_an_error_of_any_kind_is_a_finding():
    def ill_device(env):
        raise RuntimeError("the device is ill")

    finding = run_check(ill_device, {})
    assert (finding.name, finding.text, finding.status) == (
        "ill device", "could not be found out: the device is ill", "warning",
    )  # fmt: skip


def test_no_secret_is_shown_in_a_table(capsys: pytest.CaptureFixture[str]):
    remedy = "set \x1b[2J DB_PASS=hunter2 anew"
    finding = Finding("variables", "MASTER_ADDR is http://me:s3cret@host, DB_PASS=hunter2", "warning", remedy)
    print_table("", [finding])
    assert "\x1b[2J" not in capsys.readouterr().out
    print_table("", [finding])
    for shown in (capsys.readouterr().out, finding.as_plain()["text"]):
        assert "http://me:***@host" in shown
        assert "s3cret" not in shown
        assert "hunter2" not in shown


def test_an_empty_number_of_threads_is_none():
    _, found = look(env={"OMP_NUM_THREADS": ""})
    assert found["variables"] == {**found["variables"], "status": "ok", "text": "no contradictions"}


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, found = look(env={"MASTER_PORT": str(port)})
        assert found["port"]["status"] == "fault"
        assert found["port"]["text"] == f"{port} (MASTER_PORT) is in use"
        assert "Choose another MASTER_PORT" in found["port"]["remedy"]
    _, found = look(env={"MASTER_PORT": str(port)})
    assert found["port"]["text"] == f"{port} (MASTER_PORT) is free"
    _, found = look(env={"RANK": "0", "WORLD_SIZE": "2"})
    assert (found["port"]["status"], found["meeting"]["status"]) == ("fault", "fault")


@pytest.mark.parametrize(
    ("make", "status", "says"),
    [
        ("mount -t tmpfs -o size=16m tmpfs /dev/shm", "warning", "16 MiB free of 16 MiB: workers of data loaders"),
        ("mount -t tmpfs -o ro tmpfs /dev/shm", "fault", "/dev/shm cannot be written"),
        ("mount -t tmpfs -o size=1m tmpfs /dev/shm", "fault", "/dev/shm cannot be written"),
    ],
)
def test_shared_memory_that_is_too_small(make, status, says):
    needs_root("unshare", "--mount", "true")
    _, found = look(before=("unshare", "--mount", "sh", "-c", f'{make} && exec "$@"', "sh"))
    assert found["shared memory"]["status"] == status
    assert says in found["shared memory"]["text"]
    assert "--shm-size" in found["shared memory"]["remedy"]


def test_a_host_name_that_does_not_resolve():
    needs_root("unshare", "--uts", "true")
    _, found = look(before=("unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh"))
    assert (found["host"]["status"], found["host"]["facts"]["addresses"]) == ("warning", [])
    assert "does not resolve" in found["host"]["text"]


@pytest.mark.parametrize(("tasks", "nodes", "status"), [(1, 1, "warning"), (2, 2, "fault")])
def test_a_node_of_slurm_whose_name_does_not_resolve_matters_to_several_nodes(tasks, nodes, status):
    of_step = {"PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_ID": "7", "STEP_ID": "0", "NTASKS": str(tasks)}
    of_step |= {"JOB_NODELIST": "no-such-host.invalid", "NNODES": str(nodes), "STEP_NUM_NODES": str(nodes)}
    counts = f"1(x{nodes})" if nodes > 1 else "1"
    of_step |= {"TASKS_PER_NODE": counts, "STEP_TASKS_PER_NODE": counts, "STEP_NUM_TASKS": str(tasks)}
    _, found = look("--timeout", "3", env={f"SLURM_{name}": value for name, value in of_step.items()})
    assert (found["launcher"]["status"], found["host"]["status"]) == ("ok", status)
    assert "the node of rank 0, no-such-host.invalid, does not resolve" in found["host"]["text"]


def test_two_nodes_on_one_machine():
    rdzv = f"127.0.0.1:{free_port()}"
    words = ("--timeout", "60", "--nnodes", "2", "--rdzv", rdzv)
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    other = subprocess.Popen([*DOCTOR, *words, "--node-rank", "1"], env=env, stdout=subprocess.DEVNULL)
    _, found = look(*words)
    other.wait(timeout=60)
    assert found["interfaces"]["status"] == "ok"  # the launcher has chosen it
    assert "is 127.0.0.1 here, which no other node reaches" in found["host"]["text"]


@pytest.mark.parametrize(("rank", "missing"), [("0", "SLURM_JOB_NODELIST"), ("1", "SLURM_STEP_ID")])
def test_variables_of_slurm_that_are_missing(rank, missing):
    env = {"SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_LOCALID": rank, "SLURM_NODEID": "0"}
    _, found = look(env=env)
    assert found["launcher"]["status"] == "fault"
    assert missing in found["launcher"]["text"]


def test_an_interface_that_is_down():
    needs_root("unshare", "--net", "ip", "link")
    make = 'ip link set lo up; ip link add no-cable type veth peer name other; exec "$@"'
    before = ("unshare", "--net", "sh", "-c", make, "sh")
    _, found = look(before=before, env={"GLOO_SOCKET_IFNAME": "no-cable"})
    assert found["interfaces"]["status"] == "fault"
    assert "GLOO_SOCKET_IFNAME names no-cable, which is down" in found["interfaces"]["text"]


def test_ranks_that_cannot_meet():
    port = free_port()
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    told, found = look("--timeout", "3", env={**alone, "MASTER_ADDR": "127.0.0.1"})
    assert (told["world_size"], found["meeting"]["status"]) == (2, "fault")
    assert found["port"]["status"] == "ok"
    _, found = look("--timeout", "3", env={**alone, "MASTER_ADDR": "no-such-host.invalid"})
    assert "MASTER_ADDR, no-such-host.invalid, does not resolve" in found["host"]["text"]
    waits = {**alone, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    _, found = look("--timeout", "3", env=waits)
    assert f"nobody answers at 127.0.0.1:{port}" in found["port"]["text"]
    told, found = look("--timeout", "3", "--nnodes", "2", "--rdzv", f"127.0.0.1:{port}")
    assert (told["world_size"], found["meeting"]["status"]) == (2, "fault")
    assert found["meeting"]["text"].startswith("node 1 did not come within 3 s")
    assert found["port"]["text"] == f"{port} (--rdzv), where node 0 listens"
    env = {**os.environ, **alone, "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [*DOCTOR, "--timeout", "3"], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "rank 1 of 2: the ranks cannot meet" in done.stderr


@pytest.fixture
def rank_1_differs(tmp_path):
    """Return a folder for PYTHONPATH that gives rank 1 another variable and another numpy."""
    (tmp_path / "sitecustomize.py").write_text(
        dedent("""
            import os, sys
            if os.environ.get("RANK") == "1":
                os.environ["NCCL_DEBUG"] = "INFO"
                sys.path.insert(0, os.path.join(os.path.dirname(__file__), "other"))
        """)
    )
    other = tmp_path / "other" / "numpy-0.1.2.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.1.2\n")
    return tmp_path


def test_ranks_that_differ(rank_1_differs):
    env = {"PYTHONPATH": f"{rank_1_differs}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    told, found = look("--nproc", "2", env=env)
    assert told["world_size"] == 2
    differs = found["versions over ranks"]
    assert differs["status"] == "fault"
    assert f"numpy differs: {version('numpy')} (rank 0), 0.1.2 (rank 1)" in differs["text"]
    assert "NCCL_DEBUG differs: unset (rank 0), INFO (rank 1)" in found["variables over ranks"]["text"]


@pytest.mark.parametrize("start", ["doctor", "launch", "torchrun"])
def test_ranks_that_are_alike(start):
    before = {
        "doctor": (),
        "launch": (sys.executable, "-m", "lockstep", "launch", "--nproc", "2"),
        "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    }[start]
    words = () if before else ("--nproc", "2")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    target = ("-m", "lockstep", "doctor", "--json") if before else DOCTOR
    done = subprocess.run([*before, *target, *words], env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    found = {one["name"]: one for one in told["findings"]}
    assert told["world_size"] == 2
    assert found["limits"]["ranks"] == [0, 1]
    assert found["devices over ranks"]["facts"]["devices"][1]["device"] in ("cpu", "cuda:1")
    assert found["hosts over ranks"]["facts"]["hosts"] == [socket.gethostname()] * 2


def test_a_device_is_shared_by_ranks_of_one_machine_whatever_it_is_called() -> None:
    def found(*places: tuple[str, str]) -> Finding:
        device = {"device": "cuda:0", "id": "0000:01", "name": "x"}
        return _devices([{"host": host, "machine": machine, "device": device} for host, machine in places])

    assert found(("localhost", "a"), ("localhost", "b")).status == "ok"
    assert "ranks 0, 1 on one use the same cuda:0" in found(("one", "a"), ("two", "a")).text


def test_tables_have_each_finding_and_remedy(lockstep):
    cores = len(os.sched_getaffinity(0))
    code, out, err = lockstep("doctor", "--nproc", "2", env={"COLUMNS": "200", "OMP_NUM_THREADS": str(cores)})
    assert code == 0, err
    assert out.startswith("lockstep doctor")
    assert "over 2 ranks" in out
    assert f"{2 * cores} threads of 2 ranks on " in out
    assert "Set OMP_NUM_THREADS=" in out


def a_rank(host: str, cores: range, usable: float, threads: int, container: str = "") -> dict[str, object]:
    return {"host": host, "container": container or host, "cores": [*cores], "usable": usable, "threads": threads}


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        # A quota of 4 CPUs in a container on a machine of 64, and the same without one.
        ([a_rank("pod", range(64), 4.0, 4)] * 8, "pod: 32 threads of 8 ranks on 4 cores: they wait"),
        ([a_rank("pod", range(64), 64.0, 8)] * 8, "pod: 64 threads of 8 ranks on 64 cores"),
        # Bound to cores of their own, or to the same ones.
        ([a_rank("h", range(n, n + 2), 2.0, 2) for n in (0, 2)], "h: 4 threads of 2 ranks on 4 cores"),
        ([a_rank("h", range(2), 2.0, 2)] * 2, "h: 4 threads of 2 ranks on 2 cores: they wait"),
        # Two machines, and a system that does not know its ranks' cores.
        (
            [a_rank(name, range(2), 2.0, 1) for name in "aabb"],
            "a: 2 threads of 2 ranks on 2 cores\nb: 2 threads of 2 ranks on 2 cores",
        ),
        # Two machines of one name, and two containers of one machine: each has a quota of its own.
        (
            [a_rank("localhost", range(2), 2.0, 2, f"machine {n} localhost") for n in range(2)],
            "localhost: 2 threads of 1 rank on 2 cores\nlocalhost: 2 threads of 1 rank on 2 cores",
        ),
        (
            [a_rank("pod", range(64), 4.0, 4, f"machine pod.{n}") for n in range(2)],
            "pod: 4 threads of 1 rank on 4 cores\npod: 4 threads of 1 rank on 4 cores",
        ),
        ([a_rank("h", range(0), 8.0, 4)] * 2, "h: 8 threads of 2 ranks on 8 cores"),
    ],
)
def test_ranks_share_the_cores_and_the_quota_of_their_machine(facts: list[dict[str, object]], says: str) -> None:
    found = _threads(facts)
    assert found.text.startswith(says)
    assert found.status == ("warning" if "wait" in says else "ok")


def test_what_other_ranks_find_is_shown_where_it_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Finding("host", "MASTER_ADDR, 127.0.0.1, is 127.0.0.1 here", "fault", "Set it.", ranks=(1,)),
        Finding("cores", "2", ranks=(0,)),
        Finding("cores", "4", ranks=(1,)),
    ]
    Doctor()._print(found, 2)
    printed = capsys.readouterr().out
    assert "rank 1: MASTER_ADDR, 127.0.0.1, is 127.0.0.1 here" in printed
    assert "rank 0: 2" in printed
    assert "rank 1: 4" not in printed
