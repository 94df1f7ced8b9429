"""torchtitan's training entry point, for machines without an accelerator too.

    torchrun --nproc-per-node 2 -m specco.titan.train --module recipes.pretrain --config tiny_policy

On a machine with an accelerator ``-m torchtitan.train`` takes the same arguments.
"""

from __future__ import annotations

from specco.titan import cpu_support


def main() -> None:
    """Apply CPU support where it is needed, then run torchtitan's own entry point."""
    cpu_support.apply()
    from torchtitan.train import main as train

    train()


if __name__ == "__main__":
    main()
