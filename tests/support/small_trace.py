"""A record small enough to know by heart: one Linear [2, 4] x [4, 8] in decode, its weight, one op unknown."""

from introspect.records import (
    Decision,
    Gemm,
    ModelIdentity,
    Op,
    Parameter,
    Repeat,
    RunShape,
    Tensor,
    Trace,
    Unclassified,
)


def small_trace(*, doubtful=False, **run):
    """The record of `run` (default: decode of 2 sequences at context 16); `doubtful` adds what --strict refuses."""
    shape = RunShape(**{"phase": "decode", "batch": 2, "seq": 1, "context": 16, "dtype": "bf16", **run})
    linear = Op(
        name="aten.mm",
        module="layers.0.proj",
        kind="gemm",
        inputs=(0, 1),
        outputs=(2,),
        gemms=(Gemm(kind="linear", batch=1, m=2, k=4, n=8, lhs=0, rhs=1, out=2),),
    )
    odd = Op(name="aten.odd", module="layers.0", kind="unclassified", inputs=(2,), outputs=(2,))
    return Trace(
        model=ModelIdentity(
            id="tests/small", class_name="Small", source="made by a test", config_sha256="0" * 64, config={"width": 4}
        ),
        run=shape,
        versions={"torch": "2", "transformers": "5", "introspect": "0"},
        modules={"": "Small", "layers.0": "Layer", "layers.0.proj": "Linear"},
        parameters=(Parameter(path="layers.0.proj.weight", shape=(8, 4), dtype="bf16", touched=True),),
        tensors=(
            Tensor(storage=0, offset=0, shape=(2, 4), dtype="bf16", role="activation"),
            Tensor(storage=1, offset=0, shape=(4, 8), dtype="bf16", role="weight", parameter="layers.0.proj.weight"),
            Tensor(storage=2, offset=0, shape=(2, 8), dtype="bf16", role="activation"),
        ),
        ops=(linear, Repeat(body=(odd, Repeat(body=(linear,), count=2)), count=3)),
        decisions=(
            (
                Decision(
                    question="Tensor.any", answer="False", answered="assumed", where="model.py:7", module="layers.0"
                ),
            )
            if doubtful
            else ()
        ),
        unclassified=(Unclassified(op="aten.odd", module="layers.0", count=3),) if doubtful else (),
    )
