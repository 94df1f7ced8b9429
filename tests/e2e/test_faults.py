"""Contracts C6 and C8 of the job: killed anywhere, it resumes to the same rows; a failure ends it with its reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "helpers" / "run_grpo_fault.py"
CONFIG = ["--config", "smoke", "--steps", "6", "--checkpoint_every", "2", "--validate_every", "6"]
EXIT_SECONDS = 30

pytestmark = pytest.mark.timeout(600)


def start(folder: Path, num_ranks: int, kind: str, call: int, rank: int, *arguments: str) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return subprocess.Popen(
        [*torchrun, str(SCRIPT), kind, str(call), str(rank), *CONFIG, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def seconds_since_fault(folder: Path) -> float:
    return time.time() - float((folder / "fault_time").read_text())


def run(folder: Path, num_ranks: int, kind: str, call: int, rank: int, *arguments: str) -> tuple[int, str]:
    """Run the job to its end; return exit status and output."""
    process = start(folder, num_ranks, kind, call, rank, *arguments)
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def read_rows(folder: Path, name: str) -> list[dict[str, float]]:
    """Return the rows of a run without what depends on time."""
    rows = [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("seconds/") and not k.endswith("_per_s")} for r in rows]


def list_checkpoints(folder: Path, name: str) -> list[str]:
    return sorted(path.name for path in (folder / f"runs/{name}/checkpoints").iterdir())


def has_no_trace(folder: Path, before: set[str]) -> bool:
    """Whether no process of the job lives and no file is left in shared memory."""
    alive = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder)]
    return not alive and set(os.listdir("/dev/shm")) <= before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two preparations, and whole runs at 1 and 2 ranks."""
    folder = tmp_path_factory.mktemp("faults")
    for config in ("smoke_policy", "smoke_eagle3_draft"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
        command += ["specco.titan.train", "--module", "recipes.pretrain", "--config", config]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=240)
    for num_ranks in (1, 2):
        status, output = run(folder, num_ranks, "none", 0, 0, "--name", f"whole{num_ranks}")
        assert status == 0, output[-4000:]
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "kind", "call", "last"),
    [
        # the fifth step, when steps 2 and 4 are saved
        (1, "kill_step", 5, 4),
        (2, "kill_step", 5, 4),
        # the second save: step 4's checkpoint is half-written
        (1, "kill_save", 2, 2),
        (2, "kill_save", 2, 2),
        # validation before step 1 refits twice; the sixth refit is step 4's
        (1, "kill_refit", 6, 2),
        (2, "kill_refit", 6, 2),
    ],
)
def test_killed_and_resumed_equals_whole(folder: Path, num_ranks: int, kind: str, call: int, last: int) -> None:
    name = f"{kind}{num_ranks}"
    before = set(os.listdir("/dev/shm"))
    status, _ = run(folder, num_ranks, kind, call, 0, "--name", name)
    assert status != 0
    assert seconds_since_fault(folder) < EXIT_SECONDS
    assert has_no_trace(folder, before)
    whole = [checkpoint for checkpoint in list_checkpoints(folder, name) if not checkpoint.endswith(".part")]
    assert whole[-1] == f"step-{last:08d}"
    status, output = run(folder, num_ranks, "none", 0, 0, "--name", name, "--resume")
    assert status == 0, output[-4000:]
    assert read_rows(folder, name) == read_rows(folder, f"whole{num_ranks}")
    assert list_checkpoints(folder, name) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize(
    ("kind", "call", "reason", "last"),
    [
        # validation before step 1 generates twice: the fifth call is step 3's
        ("fail_engine", 5, "the engine broke on purpose", 2),
        ("fill_disk", 2, "No space left on device", 2),
        ("nan_loss", 5, "policy_loss is nan at step 5", 4),
    ],
)
def test_failure_ends_all_ranks_with_the_reason_last(
    folder: Path, kind: str, call: int, reason: str, last: int
) -> None:
    before = set(os.listdir("/dev/shm"))
    status, output = run(folder, 2, kind, call, 1, "--name", kind)
    assert status != 0
    assert seconds_since_fault(folder) < EXIT_SECONDS
    assert reason in output[-2500:], output[-4000:]
    assert has_no_trace(folder, before)
    assert [c for c in list_checkpoints(folder, kind) if not c.endswith(".part")][-1] == f"step-{last:08d}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_ranks_also_one_that_hangs(folder: Path, number: signal.Signals) -> None:
    """Rank 1 sleeps in the third step while rank 0 waits for it in a collective."""
    before, name = set(os.listdir("/dev/shm")), f"hang{number.value}"
    process = start(folder, 2, "hang", 3, 1, "--name", name)
    checkpoint = folder / f"runs/{name}/checkpoints/step-00000002"
    deadline = time.monotonic() + 200
    while not checkpoint.exists():
        assert time.monotonic() < deadline, "no checkpoint of step 2 within 200 s"
        assert process.poll() is None, process.communicate()[0][-4000:]
        time.sleep(0.2)
    sent = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=EXIT_SECONDS)
    assert time.monotonic() - sent < EXIT_SECONDS
    assert process.returncode != 0
    assert number.name in output[-2000:] or "Signal" in output[-2000:], output[-3000:]
    assert has_no_trace(folder, before)
    assert checkpoint.is_dir()
