#!/usr/bin/env bash
# The main job on a CPU machine: warm-start a tiny policy, pre-train its draft, then train both by GRPO with vLLM rollouts.
# The last step runs three times from the same start: without a draft, with the draft as it is, and with the draft
# co-trained. The two preparations are cached under runs/; remove that folder to start afresh.
#
#     bash tools/demo.sh [--arms cotrain] [fields of recipes.grpo, such as --steps 20]
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/setup.sh

export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore::UserWarning,ignore::FutureWarning,ignore::DeprecationWarning}
RANKS=${RANKS:-2}
ARMS=none,frozen,cotrain
if [ "${1:-}" = --arms ]; then
    ARMS=${2:?"--arms needs a list such as none,cotrain"}
    shift 2
fi
say() { printf '\n\033[1m== %s (%d s so far)\033[0m\n' "$1" "$SECONDS"; }

if [ ! -e runs/tiny_policy/policy/config.json ]; then
    say "1/3 warm-start the policy"
    torchrun --nproc-per-node "$RANKS" -m specco.titan.train --module recipes.pretrain --config tiny_policy
fi
if [ ! -e runs/tiny_eagle3_draft/draft/config.json ]; then
    say "2/3 pre-train the draft on the policy's own samples"
    torchrun --nproc-per-node "$RANKS" -m specco.titan.train --module recipes.pretrain --config tiny_eagle3_draft
fi
say "3/3 train the policy with each of: $ARMS"
python -m recipes.compare --config tiny_eagle3 --arms "$ARMS" --ranks "$RANKS" -- "$@"
say "done; runs/tiny_eagle3/report.html compares the runs"
