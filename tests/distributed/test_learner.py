"""Contracts C1 and C2 of the learner at 1 and 2 ranks: real FSDP2 on gloo, float64, three optimizer steps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.run_learner import VARIANTS
from safetensors.torch import load_file

from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.export import save_draft
from specco.drafts.registry import build_draft
from specco.testing.tolerances import STEP_FLOAT64, relative_error
from specco.titan.export import save_policy
from specco.titan.policy import make_qwen3_config

SCRIPT = Path(__file__).parents[1] / "helpers" / "run_learner.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run every variant at 1 and at 2 ranks; return the output folder by number of ranks."""
    folder = tmp_path_factory.mktemp("learner")
    torch.manual_seed(0)
    sizes = {"num_layers": 3, "dim": 32, "hidden_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    policy = make_qwen3_config(vocab_size=64, max_seq_len=64, **sizes).build()
    policy.init_states()
    save_policy(policy, folder / "policy", tokenizer_path=folder, eos_token_id=1)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "target_layer_ids": (0, 1, 2),
        "max_position_embeddings": 64,
    }
    blocks = {"num_hidden_layers": 2, "block_size": 3, "mask_token_id": 63, "num_anchors": 4, "markov_rank": 6}
    for config in (Eagle3Config(**shape), DSparkConfig(**shape, **blocks)):
        draft = build_draft(config)
        draft.init_weights()
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))  # a bias of zeros hides its factor's gradient
        save_draft(draft, folder / "draft" / config.method)
    outputs = {}
    for num_ranks in (1, 2):
        outputs[num_ranks] = folder / f"ranks{num_ranks}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        arguments = [str(SCRIPT), str(folder / "policy"), str(folder / "draft"), str(outputs[num_ranks]), *VARIANTS]
        result = subprocess.run(
            torchrun + arguments,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return outputs


def load(runs: dict[int, Path], num_ranks: int, name: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    return load_file(runs[num_ranks] / f"{name}.safetensors"), json.loads(
        (runs[num_ranks] / f"{name}.json").read_text()
    )


def is_of_draft(name: str) -> bool:
    return "/draft." in name


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["joint", "weight0", "dspark"])
def test_policy_is_bit_equal_with_and_without_draft(runs: dict[int, Path], num_ranks: int, name: str) -> None:
    """C1: clipped gradients of three steps, final weights, norms."""
    alone, alone_metrics = load(runs, num_ranks, "alone")
    other, metrics = load(runs, num_ranks, name)
    assert not any(is_of_draft(tensor) for tensor in alone)
    for tensor, value in alone.items():
        assert torch.equal(other[tensor], value), tensor
    for row, alone_row in zip(metrics, alone_metrics, strict=True):
        for key in ("grad_norm/policy", "policy_loss", "mismatch_kl"):
            assert row[key] == alone_row[key]


@pytest.mark.parametrize("name", ["joint", "dspark"])
def test_every_weight_of_the_draft_trains(runs: dict[int, Path], name: str) -> None:
    run, _ = load(runs, 1, name)
    gradients = [value for tensor, value in run.items() if tensor.startswith("grad/0/draft.")]
    assert len(gradients) == sum(tensor.startswith("weight/draft.") for tensor in run) > 0
    assert all(value.abs().max() > 0 for value in gradients)


def test_draft_of_weight_zero_gets_zero_gradients(runs: dict[int, Path]) -> None:
    weight0, _ = load(runs, 1, "weight0")
    names = [name for name in weight0 if name.startswith("grad/0/draft.")]
    assert names
    assert all(weight0[name].abs().max() == 0 for name in names)


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        *[(2, name) for name in ("joint", "dspark")],
        *[(n, v) for n in (1, 2) for v in ("microbatches", "permuted", "checkpointed", "lopsided")],
        *[(n, f"dspark_{v}") for n in (1, 2) for v in ("microbatches", "permuted", "lopsided")],
    ],
)
def test_layout_and_packing_change_nothing(runs: dict[int, Path], num_ranks: int, name: str) -> None:
    """C2: gradients and weights of policy and draft, and every reported mean, against one rank and one microbatch."""
    expected, expected_metrics = load(runs, 1, "dspark" if name.startswith("dspark") else "joint")
    actual, metrics = load(runs, num_ranks, name)
    assert actual.keys() == expected.keys()
    for tensor, value in expected.items():
        assert relative_error(actual[tensor], value) <= STEP_FLOAT64, tensor
    for row, expected_row in zip(metrics, expected_metrics, strict=True):
        for key, value in expected_row.items():
            assert math.isclose(row[key], value, rel_tol=1e-9, abs_tol=1e-12), (key, row[key], value)


def test_clipping_is_at_work_and_apart(runs: dict[int, Path]) -> None:
    joint, metrics = load(runs, 2, "joint")
    for part, max_norm in {"policy": 0.05, "draft": 0.5}.items():
        grads = [g for n, g in joint.items() if n.startswith("grad/0/") and is_of_draft(n) == (part == "draft")]
        norm = torch.stack([g.norm() for g in grads]).norm()
        assert metrics[0][f"grad_norm/{part}"] > max_norm
        torch.testing.assert_close(norm, torch.tensor(max_norm, dtype=norm.dtype), rtol=1e-4, atol=0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bad_draft_gradient_skips_the_draft_alone(runs: dict[int, Path], num_ranks: int) -> None:
    """The second step's draft gradient is NaN: the policy moves as if nothing had happened, the draft stays."""
    alone, _ = load(runs, num_ranks, "alone")
    broken, metrics = load(runs, num_ranks, "nan_draft")
    assert [row["skipped/draft"] for row in metrics] == [0, 1, 1]
    assert [row["skipped/policy"] for row in metrics] == [0, 0, 0]
    assert not any(name.startswith("grad/1/draft.") for name in broken)
    assert all(torch.equal(broken[name], value) for name, value in alone.items())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bad_policy_gradient_skips_the_policy(runs: dict[int, Path], num_ranks: int) -> None:
    broken, metrics = load(runs, num_ranks, "nan_policy")
    assert [row["skipped/policy"] for row in metrics] == [0, 1, 1]
    assert not any(name.startswith("grad/1/") and not is_of_draft(name) for name in broken)
    assert all(value.isfinite().all() for name, value in broken.items() if name.startswith("weight/"))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_kl_to_the_reference_starts_at_zero_and_grows(runs: dict[int, Path], num_ranks: int) -> None:
    """The reference is the start policy: no KL and no KL gradient in the first step, some in the next."""
    joint, _ = load(runs, num_ranks, "joint")
    with_kl, metrics = load(runs, num_ranks, "kl")
    assert abs(metrics[0]["reference_kl"]) < 1e-12
    assert metrics[1]["reference_kl"] > 1e-9
    for name, value in joint.items():
        if name.startswith("grad/0/"):
            assert relative_error(with_kl[name], value) <= STEP_FLOAT64, name
    assert any(not torch.equal(with_kl[n], v) for n, v in joint.items() if n.startswith("grad/2/layers."))
