"""Contracts C6 and C8 of the job: killed anywhere, it resumes to the same rows; a failure ends it with its reason."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from helpers.commands import ROOT, run_torchrun, start_torchrun
from helpers.engine_models import make_draft, save_policy, train_policy
from helpers.job_server import JobServer
from helpers.traces import has_no_trace

from specco.drafts.export import save_draft

SCRIPT = str(ROOT / "tests" / "helpers" / "run_grpo_fault.py")
CONFIG = ["--config", "smoke", "--steps", "6", "--checkpoint_every", "2", "--validate_every", "6"]
CONFIG += ["--max_response_tokens", "16", "--learner.policy_path", "policy", "--learner.draft_path", "draft"]
EXIT_SECONDS = 30
pytestmark = pytest.mark.timeout(600)


def seconds_since_fault(folder: Path) -> float:
    return time.time() - float((folder / "fault_time").read_text())


def read_rows(folder: Path, name: str) -> list[dict[str, float]]:
    """Return the rows of a run without what depends on time."""
    rows = [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("seconds/") and not k.endswith("_per_s")} for r in rows]


def list_checkpoints(folder: Path, name: str) -> list[str]:
    return sorted(path.name for path in (folder / f"runs/{name}/checkpoints").iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy and a draft of random weights, and whole runs at 1 and 2 ranks."""
    folder = tmp_path_factory.mktemp("faults")
    save_policy(train_policy(num_steps=0), folder / "policy")
    save_draft(make_draft(seed=0), folder / "draft")
    for num_ranks in (1, 2):
        whole = [SCRIPT, "any", "none", "0", "0", *CONFIG, "--name", f"whole{num_ranks}"]
        run_torchrun(folder, num_ranks, *whole)
        assert all(row["grad_norm/policy"] > 0 for row in read_rows(folder, f"whole{num_ranks}")[1:])
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
def test_killed_and_resumed_equals_whole(
    folder: Path, job_server: JobServer, num_ranks: int, kind: str, call: int, last: int
) -> None:
    """The whole runs were started by torchrun: they share no process with these."""
    name, reward = f"{kind}{num_ranks}", "any"
    before = set(os.listdir("/dev/shm"))
    status, _ = job_server.run(folder, num_ranks, *CONFIG, "--name", name, fault=(reward, kind, call, 0))
    assert status != 0
    assert seconds_since_fault(folder) < EXIT_SECONDS
    assert has_no_trace(folder, before)
    whole = [checkpoint for checkpoint in list_checkpoints(folder, name) if not checkpoint.endswith(".part")]
    assert whole[-1] == f"step-{last:08d}"
    status, output = job_server.run(
        folder, num_ranks, *CONFIG, "--name", name, "--resume", fault=(reward, "none", 0, 0)
    )
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
    folder: Path, job_server: JobServer, kind: str, call: int, reason: str, last: int
) -> None:
    before = set(os.listdir("/dev/shm"))
    if kind == "fail_engine":  # as a user runs it
        process = start_torchrun(folder, 2, SCRIPT, "task", kind, str(call), "1", *CONFIG, "--name", kind)
        output, status = process.communicate(timeout=240)[0], process.returncode
    else:
        status, output = job_server.run(folder, 2, *CONFIG, "--name", kind, fault=("task", kind, call, 1))
    assert status != 0
    assert seconds_since_fault(folder) < EXIT_SECONDS
    # of a forked job the agent's own account of the failure comes after the reason
    assert reason in output[-2500 if kind == "fail_engine" else -8000 :], output[-8000:]
    assert has_no_trace(folder, before)
    assert [c for c in list_checkpoints(folder, kind) if not c.endswith(".part")][-1] == f"step-{last:08d}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_ranks_also_one_that_hangs(folder: Path, number: signal.Signals) -> None:
    """Rank 1 sleeps in the third step while rank 0 waits for it in a collective."""
    before, name = set(os.listdir("/dev/shm")), f"hang{number.value}"
    process = start_torchrun(folder, 2, SCRIPT, "task", "hang", "3", "1", *CONFIG, "--name", name)
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
