#!/usr/bin/env bash
# The main job on a CPU machine: warm-start a tiny policy, pre-train its draft, co-train both by GRPO with vLLM rollouts.
# The two preparations are cached under runs/; remove that folder to start afresh. Arguments go to recipes.grpo.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh

RANKS=${RANKS:-2}
say() { printf '\n\033[1m== %s (%d s so far)\033[0m\n' "$1" "$SECONDS"; }

if [ ! -e runs/tiny_policy/policy/config.json ]; then
    say "1/3 warm-start the policy"
    torchrun --nproc-per-node "$RANKS" -m specco.titan.train --module recipes.pretrain --config tiny_policy
fi
if [ ! -e runs/tiny_eagle3_draft/draft/config.json ]; then
    say "2/3 pre-train the draft on the policy's own samples"
    torchrun --nproc-per-node "$RANKS" -m specco.titan.train --module recipes.pretrain --config tiny_eagle3_draft
fi
say "3/3 co-train policy and draft"
torchrun --nproc-per-node "$RANKS" -m recipes.grpo --config tiny_eagle3 "$@"
say "done; metrics are in runs/tiny_eagle3"
