"""The learner's step against a plain PyTorch loop of the same model and batch, on the same threads, in turn.

    PYTHONPATH=. torchrun --nproc-per-node 1 tools/bench_learner.py runs/tiny_policy/policy runs/tiny_eagle3_draft/draft
    PYTHONPATH=. torchrun --nproc-per-node 2 tools/bench_learner.py ...

Both take the same samples; the plain loop adds its gradients up over ranks by one all-reduce. The first step of both is
compared as well: same gradient norms, or the two do not compute the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import cast

import torch
import torch.distributed as dist

from specco.titan import cpu_support

cpu_support.apply()

from plain_loop import PlainModel  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer  # noqa: E402
from torchtitan.config.configs import ParallelismConfig, TrainingConfig  # noqa: E402

from recipes.carry import CarrySamples  # noqa: E402
from specco.drafts.eagle3.config import Eagle3Config  # noqa: E402
from specco.drafts.load import read_draft_config  # noqa: E402
from specco.packing import PackedTokens, pack_documents  # noqa: E402
from specco.rl.grpo import GrpoLoss  # noqa: E402
from specco.titan.export import read_policy_config  # noqa: E402
from specco.titan.learner import Learner, policy_and_draft_groups  # noqa: E402
from specco.titan.registry import make_model_spec  # noqa: E402

ADAM = {"betas": (0.9, 0.95), "weight_decay": 0.0}


def make_batch(num_samples: int, rank: int) -> dict[str, torch.Tensor]:
    """Return padded samples of the demo's task with random advantages and logprobs."""
    generator = torch.Generator().manual_seed(rank)
    samples = [CarrySamples(seed=7)[rank * num_samples + i] for i in range(num_samples)]
    rows = [torch.tensor(prompt + response) for prompt, response in samples]
    masks = [torch.arange(len(p) + len(r)) >= len(p) for p, r in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {
        "input_ids": ids,
        "response_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
        "inference_logprobs": -torch.rand(ids.shape, generator=generator),
        "advantages": torch.randn(num_samples, generator=generator),
        "lengths": torch.tensor([len(row) for row in rows]),
    }


def pack_batch(batch: dict[str, torch.Tensor]) -> PackedTokens:
    """Return the samples as one packed microbatch."""
    lengths = batch["lengths"].tolist()

    def cut(name: str) -> list[torch.Tensor]:
        return [row[:n] for row, n in zip(batch[name], lengths, strict=True)]

    advantages = [a.expand(n) for a, n in zip(batch["advantages"], lengths, strict=True)]
    (tokens,) = pack_documents(
        cut("input_ids"),
        cut("response_mask"),
        max_tokens=sum(lengths),
        row_values={"inference_logprobs": cut("inference_logprobs"), "advantages": advantages},
    )
    return tokens


def build_learner(policy_path: str, draft_path: str | None, parallelism: ParallelismConfig | None = None) -> Learner:
    """Build the learner as the demo does; learning rates of 0 keep the weights as they are.

    Args:
        policy_path: directory of the policy.
        draft_path: directory of the draft; None: the policy alone.
        parallelism: layout; None: FSDP over all ranks.
    """
    draft = None if draft_path is None else read_draft_config(draft_path)
    return Learner.Config(
        model_spec=make_model_spec(read_policy_config(policy_path), flavor="bench", draft=draft),
        policy_path=policy_path,
        draft_path=draft_path or "",
        optimizer=OptimizersContainer.Config(
            param_groups=policy_and_draft_groups(0.0, None if draft is None else 0.0, **ADAM)
        ),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(mixed_precision_param="float32", disable_cuda_graphs=True),
        parallelism=parallelism or ParallelismConfig(spmd_backend="partial_dtensor"),
    ).build()


def step_plain(
    model: PlainModel, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], loss_fn: GrpoLoss
) -> dict[str, float]:
    """Take one step of the plain loop; return both gradient norms."""
    model.compute_loss(batch, loss_fn).backward()
    if dist.get_world_size() > 1:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([grad.flatten() for grad in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for grad, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            grad.copy_(part.view_as(grad))
    norms = {
        "policy": float(torch.nn.utils.clip_grad_norm_(model.policy.parameters(), 1.0)),
        "draft": float(torch.nn.utils.clip_grad_norm_(model.draft.parameters(), 1.0)),
    }
    optimizer.step()
    optimizer.zero_grad()
    return norms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy_path")
    parser.add_argument("draft_path")
    parser.add_argument("--samples", type=int, default=64, help="samples a rank")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    learner = build_learner(args.policy_path, args.draft_path)
    loss_fn = GrpoLoss()
    batch = make_batch(args.samples, dist.get_rank())
    assert learner.draft is not None
    draft_config = cast(Eagle3Config, learner.draft.config)
    tokens = pack_batch(batch)
    plain = PlainModel(learner.policy.config, learner.policy_weights(), draft_config, learner.draft_weights())
    groups = [{"params": plain.draft.parameters()}, {"params": plain.policy.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, fused=True, **ADAM)
    metrics = learner.step([tokens], loss_fn)
    norms = step_plain(plain, optimizer, batch, loss_fn)
    seconds: dict[str, list[float]] = {"learner": [], "plain": []}
    for _ in range(args.repeats):
        for name, run in {
            "learner": lambda: learner.step([tokens], loss_fn),
            "plain": lambda: step_plain(plain, optimizer, batch, loss_fn),
        }.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        ratios = [a / b for a, b in zip(seconds["learner"], seconds["plain"], strict=True)]
        result = {
            "ranks": dist.get_world_size(),
            "tokens_per_rank": tokens.num_tokens,
            "learner_s": statistics.median(seconds["learner"]),
            "plain_s": statistics.median(seconds["plain"]),
            "ratio": statistics.median(ratios),
            "grad_norms_learner": {name: metrics[f"grad_norm/{name}"] for name in norms},
            "grad_norms_plain": norms,
        }
        print(json.dumps(result, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
