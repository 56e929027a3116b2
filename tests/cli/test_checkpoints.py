"""`lockstep checkpoints`: what a folder holds, whether it is whole, what differs, what is removed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lockstep.checkpoint import save_state
from lockstep.checkpoint.search import _content
from lockstep.checkpoint.verifying import check, verify
from lockstep.cli.main import app

from ..runs import RESUMABLE

RUN = "20260101_000000"


def called(*words: object, answer: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoints", *map(str, words)], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


@pytest.fixture
def work_dir(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        state = {
            "model": {"weight": torch.full((300, 40), float(number)), "steps": torch.tensor(number)},
            "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        }
        meta = {"epoch": number, "iter": 10 * number, "strategy": "FSDPStrategy"}
        save_state(tmp_path / RUN / f"epoch_{number}", state, meta, last_of=tmp_path)
    save_state(tmp_path / RUN / "best_accuracy_epoch_1", state, {"epoch": 1, "iter": 10})
    return tmp_path


def test_they_are_listed_the_newest_first(work_dir: Path):
    code, shown = called(work_dir)
    rows = [line.split() for line in shown.splitlines() if RUN in line]
    assert code == 0
    assert [row[0] for row in rows] == [
        f"{RUN}/{name}" for name in ("best_accuracy_epoch_1", "epoch_3", "epoch_2", "epoch_1")
    ]
    assert "epoch_3 (last)" in shown
    assert rows[1][4:] == ["FSDP", "not", "verified", "3", "30", "1", "48.0", "kB", "0", "bytes", "48.3", "kB"]
    assert called(work_dir / RUN)[0] == called(work_dir / RUN / "epoch_1")[0] == 0
    code, shown = called(work_dir, "--verify")
    assert code == 0
    assert "not verified" not in shown


def test_faults_and_drafts_are_named(work_dir: Path):
    data = work_dir / RUN / "epoch_2" / "rank_0.safetensors"
    content = bytearray(data.read_bytes())
    content[20_000] ^= 1
    data.write_bytes(content)
    assert called(work_dir)[0] == 0  # the file has its size
    draft = work_dir / RUN / ".epoch_4.draft.4194303.1.nowhere"
    draft.mkdir()
    code, shown = called(work_dir, "--verify")
    assert code == 1
    assert f"fault: {data} has wrong bytes between" in shown
    assert f"{draft.name} is being written" in shown  # on another host, and a moment ago


def test_one_is_shown(work_dir: Path):
    code, shown = called("show", work_dir / RUN / "epoch_2")
    assert code == 0
    for part in ("FSDPStrategy", "12,001", "float32 (1)", "int64 (1)", "epoch"):
        assert part in shown


def test_old_ones_are_removed_when_asked(work_dir: Path):
    code, shown = called("prune", work_dir, "--keep", 1, answer="n\n")
    assert code == 1
    assert "epoch_2" in shown
    names = sorted(path.name for path in (work_dir / RUN).iterdir())
    assert len(names) == 4
    code, shown = called("prune", work_dir, "--keep", 1, "--yes")
    assert code == 0
    assert sorted(path.name for path in (work_dir / RUN).iterdir()) == ["best_accuracy_epoch_1", "epoch_3"]
    assert f"kept: {RUN}/best_accuracy_epoch_1, {RUN}/epoch_3" in shown
    assert "removed 2 folders, " in shown
    kept = f"kept: {RUN}/best_accuracy_epoch_1, {RUN}/epoch_3\n"
    assert called("prune", work_dir, "--keep", 1) == (0, f"{kept}there is nothing to remove\n")


def test_the_only_whole_one_is_not_removed_for_damaged_ones(work_dir: Path):
    (work_dir / RUN / "epoch_3" / "rank_0.safetensors").unlink()
    data = work_dir / RUN / "epoch_2" / "rank_0.safetensors"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1  # only its checksum tells
    data.write_bytes(content)
    code, shown = called("prune", work_dir, "--keep", 1, "--yes")
    assert code == 1
    assert "fault: " in shown
    assert f"{RUN}/epoch_2  " in shown
    assert "  damaged\n" in shown
    assert "It is the last one, and is not removed" in shown
    # epoch_3 is the last one, and stays for whoever wants to look at it.
    assert sorted(path.name for path in (work_dir / RUN).glob("epoch_*")) == ["epoch_1", "epoch_3"]
    (work_dir / RUN / "epoch_1" / "manifest.json").unlink()
    code, shown = called("prune", work_dir, "--keep", 1, "--yes")
    assert code == 1
    assert "must hold a whole checkpoint besides the best one, which resuming falls back to, to be pruned" in shown


@pytest.mark.parametrize("is_hostile", [False, True])
def test_a_best_one_that_a_later_run_has_outdone_is_removed(work_dir: Path, is_hostile: bool):
    later = "20260103_000000"
    best = {"path": f"/moved/{later}/best_accuracy_epoch_5", "value": 0.9}
    former = [{"run": RUN, "epoch": 4, "iter": 40}]
    meta = RESUMABLE | {"checkpoint_hook": {"best": [] if is_hostile else {"accuracy": best}, "former_runs": former}}
    for name in ("epoch_5", "best_accuracy_epoch_5"):
        save_state(work_dir / later / name, {"model": {}, "ranks": {}}, meta, last_of=work_dir)
    save_state(work_dir / "20260102_000000" / "best_accuracy_epoch_2", {"model": {}}, RESUMABLE)  # in no one's past
    assert called("prune", work_dir, "--keep", 1, "--yes")[0] == 0
    outdone = [f"{RUN}/best_accuracy_epoch_1"] if is_hostile else []
    left = ["20260102_000000/best_accuracy_epoch_2", f"{later}/best_accuracy_epoch_5", f"{later}/epoch_5"]
    assert sorted(str(one.parent.relative_to(work_dir)) for one in work_dir.rglob("manifest.json")) == outdone + left


def test_what_others_have_written_is_not_removed(work_dir: Path):
    web = work_dir / RUN / "exported_web"
    web.mkdir()
    (web / "manifest.json").write_text('{"name": "app"}')
    (work_dir / RUN / "epoch_1" / "notes.txt").write_text("mine")
    code, shown = called("prune", work_dir / RUN / ".." / RUN, "--keep", 1, "--yes")
    assert code == 0
    assert "epoch_1 is not removed: no save has written notes.txt in it" in shown
    assert "exported_web" not in shown
    names = {path.name for path in (work_dir / RUN).iterdir()}
    assert names == {"best_accuracy_epoch_1", "epoch_1", "epoch_3", "exported_web"}


@pytest.mark.parametrize("verified", [0, 1])
def test_what_a_run_removes_meanwhile_is_passed_over(work_dir: Path, verified: int, monkeypatch: pytest.MonkeyPatch):
    save_state(work_dir / RUN / "epoch_4", {"model": {}}, {"epoch": 4, "iter": 40}, last_of=work_dir)
    monkeypatch.setattr(  # also where a later run had outdone the best one
        "lockstep.cli.checkpoints._outdone", lambda found, kept: [one for one in found if one.name.startswith("best_")]
    )
    examined = []

    def verify_beside_a_run(directory: Path) -> None:
        if len(examined) == verified:
            for name in ("best_accuracy_epoch_1", "epoch_1", "epoch_4"):
                shutil.rmtree(work_dir / RUN / name)
        examined.append(directory)
        verify(directory)

    monkeypatch.setattr("lockstep.cli.checkpoints.verify", verify_beside_a_run)
    code, shown = called("prune", work_dir, "--keep", 2, "--yes")
    removed, kept = ([], ["epoch_3", "epoch_2"]) if verified == 0 else (["epoch_2"], ["epoch_3"])
    assert f"kept: {', '.join(f'{RUN}/{name}' for name in kept)}\n" in shown
    assert [line.split()[0] for line in shown.splitlines() if "  " in line] == [f"{RUN}/{name}" for name in removed]
    assert code == 0


def test_what_a_run_removes_while_it_is_listed_is_no_fault(work_dir: Path, monkeypatch: pytest.MonkeyPatch):
    def check_beside_a_run(directory: Path) -> None:
        shutil.rmtree(work_dir / RUN / "epoch_1", ignore_errors=True)
        check(directory)

    monkeypatch.setattr("lockstep.cli.checkpoints.check", check_beside_a_run)
    code, shown = called(work_dir)
    assert "fault" not in shown
    assert "epoch_1 " not in shown.replace("best_accuracy_epoch_1", "")
    assert code == 0


@pytest.mark.parametrize("folder", ["", RUN, f"{RUN}/../{RUN}"])
def test_the_last_one_is_kept_wherever_it_is_named(work_dir: Path, folder: str, monkeypatch: pytest.MonkeyPatch):
    (work_dir / "last_checkpoint").write_bytes(_content(f"{RUN}/epoch_1"))
    monkeypatch.chdir(work_dir / folder)
    assert called("prune", "." if folder == RUN else work_dir / folder, "--keep", 1, "--yes")[0] == 0
    assert {path.name for path in (work_dir / RUN).glob("epoch*")} == {"epoch_1", "epoch_3"}


@pytest.mark.parametrize("folder", ["", "baseline"])
def test_the_last_one_is_kept_where_the_folder_of_its_run_was_renamed(work_dir: Path, folder: str):
    (work_dir / RUN).rename(work_dir / "baseline")
    assert "epoch_3 (last)" in called(work_dir / folder)[1]
    data = work_dir / "baseline" / "epoch_3" / "rank_0.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    code, shown = called("prune", work_dir / folder, "--keep", 1, "--yes")
    assert code == 1
    assert f"fault: {data} " in shown
    assert "It is the last one, and is not removed" in shown
    names = {path.name for path in (work_dir / "baseline").iterdir()}
    assert names == {"best_accuracy_epoch_1", "epoch_2", "epoch_3"}


def test_a_last_one_that_is_gone_is_said(work_dir: Path):
    shutil.rmtree(work_dir / RUN / "epoch_3")
    code, shown = called("prune", work_dir, "--keep", 1, "--yes")
    assert code == 1
    assert "epoch_3 does not exist. It is the last one" in shown
    assert {path.name for path in (work_dir / RUN).glob("epoch*")} == {"epoch_2"}


@pytest.mark.parametrize("folder", ["", RUN])
def test_nothing_is_removed_where_the_last_one_is_not_known(work_dir: Path, folder: str):
    (work_dir / "last_checkpoint").write_text("damaged")
    code, shown = called("prune", work_dir / folder, "--keep", 1, "--yes")
    assert code != 0
    assert "nothing is removed" in shown


def test_a_way_up_behind_a_link_leads_where_the_system_says(work_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "link").symlink_to(work_dir / RUN)
    save_state(elsewhere / "epoch_1", {"model": {}}, {"epoch": 1, "iter": 1})
    save_state(elsewhere / "epoch_2", {"model": {}}, {"epoch": 2, "iter": 2})
    assert called("prune", f"{elsewhere}/link/..", "--keep", 1, "--yes")[0] == 0
    assert {path.name for path in elsewhere.glob("epoch*")} == {"epoch_1", "epoch_2"}
    assert {path.name for path in (work_dir / RUN).glob("epoch*")} == {"epoch_3"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["{}/nowhere"], "does not exist"),
        (["{}/file"], "is a file"),
        (["{}/empty"], "has none"),
        (["{}/above"], "work is the work_dir of a run that has some"),
        (["{}/foreign"], "has none. {}/foreign/app/manifest.json is not of a checkpoint of lockstep, or can't be read"),
        (["{}/foreign/app"], "has none. {}/foreign/app/manifest.json is not of a checkpoint of lockstep"),
        (["{}/deeper"], "deeper has none"),
        (["show", "{}/empty"], "a checkpoint must be a directory with manifest.json in it"),
    ],
)
def test_what_is_no_folder_of_checkpoints_is_said(words: list[str], says: str, tmp_path: Path):
    save_state(tmp_path / "above" / "work" / "run" / "epoch_1", {"model": {}}, {})
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for folder in ("foreign/app", "deeper/a/b/app"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "manifest.json").write_text('{"name": "a web page"}')
    code, shown = called(*(word.format(tmp_path) for word in words))
    assert code == 1
    assert says.format(tmp_path) in shown.replace("\n", " ")
    assert ("is the work_dir" in shown) == (words == ["{}/above"])


def test_listing_and_verifying_do_without_torch(work_dir: Path):
    script = (
        "import sys; from lockstep.cli.main import app\n"
        f"try: app(['checkpoints', {str(work_dir)!r}, '--verify'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
