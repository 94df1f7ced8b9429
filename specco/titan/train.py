"""torchtitan's training entry point, for machines without an accelerator too.

    torchrun --nproc-per-node 2 -m specco.titan.train --module recipes.pretrain --config tiny_policy

On a machine with an accelerator ``-m torchtitan.train`` takes the same arguments.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from specco.titan import cpu_support


def main() -> None:
    """Apply CPU support where it is needed, then run torchtitan's own entry point."""
    cpu_support.apply()
    import_config_module(sys.argv[1:])
    from torchtitan.train import main as train

    train()


def import_config_module(arguments: list[str]) -> None:
    """Import the ``--module`` of the command line, so that an error inside it shows.

    torchtitan reports any ImportError in it as a module that cannot be found. Its own short names have no dot and are
    left to it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--module", default="")
    module = parser.parse_known_args(arguments)[0].module
    if "." in module:
        importlib.import_module(module)


if __name__ == "__main__":
    main()
