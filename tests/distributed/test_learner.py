"""Contracts C1 and C2 of the learner in its layouts: real meshes on gloo, float64, three optimizer steps."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.run_learner import MODEL_VARIANTS, VARIANTS
from safetensors.torch import load_file

from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.dspark.config import DSparkConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.drafts.export import save_draft
from specco.drafts.registry import build_draft
from specco.testing.tolerances import STEP_FLOAT64, relative_error
from specco.titan.export import save_policy
from specco.titan.sizes import make_policy_config

pytestmark = pytest.mark.timeout(1800)

SCRIPT = Path(__file__).parents[1] / "helpers" / "run_learner.py"


FAMILIES = ("joint", "dflash", "dspark")
MICROBATCHES = ("microbatches", "microbatches2", "microbatches4")
FEW_TARGETS = ("few_targets", "dspark_few_targets")
SCHEDULES = ("gpipe", "interleaved", "bfs", "zb", "zbv", "dualpipe")
"""Schedules of pipelines beside 1F1B, as layouts call them."""

LAYOUT_RUNS = {
    "dp_replicate2": FAMILIES,
    "cp2": (*FAMILIES, *FEW_TARGETS, *MICROBATCHES, "permuted", "checkpointed", "kl"),
    "cp4": (*FAMILIES, *FEW_TARGETS),
    "tp2": (*FAMILIES, *FEW_TARGETS, *MICROBATCHES, "checkpointed", "kl"),
    "tp2_no_sp": ("dspark",),
    "fsdp2_cp2": (*FAMILIES, *FEW_TARGETS, "lopsided", "differing_peers"),
    "fsdp2_tp2": (*FAMILIES, "lopsided"),
    "cp2_tp2": (*FAMILIES, *FEW_TARGETS, "nan_draft", "nan_policy"),
    "pp2": (*FAMILIES, *FEW_TARGETS, "microbatches", "checkpointed", "kl", "nan_draft", "nan_policy"),
    **{f"pp2_{name}": ("joint", "dspark_microbatches") for name in SCHEDULES},
    "fsdp2_pp2": (*FAMILIES, *FEW_TARGETS, "lopsided", "microbatches", "differing_peers"),
    "cp2_pp2": (*FAMILIES, *FEW_TARGETS),
    "tp2_pp2": (*FAMILIES, *FEW_TARGETS, "kl"),
    "tp2_pp2_no_sp": ("dspark",),
}
"""Runs of each layout beside "1" and "fsdp2", which have all of ``VARIANTS``."""

SPECIAL = ("differing_peers", "nan_draft", "nan_policy")
"""Runs that do not end with the numbers of a plain one."""

RESUMED_RUNS = [
    ("cp2", "resumed"),
    ("tp2", "dspark_resumed"),
    ("fsdp2_cp2", "dspark_resumed"),
    ("cp2_tp2", "resumed"),
    ("pp2", "dspark_resumed"),
    ("tp2_pp2", "resumed"),
    ("cp4", "resumed_from_stages"),
]
"""Runs that go on from a checkpoint that "fsdp2" has saved, or "pp2" in two stages."""

MODEL_RUNS = [
    ("ep2", "moe"),
    ("ep2", "moe_dflash"),
    ("ep2", "moe_lopsided"),
    ("fsdp2_cp2_ep2", "moe"),
    ("tp2", "moe"),
    ("fsdp2_tp2", "moe"),
    ("cp2_tp2", "moe"),
    ("tp2_ep2", "moe"),
    ("tp2_ep2_no_sp", "moe"),
    ("fsdp2_tp2_ep4", "moe"),
    ("fsdp2_tp2_ep4", "moe_lopsided"),
    ("cp2_tp2", "llama3"),
    ("cp2", "gptoss"),
    ("cp2_tp2", "gptoss"),
    ("ep2_pp2", "moe"),
    ("tp2_ep2_pp2", "moe_dflash"),
]
"""Runs of policies with experts, of Llama 3 and of GPT-OSS, whose layers have sinks, windows and experts."""

PIPELINES = ("pp2", *(f"pp2_{name}" for name in SCHEDULES))
TWO_RANKS = ("dp_replicate2", "cp2", "tp2", "tp2_no_sp", "ep2", "tp2_ep2", "tp2_ep2_no_sp", *PIPELINES)

RUNS = {
    1: [f"1/{name}" for name in (*VARIANTS, *MODEL_VARIANTS)],
    2: [*(f"fsdp2/{name}" for name in (*VARIANTS, "saved", "dspark_saved")), "pp2/saved_in_stages"],
    4: [],
}
"""Runs by number of ranks, in this order."""
for layout, names in LAYOUT_RUNS.items():
    resumed = [name for other, name in RESUMED_RUNS if other == layout]
    RUNS[2 if layout in TWO_RANKS else 4] += [f"{layout}/{name}" for name in ("alone", *names, *resumed)]
for layout, model in sorted({(layout, name.partition("_")[0]) for layout, name in MODEL_RUNS}):
    names = [name for other, name in MODEL_RUNS if other == layout]
    RUNS[2 if layout in TWO_RANKS else 4] += [f"{layout}/{name}" for name in (f"{model}_alone", *names)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every variant of every layout; return the output folder."""
    folder = tmp_path_factory.mktemp("learner")
    torch.manual_seed(0)
    sizes = {"num_layers": 3, "dim": 32, "hidden_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    policy = make_policy_config("qwen3", vocab_size=64, max_seq_len=64, **sizes).build()
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
    blocks = {"num_hidden_layers": 2, "block_size": 3, "mask_token_id": 63, "num_anchors": 4}
    for config in (
        Eagle3Config(**shape),
        DFlashConfig(**shape, **blocks),
        DSparkConfig(**shape, **blocks, markov_rank=6),
    ):
        draft = build_draft(config)
        draft.init_weights()
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))  # a bias of zeros hides its factor's gradient
        save_draft(draft, folder / "draft" / config.method)
    for num_ranks, names in RUNS.items():
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        arguments = [str(SCRIPT), str(folder / "policy"), str(folder / "draft"), str(folder), *names]
        result = subprocess.run(
            torchrun + arguments,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return folder


def load(runs: Path, layout: str, name: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    folder = runs / layout
    return load_file(folder / f"{name}.safetensors"), json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("layout", ["pp2", "tp2_pp2"])
def test_waits_for_taps_are_reported(runs: Path, layout: str) -> None:
    _, metrics = load(runs, layout, "joint")
    assert all(row["seconds/tap_wait"] > 0 and row["seconds/slot_wait"] >= 0 for row in metrics)
    assert all(row["seconds/tap_wait"] == 0 for row in load(runs, "pp2", "alone")[1])


def is_of_draft(name: str) -> bool:
    return "/draft." in name


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *[(layout, name) for layout in ("1", "fsdp2") for name in (*FAMILIES, "weight0")],
        *[(layout, name) for layout, names in LAYOUT_RUNS.items() for name in FAMILIES if name in names],
    ],
)
def test_policy_is_bit_equal_with_and_without_draft(runs: Path, layout: str, name: str) -> None:
    check_policy_is_bit_equal(runs, layout, name, "alone")


