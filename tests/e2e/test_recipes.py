"""The three commands of the demo, small: warm-start, draft, GRPO, each as a user would run it."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.commands import ROOT, run_torchrun
from helpers.job_server import JobServer
from safetensors.torch import load_file

from recipes.pretrain import BLOCKS, make_shape
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.export import save_draft
from specco.drafts.registry import build_draft

PIPELINE = "--learner.parallelism.pipeline_parallel"
PRETRAIN = ["-m", "specco.titan.train", "--module", "recipes.pretrain", "--config"]


def run_job(job_server: JobServer, folder: Path, *arguments: str, reward: str = "task") -> None:
    status, output = job_server.run(folder, 2, "--config", "smoke", *arguments, fault=(reward, "none", 0, 0))
    assert status == 0, output[-6000:]


def read_rows_without_times(folder: Path, name: str) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("seconds/") and not k.endswith("_per_s")} for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the two preparations and the job have run at 2 ranks."""
    folder = tmp_path_factory.mktemp("recipes")
    for config in ("smoke_policy", "smoke_eagle3_draft"):
        run_torchrun(folder, 2, *PRETRAIN, config)
    output = run_torchrun(folder, 2, "-m", "recipes.grpo", "--config", "smoke")
    (folder / "output.txt").write_text(output)
    return folder


