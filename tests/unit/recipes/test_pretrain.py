"""Data of the preparations: the same samples at any number of ranks, no padding, trained on responses alone."""

from itertools import islice

import pytest
import torch
from torchtitan.components.loss import IGNORE_INDEX

from recipes import pretrain
from recipes.carry import CarrySamples
from recipes.pretrain import (
    CarryLoader,
    RolloutLoader,
    pack_samples,
    smoke_eagle3_draft,
    smoke_policy,
    tiny_dflash_draft,
    tiny_dspark_draft,
    tiny_policy,
)


def build_loader(config, *, rank=0, num_ranks=1, batch_size=4):
    return config.build(dp_rank=rank, dp_world_size=num_ranks, local_batch_size=batch_size, seq_len=128)


def split_documents(inputs):
    starts = (inputs["positions"][0] == 0).nonzero().squeeze(1).tolist()
    return [tuple(part.tolist()) for part in inputs["input"][0].tensor_split(starts[1:])]


def test_a_step_sees_the_same_samples_at_any_number_of_ranks():
    alone = build_loader(CarryLoader.Config())
    two_steps_alone = [split_documents(inputs) for inputs, _ in islice(alone, 4)]
    ranks = [build_loader(CarryLoader.Config(), rank=r, num_ranks=2) for r in (0, 1)]
    by_rank = [[split_documents(inputs) for inputs, _ in islice(loader, 2)] for loader in ranks]
    for step in (0, 1):
        assert by_rank[0][step] + by_rank[1][step] == two_steps_alone[2 * step] + two_steps_alone[2 * step + 1]
    expected = [tuple(prompt + response) for prompt, response in (CarrySamples()[i] for i in range(4))]
    assert two_steps_alone[0] == expected


def test_labels_are_the_next_tokens_of_responses():
    inputs, labels = next(iter(build_loader(CarryLoader.Config())))
    assert labels.shape == inputs["input"].shape == inputs["positions"].shape
    expected = []
    for prompt, response in (CarrySamples()[i] for i in range(4)):
        # the last prompt token predicts the first of the response; the end token predicts nothing
        expected += [IGNORE_INDEX] * (len(prompt) - 1) + response + [IGNORE_INDEX]
    assert labels[0].tolist() == expected


def test_a_loader_goes_on_where_it_stopped():
    loader = build_loader(CarryLoader.Config())
    batches = [inputs["input"] for inputs, _ in islice(loader, 3)]
    resumed = build_loader(CarryLoader.Config())
    list(islice(resumed, 2))
    other = build_loader(CarryLoader.Config())
    other.load_state_dict(resumed.state_dict())
    assert torch.equal(next(iter(other))[0]["input"], batches[2])


def test_rollouts_come_in_shuffled_epochs(monkeypatch):
    samples = [([10 + i], [20 + i, 1]) for i in range(8)]
    monkeypatch.setattr(pretrain, "sample_policy", lambda path, num, seed: samples[:num])
    loader = build_loader(RolloutLoader.Config(num_samples=8))
    batches = [inputs["packed_tokens"] for inputs, _ in islice(loader, 4)]
    first, second = ([t for b in half for t in b.input_ids[::3].tolist()] for half in (batches[:2], batches[2:]))
    assert sorted(first) == sorted(second) == [10 + i for i in range(8)]
    assert first != second
    assert [b.sample_ids.tolist() for b in batches[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches[0].loss_mask.tolist() == [False, True, True] * 4


def test_pack_samples_leaves_no_padding():
    packed = pack_samples([([5], [6, 7]), ([8, 9], [1])], sample_ids=[3, 4])
    assert packed.input_ids.tolist() == [5, 6, 7, 8, 9, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 6]


def test_configs_are_made_without_files():
    assert tiny_policy().training.global_batch_size == 64
    assert smoke_policy().model_spec.flavor == "smoke"
    draft = smoke_eagle3_draft()
    assert draft.model_spec.model.is_frozen
    assert draft.hf_assets_path == draft.dataloader.policy_path == "runs/smoke_policy/policy"


@pytest.mark.parametrize("make_config", [tiny_dflash_draft, tiny_dspark_draft])
def test_block_drafts_mask_with_a_token_that_no_sample_has(make_config):
    draft = make_config().model_spec.model.draft
    loader = build_loader(CarryLoader.Config(seed=0))
    assert all(draft.mask_token_id not in inputs["input"] for inputs, _ in islice(loader, 20))
    assert draft.num_predictions == 4
    assert max(draft.target_layer_ids) < len(make_config().model_spec.model.layers)
