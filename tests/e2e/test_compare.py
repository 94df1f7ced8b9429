"""The comparison as a user runs it: two arms, one report; and a run that fails, one that is told to stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from helpers.commands import start_python
from helpers.engine_models import make_draft, save_policy, train_policy

from recipes.compare import main, make_command, parse_arguments
from specco.drafts.export import save_draft

SMALL = ["--steps", "2", "--prompts_per_step", "2", "--group_size", "4", "--max_response_tokens", "8"]
SMALL += ["--validate_every", "2", "--validation_prompts", "2", "--validation_samples", "2", "--checkpoint_every", "0"]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy and a draft of random weights."""
    folder = tmp_path_factory.mktemp("compare")
    save_policy(train_policy(num_steps=0), folder / "policy")
    save_draft(make_draft(seed=0), folder / "draft")
    return folder


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    paths = ["--learner.policy_path", "policy", "--learner.draft_path", "draft"]
    command = ["-m", "recipes.compare", "--config", "smoke", "--ranks", "1", *arguments]
    return start_python(folder, *command, *([] if "--" in arguments else ["--"]), *paths, *SMALL)


def test_two_arms_and_their_report(folder: Path) -> None:
    process = start(folder, "--arms", "none,cotrain", "--name", "two")
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output[-5000:]
    rows = {}
    for arm in ("none", "cotrain"):
        run = folder / f"runs/two_{arm}_seed0"
        info = json.loads((run / "run.json").read_text())
        assert (info["arm"], info["seed"], info["config"]["name"]) == (arm, 0, run.name)
        assert info["config"]["learner"]["draft_path"] == "draft"  # as given, also where the arm has no use for it
        assert {"torch", "torchtitan", "vllm", "specco"} <= info["versions"].keys()
        assert info["machine"]["ranks"] == 1 and info["machine"]["cores"] >= 1
        rows[arm] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows[arm][1:]:
            assert 0 < row["seconds/rollout_cpu"] < 4 * row["seconds/rollout"]
        assert rows[arm][0]["validation_accuracy_stderr"] >= 0
    assert "acceptance_length" not in rows["none"][1] and rows["cotrain"][1]["acceptance_length"] >= 1
    page = (folder / "runs/two/report.html").read_text()
    assert "two_none_seed0" in page and page.index("no draft") < page.index("co-trained draft")
    assert "speed-up of rollout against no draft" in output


def test_first_failure_ends_it_with_its_reason(folder: Path) -> None:
    process = start(folder, "--arms", "none,frozen", "--name", "bad", "--", "--loss.kl_coef", "0.1")
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    assert output.count("== bad_") == 1
    assert "kl_coef is 0.1" in output
    assert output.rstrip().splitlines()[-1].startswith("bad_none_seed0 ended with status 1")


def test_a_stop_leaves_no_run_behind(folder: Path) -> None:
    process = start(folder, "--arms", "none", "--name", "stopped")
    deadline = time.monotonic() + 60
    ranks: list[psutil.Process] = []
    while len(ranks) < 2 and time.monotonic() < deadline:  # torchrun and its rank
        ranks = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.5)
    assert len(ranks) >= 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert alive == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "none,half"], "'half' is not one of none, frozen, cotrain"),
        (["--arms", "none,none"], "'none' is there twice"),
        (["--seeds", "0,-1"], "'-1' is no seed"),
        (["--", "--seed=3"], "--seed cannot follow --"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", "--config", "smoke", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


def test_every_run_gets_the_same_fields() -> None:
    args, fields = parse_arguments(["--config", "smoke", "--seeds", "0,2", "--", "--steps", "5"])
    assert (args.arms, args.seeds, args.name) == (["none", "frozen", "cotrain"], [0, 2], "smoke")
    command = make_command(args, "frozen", 2, "smoke_frozen_seed2", fields)
    assert command[-10:] == [
        *["--config", "smoke", "--name", "smoke_frozen_seed2", "--arm", "frozen", "--seed", "2", "--steps", "5"]
    ]
