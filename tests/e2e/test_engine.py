"""The rollout engine on real vLLM: sampling that follows the policy, drafts that are the trained ones, exact refits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.acceptance_test import run_acceptance_test
from helpers.engine_models import (
    TTT_STEPS,
    VOCAB_SIZE,
    compute_logprobs,
    make_draft,
    predict_with_draft,
    sample_stream,
    save_policy,
    train_draft,
    train_policy,
)
from helpers.sample_test import list_tokens, run_sample_test
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from specco.drafts.eagle3.model import Eagle3Draft
from specco.drafts.export import iterate_weights, save_draft
from specco.rl import vllm_mends
from specco.rl.engine import EngineConfig, RolloutEngine, SamplingConfig

ENGINE_FIELDS = {"max_model_len": 384, "max_num_seqs": 64, "num_speculative_tokens": TTT_STEPS}


@dataclass
class Models:
    """A policy, its half-trained draft, and their directories."""

    policy: Qwen3ForCausalLM
    draft: Eagle3Draft
    policy_path: str
    draft_path: str

    def policy_weights(self) -> dict[str, Tensor]:
        return load_file(Path(self.policy_path) / "model.safetensors")

    def draft_weights(self) -> dict[str, Tensor]:
        return load_file(Path(self.draft_path) / "model.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Models:
    path = tmp_path_factory.mktemp("models")
    policy = train_policy(num_steps=100)
    draft = make_draft(seed=1)
    train_draft(draft, policy, num_steps=60)
    save_draft(draft, path / "draft")
    return Models(policy, draft, save_policy(policy, path / "policy"), str(path / "draft"))


@pytest.fixture(scope="module")
def shared_engine(models):
    engine = RolloutEngine(EngineConfig(policy_path=models.policy_path, draft_path=models.draft_path, **ENGINE_FIELDS))
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine, models):
    """The engine with a draft, with the weights of its directories and an empty count."""
    shared_engine.refit(policy=models.policy_weights().items(), draft=models.draft_weights().items(), version=0)
    shared_engine.stats()
    return shared_engine


@pytest.fixture(scope="module")
def plain_engine(models):
    """The same policy without a draft."""
    engine = RolloutEngine(EngineConfig(policy_path=models.policy_path, **ENGINE_FIELDS))
    yield engine
    engine.close()


def snapshot(module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def scale_weights(weights: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: value * factor for name, value in weights.items()}


class TestLossless:
    def test_greedy_output_is_that_of_the_policy_alone(self, engine, plain_engine):
        prompts = sample_stream(64, 8, seed=3).tolist()
        sampling = SamplingConfig(temperature=0.0, max_tokens=48)
        with_draft = list_tokens(engine.generate(prompts, sampling))
        assert with_draft == list_tokens(plain_engine.generate(prompts, sampling))
        assert len(set(map(tuple, with_draft))) > 30
        stats = engine.stats()
        assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.9
        assert plain_engine.stats().num_drafts == 0

    @pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.9)])
    def test_samples_follow_the_policy(self, engine, models, temperature, top_p):
        result = run_sample_test(engine, models.policy, temperature, top_p)
        acceptance = result.stats.num_accepted_tokens / result.stats.num_draft_tokens
        print(f"T={temperature} top_p={top_p}: z={result.z:.2f} p={result.p_value:.3f} acceptance={acceptance:.3f}")
        assert 0.2 < acceptance < 0.9
        assert abs(result.z) < 4
        assert result.p_value > 1e-4
        # a nucleus of float32 logits may differ from ours by the token at its edge
        assert int((result.logprob_errors > 1e-4).sum()) <= (0 if top_p == 1.0 else 10)
        assert result.stats.num_generated_tokens == 1024 * 24
        assert sum(result.stats.num_accepted_tokens_per_pos) == result.stats.num_accepted_tokens

    def test_acceptance_is_what_the_training_network_says(self, engine, models):
        result = run_acceptance_test(engine, models.draft, models.policy)
        print(f"served {result.rates.tolist()}, expected {result.expected.tolist()}, z={result.z.tolist()}")
        assert result.num_verifications > 5000
        assert float(result.z.abs().max()) < 3

    def test_the_acceptance_test_sees_another_draft(self, engine, models):
        """The network that is compared is not the one that is served."""
        other = make_draft(seed=1)
        train_draft(other, models.policy, num_steps=30)
        assert float(run_acceptance_test(engine, other, models.policy).z.abs().max()) > 6

    def test_the_sample_test_sees_wrong_temperatures(self, engine, models, monkeypatch):
        """What the CPU build does without the mend, its uninitialised memory made visible."""
        from vllm.v1.sample import rejection_sampler

        def expand_as_vllm_does(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
            memory = x.new_full((num_tokens,), 0.6)
            rejection_sampler._expand(memory, x, cu_num_tokens, replace_from, replace_to)
            return memory

        monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand_as_vllm_does)
        result = run_sample_test(engine, models.policy, 1.0)
        assert result.z > 20
        assert result.p_value < 1e-4

    def test_stop_tokens_end_a_response_and_belong_to_it(self, engine):
        prompts = sample_stream(16, 8, seed=6).tolist()
        stop = tuple(range(8))
        completions = [g[0] for g in engine.generate(prompts, SamplingConfig(max_tokens=32, stop_token_ids=stop))]
        assert {c.finish_reason for c in completions} == {"stop", "length"}
        for c in completions:
            assert len(c.token_ids) == len(c.logprobs) == len(c.weight_versions)
            assert not set(c.token_ids[:-1]) & set(stop)
            assert (c.finish_reason == "stop") == (c.token_ids[-1] in stop)
            assert c.finish_reason == "stop" or len(c.token_ids) == 32


class TestRepeatability:
    def test_one_seed_one_rollout(self, engine):
        prompts = sample_stream(16, 8, seed=4).tolist()
        sampling = SamplingConfig(n=4, max_tokens=24, seed=1)
        first = engine.generate(prompts, sampling)
        torch.rand(3)  # the caller's noise is another
        assert engine.generate(prompts, sampling) == first
        assert len(set(map(tuple, list_tokens(first)))) == 64
        other = engine.generate(prompts, SamplingConfig(n=4, max_tokens=24, seed=2))
        assert not set(map(tuple, list_tokens(other))) & set(map(tuple, list_tokens(first)))

    def test_equal_prompts_get_different_noise(self, engine, plain_engine):
        prompts = sample_stream(1, 8, seed=4).tolist() * 16
        for some_engine in (engine, plain_engine):
            outputs = some_engine.generate(prompts, SamplingConfig(max_tokens=24))
            assert len(set(map(tuple, list_tokens(outputs)))) == 16

    def test_caller_keeps_its_generator_and_threads(self, engine):
        torch.manual_seed(7)
        expected = torch.rand(4)
        torch.manual_seed(7)
        engine.generate([[1, 2, 3]], SamplingConfig(max_tokens=8))
        assert torch.equal(torch.rand(4), expected)
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        assert torch.get_num_threads() == before + 1
        torch.set_num_threads(before)


class TestServedDraft:
    """The draft that is trained is the draft that is served."""

    def record_proposals(self, engine, monkeypatch, prompts: list[list[int]], max_tokens: int):
        """Generate greedily, prompt by prompt; return each verification's prefix and the tokens that vLLM proposed."""
        drafter = engine._engine.model_executor.driver_worker.worker.model_runner.drafter
        propose, calls = drafter.propose, []

        def record(*args, **kwargs):
            calls.append(propose(*args, **kwargs))
            return calls[-1]

        monkeypatch.setattr(drafter, "propose", record)
        prefixes, proposals = [], []
        for prompt in prompts:
            calls.clear()
            ((completion,),) = engine.generate([prompt], SamplingConfig(temperature=0.0, max_tokens=max_tokens))
            whole, length = prompt + completion.token_ids, len(prompt) + 1
            for call in calls:
                proposal = call[0].tolist()
                if length + len(proposal) > len(whole):
                    break
                prefixes.append(whole[:length])
                proposals.append(proposal)
                accepted = next((k for k, t in enumerate(proposal) if whole[length + k] != t), len(proposal))
                length += accepted + 1
        monkeypatch.setattr(drafter, "propose", propose)
        return prefixes, proposals

    def check_proposals(self, engine, monkeypatch, draft: Eagle3Draft, policy: Qwen3ForCausalLM) -> None:
        engine.stats()
        prompts = sample_stream(8, 8, seed=9).tolist()
        prefixes, proposals = self.record_proposals(engine, monkeypatch, prompts, max_tokens=64)
        stats = engine.stats()
        assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.99
        expected = predict_with_draft(draft, policy, prefixes, proposals)
        assert expected.numel() >= 200
        assert torch.equal(torch.tensor(proposals), expected)

    def test_proposals_are_the_training_networks(self, engine, models, monkeypatch):
        self.check_proposals(engine, monkeypatch, models.draft, models.policy)

    def test_proposals_follow_a_refit(self, engine, models, monkeypatch):
        draft = make_draft(seed=2)
        train_draft(draft, models.policy, num_steps=200)
        engine.refit(draft=iterate_weights(draft), version=1)
        self.check_proposals(engine, monkeypatch, draft, models.policy)


