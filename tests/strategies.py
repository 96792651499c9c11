"""Hypothesis strategies for the records. A new record class needs nothing here unless it holds floats."""

from hypothesis import strategies as st

from introspect.records import ModelIdentity, Rope, RunShape, Trace

numbers = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
identities = st.builds(ModelIdentity, config=st.dictionaries(st.text(), json_values, max_size=4))
ropes = st.builds(
    Rope,
    base=numbers,
    attention_factor=numbers,
    inv_freq=st.lists(numbers, max_size=3).map(tuple),
    unscaled_inv_freq=st.lists(numbers, max_size=3).map(tuple),
)
run_shapes = st.from_type(RunShape)
traces = st.builds(Trace, model=identities, rope=st.lists(ropes, max_size=2).map(tuple))
