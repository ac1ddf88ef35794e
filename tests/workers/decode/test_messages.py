"""Encoding of batch changes between the ranks of a decode ring."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringserve.workers.decode.messages import CHANGES, BatchChange
from ringserve.workers.protocol.steps import (
    AdmitSequence,
    ComputePrompt,
    GrowSequence,
)
from ringserve.workers.sampling.parameters import SamplingParameters, TokenBias, TokenHistory

samplings = st.builds(
    SamplingParameters,
    seed=st.integers(0, (1 << 64) - 1),
    max_tokens=st.integers(1, 1 << 31),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    top_k=st.integers(0, 1 << 31),
    min_tokens=st.integers(0, 1 << 31),
    stop_token_ids=st.lists(st.integers(0, 1 << 31)).map(tuple),
    logit_bias=st.lists(st.builds(TokenBias, st.integers(0, 1 << 31), st.floats(-100, 100))).map(tuple),
)


@settings(max_examples=40)
@given(
    st.builds(
        BatchChange,
        removed=st.lists(st.text(max_size=9)).map(tuple),
        admitted=st.lists(
            st.builds(
                AdmitSequence,
                sequence_id=st.text(max_size=9),
                token_id=st.integers(0, 1 << 20),
                position=st.integers(0, 1 << 40),
                held=st.lists(st.integers(0, 1 << 40)).map(tuple),
                blocks=st.lists(st.lists(st.integers(0, 1 << 30)).map(tuple)).map(tuple),
                sampling=samplings,
                history=st.builds(TokenHistory, num_generated=st.integers(0, 1 << 31)),
            )
        ).map(tuple),
        grown=st.lists(
            st.builds(
                GrowSequence,
                sequence_id=st.text(max_size=9),
                blocks=st.lists(st.lists(st.integers(0, 1 << 30)).map(tuple)).map(tuple),
            )
        ).map(tuple),
    )
)
def test_a_change_arrives_as_it_was_sent(change: BatchChange) -> None:
    assert CHANGES.decode(CHANGES.encode(change)) == change


def test_a_prompt_crosses_the_wire_as_it_is() -> None:
    sampling = SamplingParameters(
        temperature=0.5, seed=1 << 63, logprobs=1, logit_bias=(TokenBias(3, -1.5),), max_tokens=9
    )
    prompt = ComputePrompt(
        sequence_id="a",
        token_ids=np.array([1, 2, 3]),
        held=(4, 0),
        blocks=((9, 8), ()),
        sampling=sampling,
        history=TokenHistory(num_generated=0, prompt_ids=(1, 4), answer_ids=()),
    )
    admission = AdmitSequence(
        sequence_id="b", token_id=9, position=5, held=(3, 2), blocks=((0,), (1,)), sampling=SamplingParameters()
    )
    for admitted in ((), (admission,)):
        change = BatchChange(admitted=admitted, prompt=prompt)
        decoded = CHANGES.decode(CHANGES.encode(change))
        assert decoded.prompt is not None
        assert decoded.prompt.token_ids.tolist() == [1, 2, 3]
        # Arrays have no single truth value, and Python 3.13 compares dataclasses field by field.
        assert replace(decoded, prompt=None) == replace(change, prompt=None)
        assert asdict(decoded.prompt) | {"token_ids": None} == asdict(prompt) | {"token_ids": None}
    assert not CHANGES.decode(CHANGES.encode(BatchChange(removed=("a",)))).prompt
