"""The memory estimate against parameters counted on meta, numbers by hand, and what a tiny policy really taps."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC

from recipes.full_size import CONFIGS
from specco.drafts.dflash.config import DFlashConfig
from specco.drafts.eagle3.config import Eagle3Config
from specco.packing import pack_documents
from specco.titan.learner import Learner
from specco.titan.registry import make_model_spec
from specco.titan.sizes import make_policy_config
from tools.estimate_memory import FORMULAS, build_on_meta, estimate, iterate_cuts

VOCAB, DIM, HIDDEN, HEADS, KV_HEADS, HEAD = 40, 32, 48, 4, 2, 8
SHAPE = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCAB, "dim": DIM}
DRAFT = {
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "target_layer_ids": (0, 1, 2),
}


def make_config(degrees: dict, draft=None, **sizes) -> Learner.Config:
    policy = make_policy_config("qwen3", num_layers=3, hidden_dim=HIDDEN, max_seq_len=64, **SHAPE, **sizes)
    return Learner.Config(
        model_spec=make_model_spec(policy, flavor="test", draft=draft or Eagle3Config(**DRAFT)),
        training=TrainingConfig(),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", **degrees),
        activation_checkpoint=FullAC.Config(),
        chunk_rows=10,
    )


@pytest.mark.parametrize("name", ["qwen3_8b_dspark", "qwen3_30b_a3b_dflash"])
def test_every_parameter_is_counted_once(name: str) -> None:
    config = CONFIGS[name]()
    policy = build_on_meta(config)
    assert sorted(id(p) for _, p, _ in iterate_cuts(policy)) == sorted(id(p) for p in policy.parameters())
    config.parallelism = replace(
        config.parallelism,
        data_parallel_shard_degree=1,
        tensor_parallel_degree=1,
        context_parallel_degree=1,
        expert_parallel_degree=1,
    )
    parts = estimate(config, 16384)
    assert parts["weights"] == sum(p.numel() * 4 for p in policy.parameters())
    assert parts["optimizer"] == 2 * parts["weights"] == 2 * parts["gradients"]
    assert parts["ring"] == 0


def test_parts_by_hand_at_fsdp2_tp2_cp2() -> None:
    degrees = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "context_parallel_degree": 2}
    parts = estimate(make_config(degrees), 1001)
    assert parts.keys() == FORMULAS.keys()
    rows = 501
    qkv, out, mlp = (HEADS + 2 * KV_HEADS) * HEAD * DIM, HEADS * HEAD * DIM, 3 * DIM * HIDDEN
    layer = (qkv + out + mlp) / 2 + 2 * DIM + 2 * HEAD
    ends = VOCAB * DIM  # embedding and head, each halved
    # projections of the draft read 2 D; its fc reads three taps; a head of its own; norms whole
    draft = (2 * qkv + out + mlp + 3 * DIM * DIM + VOCAB * DIM) / 2 + 4 * DIM
    own = 3 * layer + ends + DIM + draft
    assert parts["weights"] == 4 * own / 4
    assert parts["gathered"] == 2 * (2 * layer + ends + DIM + draft)
    saved = rows * (4 * DIM + (2 * (HEADS + 2 * KV_HEADS) * HEAD + HEADS * HEAD + 3 * HIDDEN) / 2)
    assert parts["activations"] == 2 * (3 * rows * DIM / 2 + 2 * saved)
    assert parts["draft"] == 2 * 4 * saved  # three passes of one layer of the same sizes, and gradients of one
    assert parts["head"] == 10 * VOCAB / 2 * (2 + 12)
    assert parts["taps"] == 2 * rows * DIM * 4
    assert parts["ring"] == 2 * rows * KV_HEADS * HEAD / 2 * (2 * 2 + 2 * 4)


def test_experts_and_blocks_by_hand_at_fsdp4_ep2() -> None:
    blocks = {"num_hidden_layers": 2, "block_size": 5, "mask_token_id": 39, "num_anchors": 7}
    degrees = {"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}
    config = make_config(degrees, DFlashConfig(**DRAFT, **blocks), num_experts=4, top_k=2)
    parts = estimate(config, 900, document_tokens=100)
    policy = build_on_meta(config)
    # experts are cut by 2 over "ep" and by 2 over "efsdp", what is left of the four ranks
    assert parts["weights"] == sum(p.numel() for p in policy.parameters()) * 4 / 4
    layers = [sum(p.numel() for p in layer.parameters()) for layer in policy.layers.values()]
    experts = 4 * 3 * DIM * HIDDEN
    others = sum(p.numel() for p in policy.parameters()) - sum(layers)
    assert parts["gathered"] == 2 * (others + 2 * (layers[0] - experts / 2))
    heads = 2 * (HEADS + 2 * KV_HEADS) * HEAD + HEADS * HEAD
    assert parts["activations"] == 2 * (3 * 900 * DIM + 2 * 900 * (4 * DIM + heads + 2 * (2 * DIM + 3 * HIDDEN)))
    assert parts["draft"] == 2 * 3 * (9 * 7 * 5) * (4 * DIM + heads + 3 * HIDDEN)


@pytest.mark.parametrize("ep", [1, 2])
def test_what_experts_save_at_tp2(ep: int) -> None:
    """With "ep" a rank of "tp" runs half the rows through whole experts, without it all rows through half of each."""
    degrees = {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2, "expert_parallel_degree": ep}
    parts = estimate(make_config(degrees, num_experts=4, top_k=2), 900)
    heads = 2 * (HEADS + 2 * KV_HEADS) * HEAD + HEADS * HEAD
    experts = 2 * (2 * DIM + 3 * HIDDEN) / 2 if ep == 2 else 2 * (2 * DIM + 3 * HIDDEN / 2)
    assert parts["activations"] == 2 * (3 * 900 * DIM / 2 + 2 * 900 * (4 * DIM + heads / 2 + experts))


class KeepsTaps(nn.Module):
    """Stands in for a draft and keeps what it is given."""

    target_layer_ids, mask_token_id = (0, 1, 2), None

    def forward(self, taps, embeddings, *args):
        self.num_bytes = taps.nbytes + embeddings.nbytes


def test_taps_are_those_of_a_run() -> None:
    config = make_config({"data_parallel_shard_degree": 1})
    config.training.mixed_precision_param = "float32"
    model = config.model_spec.model
    estimated = estimate(config, 24)["taps"]
    model.draft = None
    policy = model.build()
    policy.init_states()
    policy.draft = KeepsTaps()
    ids = torch.arange(24)
    (tokens,) = pack_documents([ids], [ids > 3], max_tokens=24)
    policy(ids[None], tokens.position_ids[None], packed_tokens=tokens)
    assert policy.draft.num_bytes == estimated == 4 * 24 * DIM * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": ParallelismConfig(spmd_backend="partial_dtensor")}, "shard_degree is -1"),
        ({"activation_checkpoint": None}, "activation_checkpoint is not FullAC"),
    ],
)
def test_what_cannot_be_estimated_is_refused(changes, message) -> None:
    config = replace(make_config({"data_parallel_shard_degree": 1}), **changes)
    with pytest.raises(ValueError, match=message):
        estimate(config, 10)


def test_stage_that_needs_most_by_hand_at_pp2() -> None:
    """Layers 0 and 1 with the embedding on stage 0, layer 2, head and draft on stage 1, which needs most here."""
    degrees = {"data_parallel_shard_degree": 1, "pipeline_parallel_degree": 2}
    parts = estimate(make_config(degrees), 1000)
    layer = (HEADS + 2 * KV_HEADS) * HEAD * DIM + HEADS * HEAD * DIM + 3 * DIM * HIDDEN + 2 * DIM + 2 * HEAD
    draft = layer + (HEADS + 2 * KV_HEADS) * HEAD * DIM - 2 * HEAD + 3 * DIM * DIM + VOCAB * DIM + 2 * DIM
    own = layer + VOCAB * DIM + DIM + draft
    assert parts["weights"] == 4 * own
    assert parts["gathered"] == (2 + 4) * own
    saved = 4 * DIM + 2 * (HEADS + 2 * KV_HEADS) * HEAD + HEADS * HEAD + 3 * HIDDEN
    assert parts["activations"] == 2 * 1000 * (1 * 1 * DIM + 2 * saved)
    # gathered for the draft, and two slots each for the embedding and layer 0; layer 1 comes by the pipeline
    assert parts["taps"] == 2 * 1000 * DIM * (4 + 2 * 2)
    assert parts["pipeline"] == 1 * 4 * 2 * 1000 * DIM
    other = make_config(degrees | {"pipeline_parallel_schedule": "GPipe"})
    with pytest.raises(ValueError, match="schedule is 'GPipe'"):
        estimate(other, 1000)
