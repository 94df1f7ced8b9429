"""Serve an exported draft of any family: acceptance by position, the training-side estimate beside it, and the speed.

    PYTHONPATH=. python tools/eval_acceptance.py POLICY DRAFT --prompts prompts.jsonl --out runs/acceptance.json

Engines with and without the draft take turns on the same prompts; acceptance is counted by the one that speculates,
over all rounds. What the plain engine samples is then run through policy and draft as in training, which gives the
estimate from 1 - TV along the policy's own tokens (biased low), and the one from the ratio of probabilities of those
tokens (unbiased, noisier). Both are of temperature 1 and of drafts that are sampled, not greedy.

The prompts file has one JSON object a line, of one key: "token_ids", a list of integers, or "text", which the policy's
tokenizer encodes as it stands, without a chat template. Empty lines are left out:

    {"token_ids": [9, 12, 3]}
    {"text": "8+9+9+8+7+3="}
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rollout_timing import PLAIN, Batch, build_engines, summarize, take_turns, write_results
from torch import Tensor

from recipes.run_info import read_machine, read_versions
from specco.drafts.base import DraftConfig
from specco.drafts.block import BlockConfig
from specco.drafts.load import load_weights, read_draft_config
from specco.metrics import make_pair, sum_acceptance_rate_estimates
from specco.packing import pack_documents
from specco.rl.engine import SamplingConfig
from specco.titan import cpu_support

cpu_support.apply()

from specco.titan.export import load_policy, read_policy_config  # noqa: E402
from specco.titan.head import HeadPlan, compute_head_loss  # noqa: E402
from specco.titan.policy import Policy  # noqa: E402

MAX_TOKENS = 4096
"""Tokens of a microbatch of the training-side estimate, unless one sample needs more."""

Sample = tuple[list[int], list[int]]
"""(prompt ids, response ids)."""


def main() -> None:
    args = parse_arguments()
    try:
        prompts = read_prompts(args.prompts, functools.partial(encode, args.policy))
        config = read_draft_config(args.draft)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    num_draft_tokens = args.k or get_num_draft_tokens(config)
    report, samples = serve(args, prompts, num_draft_tokens)
    report["estimate"] = estimate_acceptance(args.policy, args.draft, samples, num_draft_tokens)
    print_report(report)
    write_results(report, args.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", help="directory of the policy")
    parser.add_argument("draft", help="directory of its draft")
    parser.add_argument("--prompts", type=Path, required=True, help="file of prompts, see above")
    parser.add_argument("--k", type=int, default=0, help="draft tokens of a verification; default: as many as trained")
    parser.add_argument("--samples", type=int, default=4, help="of each prompt in a round")
    parser.add_argument("--max-tokens", type=int, default=64, help="of a response")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--draft-sample-method", choices=("probabilistic", "greedy"), default="probabilistic")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences decoded together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-mib", type=int, default=1024, help="of each of the two engines")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds is {args.rounds}; an interval needs 2 or more")
    return args


@functools.cache
def load_tokenizer(policy: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(policy)


def encode(policy: str, text: str) -> list[int]:
    """Return the token ids of a text under the policy's tokenizer."""
    return load_tokenizer(policy).encode(text)


