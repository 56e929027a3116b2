from __future__ import annotations

import os
import pty
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from lockstep.errors import LaunchError
from lockstep.launch import JobSpec, launch
from lockstep.launch.elastic import _end_by_signal
from lockstep.launch.job import SENT_SIGNALS, usable_cores

from .jobs import require

SUM_OF_RANKS = """
    import os, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    {before}
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    print(f"attempt {{attempt}} rank {{rank}} sum {{total.item()}}")
    {after}
    dist.destroy_process_group()
"""


def ranks_of(job):
    """Return the processes of the ranks, once there are two."""
    return _eventually(lambda: (found := _ranks_of(psutil.Process(job.pid))) and len(found) == 2 and found)


def _ranks_of(process):
    return [child for child in process.children() if "lockstep.launch.worker" in child.cmdline()]


def _eventually(condition, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    raise AssertionError("did not come about in time")


def test_two_ranks_of_a_bare_script_on_loopback_alone(scripts):
    script = scripts.write(SUM_OF_RANKS.format(before="", after="time.sleep(60)"))
    job = scripts.start(script, "--nproc", "2")
    assert {job.stdout.readline() for _ in range(2)} == {f"attempt 0 rank {r} sum 1.0\n" for r in range(2)}
    listening = [
        connection.laddr.ip
        for process in [psutil.Process(job.pid), *ranks_of(job)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 3  # the store, and a gloo device in each rank
    assert set(listening) == {"127.0.0.1"}


def test_arguments_and_environment_reach_the_script(scripts):
    script = scripts.write("import os, sys\nprint(sys.argv[1:], os.environ['OMP_NUM_THREADS'])")
    code, out, err = scripts.run("--nproc", "1", script, "--lr", "0.1", "${local_rank}", "--", "--nproc", "7")
    cores = usable_cores()
    assert code == 0
    assert out == f"['--lr', '0.1', '${{local_rank}}', '--nproc', '7'] {int(cores)}\n"
    assert err == f"lockstep: starting 1 rank, OMP_NUM_THREADS={int(cores)} each ({cores:g} cores); loading torch\n"
    code, out, err = scripts.run("--nproc", "1", script, env={"OMP_NUM_THREADS": ""})  # as if it were not set
    assert (code, out) == (0, f"[] {int(cores)}\n")
    code, out, err = scripts.run(script, "--nproc", "2", env={"OMP_NUM_THREADS": "5"})
    assert (code, out, err) == (0, "[] 5\n[] 5\n", "lockstep: starting 2 ranks; loading torch\n")
    shows = scripts.write("import os\nprint(os.environ['GLOO_SOCKET_IFNAME'])")
    assert (
        scripts.run("--nproc", "1", shows, env={"GLOO_SOCKET_IFNAME": ""})[1] == scripts.run("--nproc", "1", shows)[1]
    )


@pytest.mark.parametrize(
    ("name", "value", "must"),
    [
        ("OMP_NUM_THREADS", "abc", "be a number of threads, at least 1"),
        ("OMP_NUM_THREADS", "0", "be a number of threads, at least 1"),
        ("OMP_NUM_THREADS", "2,x", "be a number of threads, at least 1"),
        ("GLOO_SOCKET_IFNAME", "no0", "be one of "),
    ],
)
def test_variables_that_no_rank_can_read_are_named_before_any_starts(scripts, name, value, must):
    code, out, err = scripts.run("--nproc", "2", scripts.write("print('runs')"), env={name: value})
    assert (code, out) == (1, "")
    assert f"error: {name} must {must}" in err
    assert f"but is {value!r}. Unset it" in err


def test_a_launch_that_srun_has_started_several_times_is_told(scripts):
    tasks = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1"}
    tasks |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    script = scripts.write("")
    for rank, count in (("0", 1), ("1", 0)):
        env = tasks | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        code, _, err = scripts.run("--nproc", "1", script, env=env)
        assert code == 0
        assert err.count("warning: srun has started this command 2 times, and each starts a job of its own") == count


def test_too_few_open_files_are_said_before_any_rank_starts(scripts):
    script = scripts.write("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])")
    before = ("sh", "-c", 'ulimit -n 20 && exec "$@"', "sh")
    code, out, err = scripts.run("--nproc", "1", script, before=before)
    assert (code, out) == (1, "")
    assert "error: `ulimit -n`, the number of open files, must be at least 64 for a job, but is 20, and can't" in err
    before = ("sh", "-c", 'ulimit -S -n 40 && exec "$@"', "sh")  # which this process may raise itself
    assert scripts.run("--nproc", "1", script, before=before)[:2] == (0, "1024\n")


@require("unshare", root=True, able_to=("unshare", "--mount", "true"))
def test_ranks_have_the_cores_that_a_container_was_given(scripts):
    give = "mount -t tmpfs tmpfs /sys/fs/cgroup && echo 100000 100000 > /sys/fs/cgroup/cpu.max"
    before = ("unshare", "--mount", "sh", "-c", f'{give} && exec "$@"', "sh")
    _, _, err = scripts.run(scripts.write(""), before=before)
    assert err == "lockstep: starting 1 rank, OMP_NUM_THREADS=1 each (1 cores); loading torch\n"


def test_a_module_runs_too(scripts):
    scripts.write("import sys\nprint(__name__, sys.argv[1:])", "tool.py")
    assert scripts.run("-m", "tool", "--nproc", "1", "-m", "x")[:2] == (0, "__main__ ['-m', 'x']\n")


def test_a_failure_is_told_once_with_the_rank_and_its_traceback(scripts):
    script = scripts.write(SUM_OF_RANKS.format(before="if rank == 1: raise ValueError('boom')", after=""))
    code, _, err = scripts.run(script, "--nproc", "2")
    assert code == 1
    head, _, tail = err.partition("error: ")
    assert head.startswith("lockstep: starting 2 ranks")
    assert tail.startswith("rank 1 raised ValueError (pid ")
    assert tail.partition("\n\nAfter it:")[0].rstrip().endswith("ValueError: boom")
    assert err.count("boom") == 2  # the line of the script, and the error
    assert "torch/distributed/elastic" not in err
    assert "lockstep/launch" not in err


ONE_RANK_FAILS = """
    import atexit, time
    from lockstep.dist import all_gather_object, get_rank, init_dist
    init_dist("pytorch")
    {before}
    try:
        all_gather_object((lambda: 0) if get_rank() == 1 else 0)
    except TypeError:
        {meanwhile}
        raise ValueError("boom")
"""


@pytest.mark.parametrize(
    "slow",
    [
        {"before": "if get_rank() == 1: atexit.register(time.sleep, 2)", "meanwhile": "pass"},
        {"before": "", "meanwhile": "time.sleep(1)"},
    ],
    ids=["to end", "to raise"],
)
def test_the_rank_that_failed_first_is_named_although_it_is_slow(scripts, slow):
    code, _, err = scripts.run(scripts.write(ONE_RANK_FAILS.format(**slow)), "--nproc", "2")
    assert code == 1
    assert err.partition("error: ")[2].startswith("rank 1 raised ValueError (pid ")
    assert "After it: rank 0 raised PeerError" in err


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("sys.exit(3)", 3, "rank 1 exited with code 3"),
        ("sys.exit(-1)", 255, "rank 1 exited with code 255"),
        ("sys.exit('words')", 1, "rank 1 exited with code 1"),
        ("os._exit(7)", 7, "rank 1 exited with code 7"),
        ("raise KeyboardInterrupt", 130, "rank 1 raised KeyboardInterrupt"),
        ("raise ValueError('boom')", 1, "rank 1 raised ValueError"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was ended by SIGKILL"),
        ("os.kill(os.getpid(), 11)", 139, "rank 1 was ended by SIGSEGV"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(scripts, end, code, says):
    script = scripts.write(f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)\n")
    got, _, err = scripts.run(script, "--nproc", "2")
    assert got == code
    assert says in err


@pytest.mark.parametrize("early", [0, 1])
def test_a_script_that_ends_before_its_rank_comes_is_told_to_those_that_wait_for_it(scripts, early):
    script = scripts.write(f"""
        import os
        from lockstep.dist import init_dist
        if os.environ["RANK"] != "{early}":
            init_dist("pytorch", timeout=300)
    """)
    code, _, err = scripts.run("--nproc", "3", script)
    assert code == 1
    assert f"error: rank {early} exited with code 0 (pid " in err
    assert err.count("raised PeerError at") == 2


def test_an_exit_code_counts_also_where_the_agent_had_to_stop_the_rank(scripts):
    leave = "import atexit; atexit.register(time.sleep, 60); sys.exit(3)"
    script = scripts.write(
        f"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            {leave}
        time.sleep(1)
        from lockstep.errors import PeerError
        raise PeerError("rank 1 is gone", rank=1, cause="")
        """
    )
    code, _, err = scripts.run(script, "--nproc", "2")
    assert code == 3
    assert "error: rank 1 exited with code 3" in err


def test_the_exit_code_is_that_of_the_last_attempt(scripts):
    script = scripts.write("import os, sys\nsys.exit(10 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))")
    assert scripts.run(script, "--nproc", "2", "--max-restarts", "1")[0] == 11


def test_the_first_line_comes_before_torch(scripts):
    (scripts.folder / "torch.py").write_text("import time\ntime.sleep(60)")
    job = scripts.start(scripts.write(""), "--nproc", "2")
    assert job.stderr.readline().startswith("lockstep: starting 2 ranks")


def test_a_killed_rank_is_replaced(scripts):
    killed = "if rank == 1 and attempt == '0': os.kill(os.getpid(), 9)"
    script = scripts.write(SUM_OF_RANKS.format(before=killed, after=""))
    code, out, err = scripts.run(script, "--nproc", "2", "--max-restarts", "1")
    assert code == 0
    assert sorted(out.splitlines()) == [f"attempt 1 rank {r} sum 1.0" for r in range(2)]
    assert "rank 1 was ended by SIGKILL" in err
    assert "Starting all ranks again (restart 1 of 1)." in err


def test_attempts_come_to_an_end(scripts):
    script = scripts.write("import sys\nsys.exit('not again')")
    code, _, err = scripts.run(script, "--nproc", "1", "--max-restarts", "2")
    assert code == 1
    assert err.count("not again") == 3
    assert err.count("Starting all ranks again") == 2
    assert err.rstrip().splitlines()[-1].startswith("error: rank 0 exited with code 1")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_no_rank_outlives_the_job(scripts, number, code):
    script = scripts.write(
        """
        import os, signal, time
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    job = scripts.start(script, "--nproc", "2")
    assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    ranks = ranks_of(job)
    job.send_signal(number)
    assert job.wait(timeout=30) == code
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    err = job.stderr.read()
    assert "Traceback" not in err
    assert (f"{number.name}: all ranks were stopped" in err) == (number != signal.SIGKILL)


def test_a_signal_in_the_last_save_lets_a_script_succeed(scripts):
    script = scripts.write(
        """
        import time
        import torch
        from torch.utils.data import TensorDataset
        from lockstep.hooks import Hook
        from lockstep.runner import Runner

        class Slow(Hook):
            def before_save_checkpoint(self, runner, checkpoint):
                if runner.rank == 0:
                    print("saving", flush=True)
                time.sleep(2)

        Runner(
            torch.nn.Linear(1, 1),
            "work",
            loss=torch.nn.MSELoss(),
            train_dataloader={"dataset": TensorDataset(torch.ones(4, 1), torch.ones(4, 1)), "batch_size": 2},
            train_cfg={"max_epochs": 1},
            optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1}},
            custom_hooks=[Slow()],
        ).train()
        print("done", flush=True)
        """
    )
    job = scripts.start(script, "--nproc", "2")
    assert "saving\n" in iter(job.stdout.readline, "")
    job.send_signal(signal.SIGTERM)
    assert job.stdout.read().splitlines().count("done") == 2
    assert job.wait(timeout=60) == 0
    assert "were stopped" not in job.stderr.read()


def test_a_job_under_nohup_outlives_its_terminal(scripts):
    script = scripts.write("import time\nprint('ready', flush=True)\ntime.sleep(1)\nprint('done')")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = scripts.start(script, "--nproc", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGHUP)
    assert job.stdout.read() == "done\n"
    assert job.wait(timeout=30) == 0


def test_a_rank_gets_to_clean_up_when_interrupted(scripts):
    script = scripts.write(
        """
        import time
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            time.sleep(2)
            print("cleaned up", flush=True)
        """
    )
    job = scripts.start(script, "--nproc", "1")
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGINT)
    assert any("once more" in line for line in iter(job.stderr.readline, ""))
    for number in SENT_SIGNALS:  # only Ctrl-C once more would not wait
        time.sleep(0.2)
        job.send_signal(number)
    assert job.stdout.read() == "cleaned up\n"
    assert job.wait(timeout=30) == 130


def test_a_second_interrupt_ends_a_rank_that_is_deaf_to_the_first(scripts):
    script = scripts.write(
        """
        import signal, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    job = scripts.start(script, "--nproc", "1")
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGINT)
    assert any("once more" in line for line in iter(job.stderr.readline, ""))
    time.sleep(0.5)  # two within 0.3 s are one press
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=40) == 130  # within the grace of 60 seconds
    assert "rank 0 had not ended and had to be killed (a second Ctrl-C)" in job.stderr.read()


def test_where_a_rank_hangs_that_does_not_stop_and_what_another_raises_then_is_told(scripts):
    script = scripts.write(
        """
        import os, signal, time
        def stuck():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("ready", flush=True)
            time.sleep(60)
        def fail(*_):
            raise ValueError("no")
        if os.environ["RANK"] == "0":
            stuck()
        signal.signal(signal.SIGTERM, fail)
        time.sleep(60)
        """
    )
    job = scripts.start(script, "--nproc", "2", "--grace-seconds", "3")
    assert job.stdout.readline() == "ready\n"
    time.sleep(1.0)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == -signal.SIGTERM
    said = job.stderr.read()
    assert "rank 0 did not stop. It was here (most recent call first):\n" in said
    assert "in stuck" in said
    assert "rank 1 raised ValueError at script.py:8 when it was to stop" in said


def test_the_first_rank_keeps_the_terminal_and_the_others_write_to_logs(scripts):
    script = scripts.write("import os, sys\nprint(os.environ['RANK'], sys.stdout.isatty(), sys.stderr.isatty())")
    master, terminal = pty.openpty()
    try:
        job = scripts.start(script, "--nproc", "2", "--log-dir", "logs", stdout=terminal, stderr=terminal)
        assert job.wait(timeout=60) == 0
        shown = os.read(master, 10_000).decode().splitlines()
    finally:
        os.close(master)
        os.close(terminal)
    assert shown[-1:] == ["0 True True"]
    assert (scripts.folder / "logs" / "rank_1.log").read_text() == "1 False False\n"
    assert [path.name for path in (scripts.folder / "logs").iterdir()] == ["rank_1.log"]


def test_nothing_is_left_in_the_temporary_folder(scripts, tmp_path):
    script = scripts.write("1 / 0")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    assert scripts.run(script, "--nproc", "2", env={"TMPDIR": str(temporary)})[0] == 1
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"command": []}, "`command` must name a script"),
        ({"nproc": 0}, "`--nproc` must be at least 1"),
        ({"max_restarts": -1}, "`max_restarts` must be an int of at least 0, but is -1"),
        ({"grace_seconds": "30"}, "`grace_seconds` must be a finite number of at least 0, but is '30'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, says):
    given = {"command": ["x.py"], "nproc": 1, **arguments}
    with pytest.raises(ValueError, match=says):
        launch(given.pop("command"), JobSpec(given.pop("nproc")), **given)


@pytest.mark.parametrize("command", ["x.py", b"x.py", Path("x.py"), 3, {"x.py"}])
def test_what_is_no_list_is_no_command(command: Any):
    with pytest.raises(TypeError, match=r"`command` must be a function, or a list such as .*, but is"):
        launch(command, JobSpec(1))


def test_a_signal_handler_that_python_does_not_know_does_not_fail_the_job(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """As a library in C sets one, which LD_PRELOAD loads before Python starts."""
    known = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR1 else known(number))
    (tmp_path / "script.py").touch()
    launch([str(tmp_path / "script.py")], JobSpec(1))
    assert known(signal.SIGUSR1) == signal.SIG_DFL


def test_a_number_is_no_job():
    with pytest.raises(TypeError, match=r"`job` must be a JobSpec, such as JobSpec\(2\) for two ranks, but is 2"):
        launch(["x.py"], 2)  # type: ignore[arg-type]


def test_a_node_that_a_signal_stops_after_another_has_failed_ends_as_that_one_does():
    agent = SimpleNamespace(
        is_complete=False, has_trained=True, has_failed=False, has_raised=False, killed=[], raised=[]
    )
    rendezvous = SimpleNamespace(give_up=lambda code: (0, 1))
    with pytest.raises(LaunchError, match="node 0 had failed before; what went wrong is written there") as raised:
        _end_by_signal(signal.SIGTERM, agent, rendezvous, trains=False)
    assert raised.value.exit_code == 1
