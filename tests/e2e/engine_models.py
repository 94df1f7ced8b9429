"""Tiny models for the engine tests: a Qwen3 policy that learnt a Markov stream, an EAGLE-3 draft that half follows it.

The draft here is a plain dense network of its own, written from the checkpoint format that vLLM reads, so that the
served draft is compared with something that shares no code with either side.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 64
WIDTH = 64
HEAD_SIZE = 32
NUM_HEADS = 2
NUM_LAYERS = 4
TAPS_BEFORE = (1, 2, 3)  # "stream entering layer j", vLLM's convention
ROPE_THETA = 10_000.0


def sample_stream(num_rows: int, length: int, seed: int) -> Tensor:
    """Return int64 ``[num_rows, length]`` of a fixed Markov chain over the vocabulary."""
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).mul(2.5).softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCAB_SIZE, (num_rows,), generator=generator)]
    for _ in range(length - 1):
        tokens.append(torch.multinomial(table[tokens[-1]], 1, generator=generator).squeeze(1))
    return torch.stack(tokens, 1)


def train_policy(num_steps: int = 150, seed: int = 0) -> Qwen3ForCausalLM:
    """Return a small Qwen3 trained on the stream."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=1,
        head_dim=HEAD_SIZE,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(num_steps):
        tokens = sample_stream(32, 33, seed=100 + step)
        logits = model(tokens[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply RoPE to ``x`` ``[T, N, H]`` at ``positions`` ``[T]``."""
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    angles = positions[:, None, None] * frequencies
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class DenseEagle3(nn.Module):
    """One-layer EAGLE-3 draft over a single sequence; parameter names are the checkpoint's."""

    def __init__(self) -> None:
        super().__init__()
        heads = NUM_HEADS * HEAD_SIZE
        self.fc = nn.Linear(len(TAPS_BEFORE) * WIDTH, WIDTH, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": RMSNorm(WIDTH),
                "hidden_norm": RMSNorm(WIDTH),
                "post_attention_layernorm": RMSNorm(WIDTH),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * WIDTH, heads, bias=False),
                        "k_proj": nn.Linear(2 * WIDTH, heads, bias=False),
                        "v_proj": nn.Linear(2 * WIDTH, heads, bias=False),
                        "o_proj": nn.Linear(heads, WIDTH, bias=False),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(WIDTH, 2 * WIDTH, bias=False),
                        "up_proj": nn.Linear(WIDTH, 2 * WIDTH, bias=False),
                        "down_proj": nn.Linear(2 * WIDTH, WIDTH, bias=False),
                    }
                ),
            }
        )
        self.norm = RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)

    def forward(self, hidden: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Run the layer: ``hidden`` and ``embeddings`` ``[..., T, D]``; return logits and the pre-norm output."""
        layer, attention = self.midlayer, self.midlayer["self_attn"]
        joined = torch.cat([layer["input_layernorm"](embeddings), layer["hidden_norm"](hidden)], dim=-1)
        positions = torch.arange(hidden.shape[-2])
        q, k, v = (
            attention[name](joined).unflatten(-1, (NUM_HEADS, HEAD_SIZE)) for name in ("q_proj", "k_proj", "v_proj")
        )
        q, k, v = (x.transpose(-3, -2) for x in (rotate(q, positions), rotate(k, positions), v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2)
        hidden = hidden + attention["o_proj"](context)
        mlp, x = layer["mlp"], layer["post_attention_layernorm"](hidden)
        hidden = hidden + mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        return self.lm_head(self.norm(hidden)), hidden


def tap_policy(policy: Qwen3ForCausalLM, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the policy's taps ``[..., T, 3 * D]`` and logits ``[..., T, V]``, without gradient."""
    with torch.no_grad():
        out = policy(tokens, output_hidden_states=True)
    return torch.cat([out.hidden_states[j] for j in TAPS_BEFORE], dim=-1), out.logits


def train_draft(policy: Qwen3ForCausalLM, num_steps: int = 120, seed: int = 1) -> DenseEagle3:
    """Return a draft trained on its first pass only: good at the first position, worse at the next ones."""
    torch.manual_seed(seed)
    draft = DenseEagle3()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for step in range(num_steps):
        tokens = sample_stream(32, 33, seed=10_000 + step)
        taps, logits = tap_policy(policy, tokens)
        embeddings = policy.get_input_embeddings()(tokens[:, 1:]).detach()
        draft_logits, _ = draft(draft.fc(taps[:, :-1]), embeddings)
        teacher = logits[:, 1:].softmax(-1)
        loss = -(teacher * draft_logits.log_softmax(-1)).sum(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return draft.eval()


@torch.no_grad()
def draft_greedily(draft: DenseEagle3, policy: Qwen3ForCausalLM, prefix: list[int], num_tokens: int) -> list[int]:
    """Return what a draft proposes after ``prefix``: its own tokens and hidden rows are fed back."""
    tokens = torch.tensor([prefix])
    taps, _ = tap_policy(policy, tokens[:, :-1])
    hidden, embeddings = draft.fc(taps), policy.get_input_embeddings()(tokens[:, 1:])
    proposed: list[int] = []
    for _ in range(num_tokens):
        logits, output = draft(hidden, embeddings)
        proposed.append(int(logits[0, -1].argmax()))
        hidden = torch.cat([hidden, output[:, -1:]], dim=1)
        embeddings = torch.cat([embeddings, policy.get_input_embeddings()(torch.tensor([[proposed[-1]]]))], dim=1)
    return proposed


def save_policy(policy: Qwen3ForCausalLM, path: Path) -> str:
    policy.save_pretrained(path)
    return str(path)


def save_draft(draft: nn.Module, path: Path, extra: dict[str, Tensor] | None = None) -> str:
    """Write config.json and model.safetensors as vLLM reads them."""
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "max_position_embeddings": 512,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(TAPS_BEFORE),
        "torch_dtype": "float32",
    }
    (path / "config.json").write_text(json.dumps(config))
    state = {name: value.detach().contiguous() for name, value in draft.state_dict().items()}
    save_file({**state, **(extra or {})}, path / "model.safetensors")
    return str(path)


@torch.no_grad()
def policy_logprobs(policy: Qwen3ForCausalLM, prompt: list[int], response: list[int], temperature: float) -> Tensor:
    """Return float64 ``[len(response), V]``, the exact distribution of each response token at ``temperature``."""
    logits = policy(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)
