from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from introspect.hooks.fold import fold
from introspect.records import Op, Repeat, Tensor


def op(name: str, module: str = "m", inputs: tuple[int, ...] = (), outputs: tuple[int, ...] = ()) -> Op:
    return Op(name=name, module=module, kind="elementwise", inputs=inputs, outputs=outputs)


def names(nodes) -> list:
    return [(node.count, names(node.body)) if isinstance(node, Repeat) else node.name for node in nodes]


def test_three_equal_blocks_become_one():
    assert names(fold([op(n) for n in "xabababy"], [])) == ["x", (3, ["a", "b"]), "y"]


def test_two_equal_blocks_stay():
    assert names(fold([op(n) for n in "ababc"], [])) == ["a", "b", "a", "b", "c"]


def test_a_loop_inside_a_loop_is_folded_too():
    assert names(fold([op(n) for n in "abbbc" * 4], [])) == [(4, ["a", (3, ["b"]), "c"])]


def test_ops_of_different_modules_or_shapes_are_not_equal():
    tensors = [Tensor(storage=i, offset=0, shape=(i + 1,), dtype="fp32", role="activation") for i in range(3)]

    assert len(fold([op("a", module=f"layer.{i}") for i in range(3)], [])) == 3
    assert len(fold([op("a", inputs=(i,)) for i in range(3)], tensors)) == 3


def test_a_list_of_equal_operands_becomes_one_with_its_length_in_front():
    tensors = [Tensor(storage=i, offset=0, shape=(2, 3), dtype="fp32", role="activation") for i in range(5)]
    (stack,) = fold([op("stack", inputs=(0, 1, 2, 3, 4))], tensors)

    (index,) = stack.inputs
    assert tensors[index].shape == (5, 2, 3)
    assert tensors[index].bytes == 5 * 2 * 3 * 4


@given(st.text("abc", max_size=60))
def test_folding_loses_nothing(text):
    def unfold(nodes):
        for node in nodes:
            if isinstance(node, Repeat):
                for _ in range(node.count):
                    yield from unfold(node.body)
            else:
                yield node.name

    assert "".join(unfold(fold([op(n) for n in text], []))) == text
