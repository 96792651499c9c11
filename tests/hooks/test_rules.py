from __future__ import annotations

import pytest
import torch
from support.tiny import IDENTITY
from torch import nn
from torch.nn import functional as F

from introspect.hooks.inputs import POSITIONAL
from introspect.hooks.observe import observe
from introspect.hooks.op_kinds import KINDS, op_kind
from introspect.hooks.rules import RULES, rule
from introspect.records import RunShape


class Calls(nn.Module):
    def __init__(self, function, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.empty(1))  # tells the device where a case has no weight
        self.weights = nn.ParameterList([torch.empty(s) for s in shapes])
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.weights)


def gemms(function, x_shape, *weights):
    trace = observe(Calls(function, *weights).to("meta"), IDENTITY, RunShape(), inputs={"x": torch.zeros(x_shape)})
    return [(g.kind, g.batch, g.m, g.k, g.n) for op, _ in trace.walk() for g in op.gemms]


@pytest.mark.parametrize(
    ("function", "x_shape", "weight", "expected"),
    [
        (F.linear, (2, 3, 8), (5, 8), ("linear", 1, 6, 8, 5)),
        (lambda x, w: x @ w, (2, 3, 8), (8, 5), ("linear", 1, 6, 8, 5)),
        (lambda x, w: w @ x, (8, 3), (5, 8), ("linear", 1, 3, 8, 5)),
        (lambda x, w: w @ x, (8,), (5, 8), ("linear", 1, 1, 8, 5)),
        (lambda x, w: torch.einsum("bsk,hkn->bshn", x, w), (2, 3, 8), (4, 8, 5), ("linear", 1, 6, 8, 20)),
        (lambda x, w: torch.bmm(x, w), (4, 3, 8), (4, 8, 5), ("einsum", 4, 3, 8, 5)),
        (lambda x, w: F.conv1d(x, w, groups=6, padding=3), (2, 6, 10), (6, 1, 4), ("conv", 6, 26, 4, 1)),
        (lambda x, w: F.conv2d(x, w, stride=2), (1, 4, 9, 9), (7, 4, 3, 3), ("conv", 1, 16, 36, 7)),
        (lambda x, w: F.conv_transpose1d(x, w), (2, 4, 5), (4, 3, 2), ("conv", 1, 10, 4, 6)),
    ],
)
def test_each_spelling_of_a_product_is_one_gemm(function, x_shape, weight, expected):
    assert gemms(function, x_shape, weight) == [expected]


def test_an_outer_product_is_no_gemm():
    assert gemms(lambda x: x[:, :, None] @ x[:, None, :], (2, 8)) == []


def test_written_out_attention_is_named_by_its_place():
    def attend(x):
        return (x @ x.transpose(1, 2) * 0.1).softmax(-1) @ x

    assert gemms(attend, (3, 6, 8)) == [("attention_qk", 3, 6, 8, 6), ("attention_pv", 3, 6, 6, 8)]


def test_a_second_rule_for_an_op_is_refused():
    with pytest.raises(ValueError, match=r"a cost rule for aten\.mm\.default exists already: mm"):
        rule("aten.mm.default")(lambda call: iter(()))


def test_no_op_has_both_a_rule_and_a_kind():
    assert not {name.split(".")[1] for name in RULES} & set(KINDS)


def test_kinds_come_from_the_table_the_view_flag_and_the_pointwise_tag():
    aten = torch.ops.aten
    kinds = [op_kind(f) for f in (aten.view.default, aten.add_.Tensor, aten.topk.default, aten._fft_r2c.default)]

    assert kinds == ["layout", "elementwise", "topk", "unclassified"]


def of(module, *inputs, phase="prefill"):
    """The record of a module of torch's own, its parameters where its inputs are."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = module, nn.Parameter(torch.ones(1))

        def forward(self, *given):
            scaled = [x * self.scale if x.is_floating_point() else x for x in given]
            return self.inner(*scaled)

    return observe(Holder().to("meta"), IDENTITY, RunShape(phase=phase), inputs={POSITIONAL: inputs})


IMAGES, STEPS, ROWS = torch.zeros(2, 4, 8, 8), torch.zeros(5, 2, 8), torch.zeros(2, 4)
IDS = torch.zeros((2, 3), dtype=torch.int64)
COMMON = [
    *((layer, (STEPS,)) for layer in (nn.LSTM(8, 8, 2), nn.GRU(8, 8, batch_first=True), nn.RNN(8, 8))),
    *((layer, (STEPS[0],)) for layer in (nn.LSTMCell(8, 8), nn.GRUCell(8, 8), nn.RNNCell(8, 8))),
    (nn.TransformerDecoderLayer(8, 2, 16), (STEPS, STEPS)),
    (nn.MultiheadAttention(8, 2), (STEPS, STEPS, STEPS)),
    (nn.Bilinear(4, 4, 6), (ROWS, ROWS)),
    (nn.EmbeddingBag(10, 4), (IDS,)),
    *((nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode), (IMAGES,)) for mode in ("reflect", "replicate", "circular")),
    *((nn.Upsample(scale_factor=2, mode=mode), (IMAGES,)) for mode in ("nearest", "nearest-exact", "bilinear")),
    (nn.Upsample(scale_factor=2, mode="trilinear"), (torch.zeros(2, 4, 4, 4, 4),)),
    *((layer, (IMAGES,)) for layer in (nn.ConvTranspose2d(4, 4, 2), nn.BatchNorm2d(4), nn.PixelShuffle(2))),
    *((layer, (IMAGES,)) for layer in (nn.AdaptiveMaxPool2d(3), nn.LPPool2d(2, 2), nn.RReLU(), nn.Hardshrink())),
    *((layer, (torch.zeros(2, 4, 4, 4, 4),)) for layer in (nn.AdaptiveAvgPool3d(2), nn.AdaptiveMaxPool3d(2))),
    *((layer, (ROWS, ROWS)) for layer in (nn.HuberLoss(), nn.SmoothL1Loss(), nn.CosineSimilarity())),
    (nn.CosineEmbeddingLoss(), (ROWS, ROWS, torch.ones(2))),
]


@pytest.mark.parametrize("phase", ["prefill", "train"])
@pytest.mark.parametrize(("layer", "inputs"), COMMON, ids=lambda value: type(value).__name__)
def test_every_op_of_common_layers_is_known(layer, inputs, phase):
    assert of(layer, *inputs, phase=phase).unclassified == ()


def test_a_bilinear_is_the_outer_product_of_its_inputs_times_its_weight():
    trace = of(nn.Bilinear(4, 5, 6), torch.zeros(3, 4), torch.zeros(3, 5), phase="train")
    found = [(g.kind, g.direction, g.flops) for op, _ in trace.walk() for g in op.gemms]

    assert found[0] == ("linear", "forward", 2 * 3 * 4 * 5 * 6)
    assert sorted(found[1:]) == [("linear", "dw", 720), ("linear", "dx", 720), ("linear", "dx", 720)]
