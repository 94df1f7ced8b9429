"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every process that it starts."""

from specco.rl.vllm_mends import apply_mends


def register() -> None:
    """Apply the mends of vLLM's CPU build in this process."""
    apply_mends()
