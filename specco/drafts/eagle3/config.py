"""Shape and training choices of an EAGLE-3 draft."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """One EAGLE-3 draft. The taps, the policy's embedding and the draft are all ``hidden_size`` wide.

    Args:
        hidden_size: of the policy and of the draft.
        intermediate_size: of the draft's MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; divides ``num_attention_heads``.
        head_dim: even.
        vocab_size: of the policy; the draft predicts all of it.
        target_layer_ids: tapped layers, "output of layer j" counted from 0, ascending and distinct. (vLLM counts the
            input of a layer: one more.)
        rms_norm_eps: of every norm.
        rope_theta: base of the rotary embedding, in its plain form; the policy's value.
        max_position_embeddings: longest document in tokens, passes included. vLLM sizes its rotary table by it.
        ttt_steps: passes of the training-time test, as many as the engine shall draft tokens.
        loss_decay: weight of pass d is ``loss_decay ** (d - 1)``.
        norm_before_residual: the residual of the attention is ``hidden_norm(h)`` instead of ``h``.
        norm_before_fc: one norm over the concatenated taps.
        fc_norm: one norm a tap; excludes ``norm_before_fc``.
        norm_output: feed the next pass the output after the final norm instead of before it.

    Raises:
        ValueError: a value that is out of range or contradicts another, by name.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 131072
    ttt_steps: int = 3
    loss_decay: float = 1.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "rms_norm_eps",
            "rope_theta",
            "max_position_embeddings",
            "ttt_steps",
        ):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} is {value}; it must be > 0")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; it must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; the rotary embedding needs an even one")
        ids = self.target_layer_ids
        if not ids or min(ids) < 0 or list(ids) != sorted(set(ids)):
            # the engine sorts and deduplicates the ids, so another order could never be served
            raise ValueError(f"target_layer_ids is {ids}; allowed are distinct layers >= 0 in ascending order")
        if not 0 < self.loss_decay <= 1:
            raise ValueError(f"loss_decay is {self.loss_decay}; allowed are 0 < loss_decay <= 1")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both True; at most one of them may be")
