"""Hypothesis strategies of branch attention cases, and the profile that CI or a long run takes."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from specco.testing.attention_cases import AttentionCase

NUM_EXAMPLES = 1000 if os.environ.get("SPECCO_LONG") else 200

# The same cases in every process: drawn from the test's name, and never stopped by a clock or a local database.
same_on_every_rank = settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)

lengths = st.lists(
    st.one_of(st.integers(1, 4), st.integers(1, 40), st.integers(1, 160), st.sampled_from([1, 8, 16, 64])),
    min_size=1,
    max_size=7,
)


@st.composite
def attention_cases(draw) -> AttentionCase:
    """Draw a case of any family: every row or anchors, with and without branches, masks, window, sinks."""
    documents = tuple(draw(lengths))
    num_rows = sum(documents)
    num_queries = draw(st.sampled_from([1, 1, 2, 4]))
    num_keys = draw(st.sampled_from([0, 1, 3, num_queries]))
    masks = [None] if num_keys == 0 else [None, "shared", "each"] + ["causal"] * (num_keys == num_queries)
    anchors = None
    if draw(st.booleans()):
        edges = st.sampled_from([0, num_rows - 1, num_rows // 2])
        anchors = tuple(draw(st.lists(st.one_of(st.integers(0, num_rows - 1), edges), max_size=24)))
    offsets = st.lists(st.integers(0, 5), min_size=num_queries, max_size=num_queries).map(tuple)
    return AttentionCase(
        lengths=documents,
        num_kv_heads=draw(st.sampled_from([1, 2])),
        num_groups=draw(st.sampled_from([1, 2, 3])),
        head_dim=draw(st.sampled_from([4, 8])),
        num_queries=num_queries,
        num_keys=num_keys,
        anchors=anchors,
        trunk_inclusive=draw(st.booleans()),
        branch_mask=draw(st.sampled_from(masks)),
        window=draw(st.sampled_from([None, None, None, 1, 5, 30, 90])),
        query_offset=draw(st.one_of(st.none(), offsets)),
        has_sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )
