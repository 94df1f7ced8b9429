"""specco: train the draft of speculative decoding together with the policy, in the policy's own parallel layout."""

__version__ = "0.1.0"
