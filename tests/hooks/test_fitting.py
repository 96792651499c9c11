from __future__ import annotations

from itertools import product

import pytest

from introspect.hooks.fitting import Seen, evaluate, fits, holds

BASE = {"hidden": 512, "heads": 8, "kv": 4}


def observed(function, base=BASE, steps=(1, 3)):
    """All combinations of each field's value and its first change, then the further changes one by one."""
    trials = [dict(zip(base, chosen, strict=True)) for chosen in product(*((v, v + steps[0]) for v in base.values()))]
    trials += [{**base, name: value * step} for name, value in base.items() for step in steps[1:]]
    return [Seen(values, function(**values)) for values in trials]


def first(seen, required):
    return next(fits(seen, required), None)


def test_terms_add_up_products_and_quotients():
    terms = ((2, ("heads", "hidden // heads")), (-1, ("kv",)), (3, ()))

    assert evaluate(terms, BASE) == 2 * 8 * 64 - 4 + 3
    assert holds(terms, [Seen(BASE, 1023)])
    assert not holds(terms, [Seen(BASE, 1023), Seen({**BASE, "kv": 5}, 1023)])


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda hidden, heads, kv: hidden * heads + kv, ((1, ("heads", "hidden")), (1, ("kv",)))),
        # a fused projection of queries, keys and values whose head width is derived
        (
            lambda hidden, heads, kv: hidden // heads * (heads + 2 * kv),
            ((1, ("heads", "hidden // heads")), (2, ("hidden // heads", "kv"))),
        ),
        # the same of a model that keeps the hidden width whole
        (
            lambda hidden, heads, kv: hidden + 2 * kv * (hidden // heads),
            ((1, ("hidden",)), (2, ("hidden // heads", "kv"))),
        ),
    ],
)
def test_the_sum_is_found_that_every_observation_follows(function, expected):
    assert first(observed(function), tuple(BASE)) == expected


def test_squares_are_found():
    patches = observed(lambda image, patch: (image // patch) ** 2 + 1, {"image": 336, "patch": 14})
    assert first(patches, ("image", "patch")) == ((1, ("image // patch", "image // patch")), (1, ()))

    streams = observed(lambda streams: streams * (2 + streams), {"streams": 4}, (1, 2, 5))
    assert first(streams, ("streams",)) == ((2, ("streams",)), (1, ("streams", "streams")))


def test_what_no_class_computes_is_no_sum():
    """Two observations of a rounded width: some sums of three would fit, with counts that nobody writes."""
    seen = observed(
        lambda width, multiple: -(-(2 * width // 3) // multiple) * multiple, {"width": 1200, "multiple": 96}
    )

    assert first(seen, ("width", "multiple")) is None


def test_as_many_unknowns_as_observations_prove_nothing():
    assert first([Seen({"a": 4}, 100)], ("a",)) is None


def test_a_field_that_only_moves_along_with_another_may_be_left_out():
    seen = [Seen({"heads": h, "kv": k}, 16 * h) for h, k in ((4, 4), (5, 5), (8, 8), (4, 2))]

    assert first(seen, ("heads",)) == ((16, ("heads",)),)
    assert all("kv" in str(terms) for terms in fits(seen, ("heads", "kv")))