def read_prompts(path: Path, encode_fn: Callable[[str], list[int]]) -> list[list[int]]:
    """Return the token ids of every prompt of a file.

    Raises:
        ValueError: no file, no prompt, or a line of another form, by its number.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not there; give a file of prompts")
    prompts = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        keys = sorted(content) if isinstance(content, dict) else type(content).__name__
        if keys not in (["token_ids"], ["text"]):
            raise ValueError(f'{path}, line {number} has {keys}; allowed is one key, "token_ids" or "text"')
        ids = content["token_ids"] if keys == ["token_ids"] else encode_fn(content["text"])
        if not ids or not all(type(token_id) is int for token_id in ids):
            raise ValueError(f"{path}, line {number}: the prompt is {ids!r}; it must be one or more integers")
        prompts.append(ids)
    if not prompts:
        raise ValueError(f"{path} holds no prompt")
    return prompts


def get_num_draft_tokens(config: DraftConfig) -> int:
    """Return the draft tokens of a verification that a draft was trained for."""
    return config.num_predictions if isinstance(config, BlockConfig) else vars(config)["ttt_steps"]


def serve(
    args: argparse.Namespace, prompts: list[list[int]], num_draft_tokens: int
) -> tuple[dict[str, Any], list[Sample]]:
    """Let both engines take turns; return acceptance and speed, and what the plain engine sampled."""
    stop_ids = json.loads((Path(args.policy) / "config.json").read_text()).get("eos_token_id") or []
    sampling = {
        "n": args.samples,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "stop_token_ids": tuple(stop_ids) if isinstance(stop_ids, list) else (stop_ids,),
    }
    samples: list[Sample] = []

    def make_batch(index: int) -> Batch:
        return prompts, SamplingConfig(seed=index, **sampling)

    def watch(index: int, k: int, outputs: list[list[Any]]) -> None:
        if index > 0 and k == PLAIN:
            samples.extend((prompt, c.token_ids) for prompt, group in zip(prompts, outputs, strict=True) for c in group)

    engines = build_engines(
        args.policy,
        args.draft,
        [num_draft_tokens],
        max_model_len=max(map(len, prompts)) + args.max_tokens + num_draft_tokens + 1,
        max_num_seqs=args.max_num_seqs,
        kv_cache_bytes=args.kv_cache_mib << 20,
        draft_sample_method=args.draft_sample_method,
    )
    rounds = take_turns(engines, args.rounds, make_batch, watch)
    for engine in engines.values():
        engine.close()
    batch = len(prompts) * args.samples
    report: dict[str, Any] = {name: str(value) for name, value in vars(args).items()}
    report |= {"machine": read_machine(), "versions": read_versions(), "num_prompts": len(prompts)}
    report["served"] = summarize_acceptance(rounds[num_draft_tokens])
    report["speed"] = [summarize(k, batch, rounds[k], rounds[PLAIN]) for k in engines]
    return report, samples


def summarize_acceptance(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the acceptance of all rounds; rate k is the share of verifications that accepted position k."""
    drafts = sum(r["num_drafts"] for r in rounds)
    accepted = [sum(column) for column in zip(*(r["num_accepted_tokens_per_pos"] for r in rounds), strict=True)]
    rates = [a / drafts for a in accepted]
    return {"acceptance_length": 1 + sum(rates), "acceptance_rates": rates, "num_verifications": drafts}


def estimate_acceptance(policy: str, draft: str, samples: Sequence[Sample], num_draft_tokens: int) -> dict[str, Any]:
    """Run samples through policy and draft as in training, at every place where a whole block fits.

    Args:
        policy: directory.
        draft: directory.
        samples: of the policy itself at temperature 1.
        num_draft_tokens: predictions of a branch.

    Returns:
        Estimates of the acceptance length and of the rate of each position, from ``1 - TV`` (biased low) and from the
        tokens' ratios, ``1 - TV`` of each position by itself, and the number of branches.
    """
    network = build_network(policy, draft, num_draft_tokens)
    documents = [torch.tensor(prompt + response) for prompt, response in samples]
    masks = [torch.arange(len(d)) >= len(prompt) for d, (prompt, _) in zip(documents, samples, strict=True)]
    names = ("biased_low", "by_label", "one_minus_tv")
    pairs = {name: torch.zeros(num_draft_tokens, 2, dtype=torch.float64) for name in names}
    max_tokens = max(MAX_TOKENS, *map(len, documents))
    for tokens in pack_documents(documents, masks, max_tokens=max_tokens):
        with torch.no_grad():
            hidden, rows = network(tokens.input_ids[None], tokens.position_ids[None], packed_tokens=tokens)
            _, stats = compute_head_loss(network.lm_head, hidden, HeadPlan(tokens, None), network.draft, rows)
        if not stats.draft_rows:
            continue
        tv, by_label = stats.draft_rows["tv"], stats.draft_rows["label_acceptance"]
        places = (rows.slot_ids, rows.branch_ids, num_draft_tokens)
        pairs["biased_low"] += sum_acceptance_rate_estimates(tv, 1 - tv, *places)
        pairs["by_label"] += sum_acceptance_rate_estimates(tv, by_label, *places)
        alone = [make_pair((1 - tv)[rows.slot_ids == k].sum(), (rows.slot_ids == k).sum()) for k in range(places[2])]
        pairs["one_minus_tv"] += torch.stack(alone)
    return summarize_estimates(pairs)