class TestRefit:
    def test_draft_refit_changes_the_draft_alone(self, engine, models):
        prompts = sample_stream(8, 8, seed=8).tolist()
        sampling = SamplingConfig(temperature=0.0, max_tokens=24)
        before, outputs = snapshot(engine._policy), engine.generate(prompts, sampling)
        accepted = engine.stats().acceptance_length
        engine.refit(draft=iterate_weights(make_draft(seed=3)), version=1)
        after = snapshot(engine._policy)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert list_tokens(engine.generate(prompts, sampling)) == list_tokens(outputs)
        assert engine.stats().acceptance_length < accepted - 0.5
        engine.refit(draft=models.draft_weights().items(), version=1)
        engine.generate(prompts, sampling)
        assert engine.stats().acceptance_length == pytest.approx(accepted)

    def test_a_changed_head_of_the_draft_leaves_the_policys_logits(self, engine, models):
        """vLLM could have made one module of the two heads: then the policy's logprobs would change, too."""
        prompts, sampling = sample_stream(8, 8, seed=8).tolist(), SamplingConfig(temperature=0.0, max_tokens=24)
        before = engine.generate(prompts, sampling)
        accepted = engine.stats().acceptance_length
        weights = models.draft_weights()
        weights["lm_head.weight"] = weights["lm_head.weight"].flip(0)
        engine.refit(draft=weights.items(), version=1)
        after = engine.generate(prompts, sampling)
        assert engine.stats().acceptance_length < accepted - 0.5
        for old, new in zip(before, after, strict=True):
            assert new[0].token_ids == old[0].token_ids
            assert new[0].logprobs == pytest.approx(old[0].logprobs, abs=1e-5)

    def test_policy_refit_changes_the_policy_alone(self, engine, models):
        before = snapshot(engine._draft)
        weights = scale_weights(models.policy_weights(), 1.25)
        engine.refit(policy=weights.items(), version=4)
        served = snapshot(engine._policy)
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.2.mlp.down_proj.weight"):
            assert torch.equal(served[name], weights[name])
        q, k, v = (weights[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv")
        assert torch.equal(served["model.layers.1.self_attn.qkv_proj.weight"], torch.cat([q, k, v]))
        after = snapshot(engine._draft)
        shared = "model.embed_tokens.weight"  # the draft reads the policy's embedding, as in training
        assert torch.equal(after.pop(shared), weights[shared])
        assert all(torch.equal(value, before[name]) for name, value in after.items())
        assert engine.version == 4
        ((completion,),) = engine.generate([[1, 2, 3]], SamplingConfig(max_tokens=4))
        assert completion.weight_versions == [4] * 4

    @pytest.mark.parametrize("is_reset", [True, False])
    def test_no_cached_prefix_outlives_a_refit(self, engine, models, monkeypatch, is_reset):
        """Without the reset, keys and values of the old policy would go on serving the prompt's full blocks."""
        prompt = sample_stream(1, 300, seed=10)  # two full blocks of 128; with a draft, vLLM reuses all but the last
        sampling = SamplingConfig(temperature=1.0, max_tokens=8)
        engine.generate(prompt.tolist(), sampling)
        weights = scale_weights(models.policy_weights(), 1.25)
        if not is_reset:
            monkeypatch.setattr(engine._engine, "reset_prefix_cache", lambda: True)
        engine.refit(policy=weights.items(), version=1)
        ((completion,),) = engine.generate(prompt.tolist(), sampling)
        policy = Qwen3ForCausalLM(models.policy.config).eval()
        policy.load_state_dict(weights)
        response = torch.tensor([completion.token_ids])
        exact = compute_logprobs(policy, prompt, response, 1.0)[0].gather(1, response[0][:, None]).squeeze(1)
        error = float((torch.tensor(completion.logprobs) - exact).abs().max())
        assert (error < 1e-4) == is_reset
        monkeypatch.undo()
        assert engine._engine.reset_prefix_cache()

    def test_wrong_weights_are_refused_before_anything_is_written(self, engine, models):
        before = snapshot(engine._policy), snapshot(engine._draft)
        policy = scale_weights(models.policy_weights(), 2.0)
        draft = scale_weights(models.draft_weights(), 2.0)
        missing = {name: value for name, value in draft.items() if name != "fc.weight"}
        with pytest.raises(ValueError, match=r"draft weights.*fc.weight is missing"):
            engine.refit(policy=policy.items(), draft=missing.items(), version=1)
        unknown = draft | {"embed_tokens.weight": policy["model.embed_tokens.weight"]}
        with pytest.raises(ValueError, match=r"draft weights.*embed_tokens.weight is unknown"):
            engine.refit(policy=policy.items(), draft=unknown.items(), version=1)
        misshapen = policy | {"lm_head.weight": torch.zeros(VOCAB_SIZE + 1, 64)}
        with pytest.raises(ValueError, match=r"policy weights.*lm_head.weight has shape \(65, 64\)"):
            engine.refit(policy=misshapen.items(), version=1)
        with pytest.raises(ValueError, match="neither"):
            engine.refit(version=1)
        after = snapshot(engine._policy), snapshot(engine._draft)
        for old, new in zip(before, after, strict=True):
            assert all(torch.equal(new[name], value) for name, value in old.items())
        assert engine.version == 0

    def test_draft_weights_need_a_drafter(self, plain_engine, models):
        with pytest.raises(RuntimeError, match="built without a draft"):
            plain_engine.refit(draft=models.draft_weights().items(), version=1)

    def test_requests_in_flight(self, engine, models):
        from vllm import SamplingParams

        engine._engine.add_request("x", {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=4, detokenize=False))
        with pytest.raises(RuntimeError, match="in flight"):
            engine.refit(policy=models.policy_weights().items(), version=1)
        engine._engine.abort_request(["x"], internal=False)


class TestOwnership:
    """vLLM makes one module of two tensors that are equal at start-up."""

    def test_equal_lm_head_is_separated(self, models, tmp_path):
        weights = models.draft_weights() | {"lm_head.weight": models.policy_weights()["lm_head.weight"]}
        path = self.copy_draft(models, tmp_path, weights)
        engine = RolloutEngine(EngineConfig(policy_path=models.policy_path, draft_path=path, **ENGINE_FIELDS))
        before = snapshot(engine._policy)
        engine.refit(draft=scale_weights(weights, 2.0).items(), version=1)
        assert torch.equal(engine._draft.lm_head.weight, weights["lm_head.weight"] * 2.0)
        after = snapshot(engine._policy)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        engine.generate([[1, 2, 3]], SamplingConfig(max_tokens=8))
        assert engine.stats().num_drafts > 0
        engine.close()

    def test_equal_embedding_is_refused(self, models, tmp_path):
        weights = models.draft_weights() | {"embed_tokens.weight": models.policy_weights()["model.embed_tokens.weight"]}
        path = self.copy_draft(models, tmp_path, weights)
        with pytest.raises(ValueError, match=r"embed_tokens.weight.*Leave it out"):
            RolloutEngine(EngineConfig(policy_path=models.policy_path, draft_path=path, **ENGINE_FIELDS))

    def copy_draft(self, models: Models, path: Path, weights: dict[str, Tensor]) -> str:
        (path / "config.json").write_text((Path(models.draft_path) / "config.json").read_text())
        save_file(weights, path / "model.safetensors")
        return str(path)


class TestRefusals:
    def test_no_room_for_prompt_response_and_drafts(self, engine, plain_engine):
        fits = SamplingConfig(max_tokens=384 - 10 - TTT_STEPS - 1, temperature=0.0)
        too_long = SamplingConfig(max_tokens=384 - 10 - TTT_STEPS, temperature=0.0)
        assert len(engine.generate([[5] * 10], fits)[0][0].token_ids) == fits.max_tokens
        with pytest.raises(ValueError, match=r"needs 385 tokens .10 prompt .* 4 headroom"):
            engine.generate([[5] * 10], too_long)
        plain_engine.generate([[5] * 10], too_long)
        with pytest.raises(ValueError, match="prompt 1 is empty"):
            engine.generate([[5], []], fits)
        with pytest.raises(ValueError, match="prompt 0 has ids 5 to 64; allowed are 0 to 63"):
            engine.generate([[5, 64]], fits)

    def test_sampled_speculation_on_an_unchecked_version(self, engine, plain_engine, monkeypatch):
        monkeypatch.setattr(vllm_mends, "get_vllm_version", lambda: "0.31.9")
        with pytest.raises(RuntimeError, match=r"temperature > 0 is refused on vLLM 0\.31\.9"):
            engine.generate([[1, 2]], SamplingConfig(max_tokens=4))
        engine.generate([[1, 2]], SamplingConfig(max_tokens=4, temperature=0.0))
        plain_engine.generate([[1, 2]], SamplingConfig(max_tokens=4))

    def test_an_interrupted_call_leaves_nothing_behind(self, engine, monkeypatch):
        step, calls = engine._engine.step, []

        def step_twice():
            calls.append(None)
            if len(calls) > 2:
                raise KeyboardInterrupt
            return step()

        sampling = SamplingConfig(n=2, max_tokens=16)
        expected = engine.generate([[1, 2], [3, 4]], sampling)
        monkeypatch.setattr(engine._engine, "step", step_twice)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([[1, 2], [3, 4]], sampling)
        monkeypatch.undo()
        assert engine.generate([[1, 2], [3, 4]], sampling) == expected
        assert math.isfinite(engine.stats().acceptance_length)

    def test_a_closed_engine_says_so(self, models, engine):
        other = RolloutEngine(EngineConfig(policy_path=models.policy_path, **ENGINE_FIELDS))
        other.close()
        other.close()
        with pytest.raises(RuntimeError, match="closed"):
            other.generate([[1]], SamplingConfig(max_tokens=4))
        # an engine beside it lives on, and so do the groups that both use
        assert torch.distributed.is_initialized()
        assert engine.generate([[1]], SamplingConfig(max_tokens=4))[0][0].token_ids
