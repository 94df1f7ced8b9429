"""Give a trained policy more layers that change nothing: the same function, and the same draft fits, at a higher cost.

    python -m recipes.deepen runs/tiny_eagle3_cotrain_seed0/policy runs/tiny_deep_policy/policy --layers 24

A tiny policy is so cheap beside its draft that speculation cannot show what it is worth. The new layers come last, as
copies of the last one whose ``o_proj`` and ``down_proj`` are zero: they add exactly nothing to the residual stream, and
tapped layers keep their numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WRITES = ("self_attn.o_proj.", "mlp.down_proj.")
"""The two projections through which a layer writes into the residual stream."""


def deepen_policy(source: str | Path, target: str | Path, num_layers: int) -> None:
    """Write the policy of ``source`` with identity layers up to ``num_layers`` as a new directory.

    Args:
        source: Hugging Face directory of a dense policy.
        target: of the new one; it must not exist.
        num_layers: layers of the new policy.

    Raises:
        ValueError: no more layers than before, a target that is there, or a layer that is not built as expected.
    """
    source, target = Path(source), Path(target)
    config = json.loads((source / "config.json").read_text())
    old = config["num_hidden_layers"]
    if num_layers <= old:
        raise ValueError(f"num_layers is {num_layers}; allowed are more than the {old} of {source}")
    if target.exists():
        raise ValueError(f"{target} is there; give a new directory")
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        weights |= load_file(path)
    last = {name: tensor for name, tensor in weights.items() if name.startswith(f"model.layers.{old - 1}.")}
    for part in WRITES:
        if not any(part in name for name in last):
            raise ValueError(f"layer {old - 1} of {source} has no {part.rstrip('.')}; supported are dense policies")
    for layer in range(old, num_layers):
        for name, tensor in last.items():
            is_write = any(part in name for part in WRITES)
            new = re.sub(r"^model\.layers\.\d+", f"model.layers.{layer}", name)
            weights[new] = torch.zeros_like(tensor) if is_write else tensor.clone()
    config["num_hidden_layers"] = num_layers
    if "layer_types" in config:
        config["layer_types"] += config["layer_types"][-1:] * (num_layers - old)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    skip = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json", "config.json")
    shutil.copytree(source, part, ignore=skip)
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    os.replace(part, target)


def main() -> None:
    """Read the command line and write the directory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="directory of the trained policy")
    parser.add_argument("target", help="directory to write")
    parser.add_argument("--layers", type=int, default=24, help="of the new policy")
    args = parser.parse_args()
    try:
        deepen_policy(args.source, args.target, args.layers)
    except ValueError as error:
        parser.error(str(error))
    print(f"{args.target}: {args.layers} layers, the same function as {args.source}")


if __name__ == "__main__":
    main()