# other documents on other ranks add up in another order: "moe_lopsided" has no run of the policy alone beside it
@pytest.mark.parametrize(
    ("layout", "name"),
    [*(run for run in MODEL_RUNS if run[1] != "moe_lopsided"), ("1", "moe"), ("1", "llama3"), ("1", "gptoss")],
)
def test_other_policies_are_bit_equal_with_and_without_draft(runs: Path, layout: str, name: str) -> None:
    check_policy_is_bit_equal(runs, layout, name, f"{name.partition('_')[0]}_alone")


def check_policy_is_bit_equal(runs: Path, layout: str, name: str, alone_name: str) -> None:
    """C1: clipped gradients of three steps, final weights, norms, what a router has counted."""
    alone, alone_metrics = load(runs, layout, alone_name)
    other, metrics = load(runs, layout, name)
    assert not any(is_of_draft(tensor) for tensor in alone)
    for tensor, value in alone.items():
        assert torch.equal(other[tensor], value), tensor
    for row, alone_row in zip(metrics, alone_metrics, strict=True):
        for key in ("grad_norm/policy", "policy_loss", "mismatch_kl"):
            assert row[key] == alone_row[key]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_of_the_draft_trains(runs: Path, name: str) -> None:
    run, _ = load(runs, "1", name)
    gradients = [value for tensor, value in run.items() if tensor.startswith("grad/0/draft.")]
    assert len(gradients) == sum(tensor.startswith("weight/draft.") for tensor in run) > 0
    assert all(value.abs().max() > 0 for value in gradients)


def test_draft_of_weight_zero_gets_zero_gradients(runs: Path) -> None:
    weight0, _ = load(runs, "1", "weight0")
    names = [name for name in weight0 if name.startswith("grad/0/draft.")]
    assert names
    assert all(weight0[name].abs().max() == 0 for name in names)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *[("fsdp2", name) for name in (*FAMILIES, *FEW_TARGETS)],
        *[(n, v) for n in ("1", "fsdp2") for v in (*MICROBATCHES, "permuted", "checkpointed", "lopsided")],
        *[(n, f"dspark_{v}") for n in ("1", "fsdp2") for v in ("microbatches", "permuted", "lopsided")],
        *[(layout, name) for layout, names in LAYOUT_RUNS.items() for name in names if name not in SPECIAL],
    ],
)
def test_layout_and_packing_change_nothing(runs: Path, layout: str, name: str) -> None:
    reference = name if "few_targets" in name else name.partition("_")[0]
    is_eagle3 = reference in (*MICROBATCHES, "permuted", "checkpointed", "lopsided")
    check_equals_one_rank(runs, layout, name, "joint" if is_eagle3 else reference)


@pytest.mark.parametrize(("layout", "name"), [*MODEL_RUNS, ("1", "moe_checkpointed")])
def test_layout_changes_nothing_of_other_policies(runs: Path, layout: str, name: str) -> None:
    check_equals_one_rank(runs, layout, name, "moe" if name == "moe_checkpointed" else name)