def build_network(policy: str, draft: str, num_draft_tokens: int) -> Policy:
    """Return the policy with its draft, which drafts from every place, as many tokens as the engine."""
    config = read_draft_config(draft)
    choices = {"ttt_steps": num_draft_tokens}
    if isinstance(config, BlockConfig):
        # with fewer tokens than trained an engine hands the draft fewer masks
        choices = {"block_size": num_draft_tokens + config.first_prediction, "num_anchors": 1 << 30}
    model_config = read_policy_config(policy)
    model_config.draft = read_draft_config(draft, **choices)
    network = model_config.build()
    network.init_states()
    load_policy(network, policy)
    assert network.draft is not None and network.tok_embeddings is not None and network.lm_head is not None
    own = {"policy_embedding": network.tok_embeddings.weight, "policy_head": network.lm_head.weight}
    load_weights(network.draft, draft, **own)
    return network


def summarize_estimates(pairs: dict[str, Tensor]) -> dict[str, Any]:
    """Return means of sums and counts by position."""
    rates = {name: (pair[:, 0] / pair[:, 1]).tolist() for name, pair in pairs.items()}
    return {
        "acceptance_length_biased_low": 1 + sum(rates["biased_low"]),
        "acceptance_rates_biased_low": rates["biased_low"],
        "acceptance_length_by_label": 1 + sum(rates["by_label"]),
        "acceptance_rates_by_label": rates["by_label"],
        "one_minus_tv": rates["one_minus_tv"],
        "num_branches": int(pairs["biased_low"][0, 1]),
    }


def print_report(report: dict[str, Any]) -> None:
    served, estimate = report["served"], report["estimate"]
    plain, drafted = report["speed"]
    table = Table(
        title=f"{report['draft']}: {report['num_prompts']} prompts, {served['num_verifications']} verifications"
    )
    for heading in ("", "length", *(f"position {k + 1}" for k in range(len(served["acceptance_rates"])))):
        table.add_column(heading, justify="right")
    rows = {
        "served": (served["acceptance_length"], served["acceptance_rates"]),
        "estimate, biased low": (estimate["acceptance_length_biased_low"], estimate["acceptance_rates_biased_low"]),
        "estimate by tokens": (estimate["acceptance_length_by_label"], estimate["acceptance_rates_by_label"]),
    }
    for name, (length, rates) in rows.items():
        table.add_row(name, f"{length:.3f}", *(f"{rate:.3f}" for rate in rates))
    table.add_row("1 - TV, each alone", "", *(f"{value:.3f}" for value in estimate["one_minus_tv"]))
    Console(width=120).print(table)
    low, high = drafted["cpu_speedup_interval"]
    print(
        f"tokens per CPU-second: {plain['tokens_per_cpu_s']:.0f} without the draft, {drafted['tokens_per_cpu_s']:.0f} "
        f"with it: {drafted['cpu_speedup']:.2f}x (95%: {low:.2f} to {high:.2f}); wall time {drafted['speedup']:.2f}x"
    )


if __name__ == "__main__":
    main()