@pytest.mark.timeout(900)
def test_rows_are_complete(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "runs/smoke/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert 0 <= row["mismatch_kl"] < 1e-6
        assert 1 <= row["acceptance_length"] <= 4
        assert math.isclose(row["acceptance_length"], 1 + sum(row[f"acceptance_rate_{k}"] for k in range(3)))
        assert 1 <= row["acceptance_length_estimate"] <= 4
        assert row["grad_norm/draft"] > 0
        assert row["skipped/policy"] == row["skipped/draft"] == 0
        assert all(row[f"seconds/{phase}"] > 0 for phase in ("rollout", "learner", "refit", "step"))
    for row in (rows[0], rows[3]):
        assert 0 <= row["validation_accuracy"] <= 1
        assert row["validation_acceptance_length"] >= 1
    # before the first step both drafts are the start draft, and validation repeats by its seed
    assert rows[0]["validation_acceptance_length"] == rows[0]["validation_acceptance_length_start_draft"]
    assert rows[3]["validation_acceptance_length"] != rows[3]["validation_acceptance_length_start_draft"]


@pytest.fixture(scope="module")
def one_step(folder: Path, job_server: JobServer) -> None:
    """One step of the job, data-parallel, in ``runs/one_step``; with rewards that move the policy."""
    run_job(job_server, folder, "--name", "one_step", "--steps", "1", reward="any")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("axis", ["context_parallel", "pipeline_parallel"])
def test_other_layouts_repeat_the_data_parallel_run(
    folder: Path, job_server: JobServer, one_step: None, axis: str
) -> None:
    """Same engines, prompts and seeds: the same first rollouts, and from them the same update and exports."""
    options = ["--name", axis, "--steps", "1", f"--learner.parallelism.{axis}_degree", "2"]
    run_job(job_server, folder, *options, reward="any")
    rows, expected = (
        [json.loads(line) for line in (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        for name in (axis, "one_step")
    )
    for name in ("reward", "response_tokens", "acceptance_length"):
        assert rows[1][name] == expected[1][name]
    for name in ("policy_loss", "draft_loss", "grad_norm/policy", "grad_norm/draft", "acceptance_length_estimate"):
        assert math.isclose(rows[1][name], expected[1][name], rel_tol=1e-4, abs_tol=1e-6), name
    for model in ("policy", "draft"):
        weights, others = (load_file(folder / f"runs/{n}/{model}/model.safetensors") for n in (axis, "one_step"))
        assert weights.keys() == others.keys()
        assert all(torch.allclose(weight, others[n], atol=1e-4) for n, weight in weights.items())


def test_table_and_tensorboard_are_there(folder: Path) -> None:
    assert "smoke: 3 steps, 2 ranks" in (folder / "output.txt").read_text()
    assert list((folder / "runs/smoke/tensorboard").iterdir())


def test_exports_load(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "runs/smoke/policy")
    tokenizer = AutoTokenizer.from_pretrained(folder / "runs/smoke/policy")
    assert model(torch.tensor([tokenizer.encode("1+2+3=")])).logits.isfinite().all()
    start = load_file(folder / "runs/smoke_eagle3_draft/draft/model.safetensors")
    end = load_file(folder / "runs/smoke/draft/model.safetensors")
    assert start.keys() == end.keys()
    assert not torch.equal(start["fc.weight"], end["fc.weight"])


@pytest.mark.timeout(300)
def test_same_seed_gives_the_same_rows(folder: Path, job_server: JobServer) -> None:
    """Everything but times repeats in other processes, sampled rollouts through the engine included."""
    left_behind = folder / "runs/again/checkpoints/step-00000099"
    left_behind.mkdir(parents=True)
    run_job(job_server, folder, "--name", "again")
    assert not left_behind.exists(), "a new run of the same name kept an older run's checkpoint"
    assert read_rows_without_times(folder, "again") == read_rows_without_times(folder, "smoke")


def test_the_exported_draft_is_evaluated(folder: Path) -> None:
    prompts = [json.dumps({"text": "1+2+3+4+5+6="}), json.dumps({"token_ids": [3, 12, 4, 12, 5, 13]})]
    (folder / "prompts.jsonl").write_text("\n".join(prompts))
    command = [sys.executable, str(ROOT / "tools/eval_acceptance.py"), "runs/smoke/policy", "runs/smoke/draft"]
    command += ["--prompts", "prompts.jsonl", "--rounds", "2", "--kv-cache-mib", "64", "--out", "acceptance.json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads((folder / "acceptance.json").read_text())
    served, estimate = report["served"], report["estimate"]
    assert served["num_verifications"] > 50 and estimate["num_branches"] > 50
    assert 1 <= served["acceptance_length"] <= 4
    # both are of the same draft and policy: two prompts and a few hundred verifications leave room for noise
    assert abs(served["acceptance_length"] - estimate["acceptance_length_by_label"]) < 0.5
    assert [speed["k"] for speed in report["speed"]] == [0, 3]
    assert "estimate, biased low" in result.stdout


@pytest.mark.timeout(600)
def test_a_reduced_vocabulary_is_chosen_once_and_kept(folder: Path, job_server: JobServer) -> None:
    """From the policy's own responses in pre-training; the job trains and serves it, and saves the same."""
    reduced = [*PRETRAIN, "smoke_eagle3_draft", "--draft_vocab_size", "20", "--dump_folder", "runs/reduced_draft"]
    run_torchrun(folder, 2, *reduced)
    job = ["--name", "reduced", "--steps", "2", "--checkpoint_every", "2"]
    run_job(job_server, folder, *job, "--learner.draft_path", "runs/reduced_draft/draft")
    start = load_file(folder / "runs/reduced_draft/draft/model.safetensors")
    end = load_file(folder / "runs/reduced/draft/model.safetensors")
    assert int(start["t2d"].sum()) == start["d2t"].numel() == start["lm_head.weight"].shape[0] == 20
    assert torch.equal(start["d2t"], end["d2t"]) and torch.equal(start["t2d"], end["t2d"])
    assert not torch.equal(start["fc.weight"], end["fc.weight"])
    state = {"learner": {"model": {"draft.d2t": torch.zeros_like(start["d2t"])}}}
    dcp.load(state, checkpoint_id=folder / "runs/reduced/checkpoints/step-00000002", no_dist=True)
    assert torch.equal(state["learner"]["model"]["draft.d2t"], start["d2t"])


@pytest.mark.timeout(600)
def test_block_drafts_resume_to_the_same_rows(folder: Path, job_server: JobServer) -> None:
    """A DSpark draft, its anchors and its engine's noise go on after a checkpoint as if there had been no stop."""
    config = DSparkConfig(**make_shape("smoke", (0, 1, 2)), **BLOCKS, block_size=4, markov_rank=8)
    draft = build_draft(config)
    draft.init_weights()
    save_draft(draft, folder / "runs/dspark_draft/draft")
    job = ["--steps", "4", "--checkpoint_every", "2", "--validate_every", "4"]
    job += ["--learner.draft_path", "runs/dspark_draft/draft", "--num_speculative_tokens", "4"]
    run_job(job_server, folder, *job, "--name", "whole")
    shutil.copytree(folder / "runs/whole", folder / "runs/stopped")
    shutil.rmtree(folder / "runs/stopped/checkpoints/step-00000004")
    run_torchrun(folder, 2, "-m", "recipes.grpo", "--config", "smoke", *job, "--name", "stopped", "--resume")
    assert json.loads((folder / "runs/stopped/run.json").read_text())["first_step"] == 2
    rows = read_rows_without_times(folder, "whole")
    assert read_rows_without_times(folder, "stopped") == rows
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4]["validation_acceptance_length"] != rows[4]["validation_acceptance_length_start_draft"]
    assert "acceptance_rate_3" in rows[4] and "draft_tv/slot3" in rows[4]
    ends = [load_file(folder / f"runs/{name}/draft/model.safetensors") for name in ("whole", "stopped")]
    assert all(torch.equal(ends[1][name], weight) for name, weight in ends[0].items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learner.policy_path", "nowhere"], "nowhere"),
        (["--group_size", "1"], "group_size is 1"),
        ([f"{PIPELINE}_degree", "2", f"{PIPELINE}_schedule", "1f1b"], "pipeline_parallel_schedule is '1f1b'"),
        (["--stepz", "3"], "stepz"),
    ],
)
def test_bad_config_is_refused(folder: Path, job_server: JobServer, arguments: list[str], message: str) -> None:
    status, output = job_server.run(folder, 1, "--config", "smoke", *arguments)
    assert status != 0
    assert message in output