def check_equals_one_rank(runs: Path, layout: str, name: str, reference: str) -> None:
    """C2: gradients and weights of policy and draft, and every reported mean, against one rank and one microbatch."""
    expected, expected_metrics = load(runs, "1", reference)
    actual, metrics = load(runs, layout, name)
    assert actual.keys() == expected.keys()
    for tensor, value in expected.items():
        if tensor.startswith("count/"):
            assert torch.equal(actual[tensor], value), tensor
        assert relative_error(actual[tensor], value) <= STEP_FLOAT64, tensor
    for row, expected_row in zip(metrics, expected_metrics, strict=True):
        assert {key for key in row if not key.startswith("seconds/")} == expected_row.keys()
        for key, value in expected_row.items():
            assert math.isclose(row[key], value, rel_tol=1e-9, abs_tol=1e-12), (key, row[key], value)


@pytest.mark.parametrize(("layout", "name"), RESUMED_RUNS)
def test_resume_in_another_layout(runs: Path, layout: str, name: str) -> None:
    """Saved at fsdp 2 or pp 2 after one step; the two steps after are those of a run without the stop."""
    expected, expected_metrics = load(runs, "1", "dspark" if name.startswith("dspark") else "joint")
    actual, metrics = load(runs, layout, name)
    assert actual.keys() == {tensor for tensor in expected if not tensor.startswith("grad/0/")}
    for tensor, value in actual.items():
        assert relative_error(value, expected[tensor]) <= STEP_FLOAT64, tensor
    for row, expected_row in zip(metrics, expected_metrics[1:], strict=True):
        assert {key for key in row if not key.startswith("seconds/")} == expected_row.keys()
        for key, value in expected_row.items():
            assert math.isclose(row[key], value, rel_tol=1e-9, abs_tol=1e-12), (key, row[key], value)


@pytest.mark.parametrize("layout", ["fsdp2", "cp4", "fsdp2_cp2", "cp2_tp2", "pp2", "tp2_pp2"])
def test_clipping_is_at_work_and_apart(runs: Path, layout: str) -> None:
    joint, metrics = load(runs, layout, "joint")
    for part, max_norm in {"policy": 0.05, "draft": 0.5}.items():
        grads = [g for n, g in joint.items() if n.startswith("grad/0/") and is_of_draft(n) == (part == "draft")]
        norm = torch.stack([g.norm() for g in grads]).norm()
        assert metrics[0][f"grad_norm/{part}"] > max_norm
        torch.testing.assert_close(norm, torch.tensor(max_norm, dtype=norm.dtype), rtol=1e-4, atol=0)


@pytest.mark.parametrize("layout", ["1", "fsdp2", "cp2_tp2", "pp2"])
def test_bad_draft_gradient_skips_the_draft_alone(runs: Path, layout: str) -> None:
    """The second step's draft gradient is NaN: the policy moves as if nothing had happened, the draft stays."""
    alone, _ = load(runs, layout, "alone")
    broken, metrics = load(runs, layout, "nan_draft")
    assert [row["skipped/draft"] for row in metrics] == [0, 1, 1]
    assert [row["skipped/policy"] for row in metrics] == [0, 0, 0]
    assert not any(name.startswith("grad/1/draft.") for name in broken)
    assert all(torch.equal(broken[name], value) for name, value in alone.items())


@pytest.mark.parametrize("layout", ["1", "fsdp2", "cp2_tp2", "pp2"])
def test_bad_policy_gradient_skips_the_policy(runs: Path, layout: str) -> None:
    broken, metrics = load(runs, layout, "nan_policy")
    assert [row["skipped/policy"] for row in metrics] == [0, 1, 1]
    assert not any(name.startswith("grad/1/") and not is_of_draft(name) for name in broken)
    assert all(value.isfinite().all() for name, value in broken.items() if name.startswith("weight/"))


@pytest.mark.parametrize("layout", ["1", "fsdp2"])
def test_kl_to_the_reference_starts_at_zero_and_grows(runs: Path, layout: str) -> None:
    """The reference is the start policy: no KL and no KL gradient in the first step, some in the next."""
    joint, _ = load(runs, layout, "joint")
    with_kl, metrics = load(runs, layout, "kl")
    assert abs(metrics[0]["reference_kl"]) < 1e-12
    assert metrics[1]["reference_kl"] > 1e-9
    for name, value in joint.items():
        if name.startswith("grad/0/"):
            assert relative_error(with_kl[name], value) <= STEP_FLOAT64, name
    assert any(not torch.equal(with_kl[n], v) for n, v in joint.items() if n.startswith("grad/2/layers."))


@pytest.mark.parametrize("layout", ["fsdp2_cp2", "fsdp2_pp2"])
def test_differing_peers_are_refused_by_every_rank(runs: Path, layout: str) -> None:
    """One peer is given its documents in another order; ranks of the other data-parallel rank raise as well."""
    _, messages = load(runs, layout, "differing_peers")
    assert len(messages) == 4
    assert all("microbatches differ" in message for message in messages)
