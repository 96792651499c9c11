"""Ops known to hold no matrix product, and what they are. An op that is neither here, nor pointwise, nor a view, nor in
rules.py is unclassified and reported: silence about an op would be a claim that it costs nothing."""

from __future__ import annotations

from functools import cache

import torch

from introspect.hooks.collectives import KINDS as COLLECTIVES
from introspect.hooks.collectives import WAITS

KINDS: dict[str, str] = {}


def _declare(kind: str, names: str) -> None:
    for name in names.split():
        if name in KINDS:
            raise ValueError(f"{name} is declared twice: {KINDS[name]} and {kind}")
        KINDS[name] = kind


# Names are those of the op's packet (aten.<name>), whatever the overload; in-place forms lose their underscore.
_declare("layout", "_unsafe_view _reshape_alias detach alias lift lift_fresh lift_fresh_copy view_as_real "
         "view_as_complex resize set_ conj sym_size sym_stride is_same_size resolve_conj resolve_neg "
         "record_stream unsafe_split unsafe_split_with_sizes unsafe_chunk transpose t squeeze unsqueeze as_strided "
         "swapaxes swapdims")  # fmt: skip
_declare("copy", "clone copy cat stack roll flip constant_pad_nd pad reflection_pad1d replication_pad1d repeat "
         "repeat_interleave fill zero _copy_from tril triu slice_scatter select_scatter slice_backward select_backward "
         "diag_embed expand_copy view_copy im2col col2im unfold_backward as_strided_scatter channel_shuffle "
         "pixel_shuffle pixel_unshuffle native_channel_shuffle split_with_sizes_copy constant_pad_nd_backward "
         "_unsafe_masked_index diagonal_scatter contiguous reflection_pad2d reflection_pad3d replication_pad2d "
         "replication_pad3d rot90 diagonal_copy")  # fmt: skip
_declare("lookup", "embedding embedding_renorm _embedding_bag")
_declare("gather", "gather index index_select masked_select take take_along_dim nonzero nonzero_static argwhere "
         "embedding_dense_backward _embedding_bag_backward _embedding_bag_dense_backward _unsafe_index")  # fmt: skip
_declare("scatter", "scatter scatter_add scatter_reduce index_put _index_put_impl index_add index_copy index_fill "
         "masked_scatter put _unsafe_index_put index_reduce scatter_src_dim")  # fmt: skip
_declare("reduction", "sum mean amax amin max min argmax argmin any all prod var var_mean std std_mean norm "
         "linalg_vector_norm logsumexp count_nonzero median nansum aminmax equal _cdist_forward _pdist_forward "
         "trace histc bincount mode kthvalue dist _foreach_norm")  # fmt: skip
_declare("cumulative", "cumsum cumprod cummax cummin logcumsumexp _cummax_helper _cummin_helper diff")
_declare("softmax", "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax "
         "_masked_softmax")  # fmt: skip
_declare("topk", "topk")
_declare("sort", "sort argsort searchsorted bucketize _unique2 unique_consecutive unique_dim msort")
_declare("norm", "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit "
         "_native_batch_norm_legit_no_training _fused_rms_norm native_layer_norm_backward native_group_norm_backward "
         "native_batch_norm_backward _fused_rms_norm_backward _batch_norm_impl_index cudnn_batch_norm "
         "batch_norm_elemt _batch_norm_with_update _batch_norm_no_update batch_norm_backward")  # fmt: skip
_declare("activation", "gelu silu relu tanh sigmoid hardtanh leaky_relu elu softplus mish hardswish hardsigmoid relu6 "
         "glu prelu _prelu_kernel gelu_backward silu_backward threshold_backward tanh_backward sigmoid_backward "
         "softplus_backward elu_backward leaky_relu_backward hardtanh_backward glu_backward mish_backward log_sigmoid "
         "log_sigmoid_forward log_sigmoid_backward celu selu threshold hardswish_backward rrelu_with_noise "
         "hardshrink softshrink")  # fmt: skip
_declare("random", "bernoulli native_dropout native_dropout_backward rand rand_like randn randn_like randint "
         "randint_like randperm uniform normal exponential multinomial random cauchy geometric")  # fmt: skip
_declare("factory", "arange linspace zeros zeros_like ones ones_like full full_like empty empty_like empty_strided "
         "new_empty new_empty_strided new_zeros new_ones new_full scalar_tensor eye tril_indices triu_indices one_hot "
         "empty_permuted logspace hann_window _efficientzerotensor")  # fmt: skip
_declare(
    "scalar", "_local_scalar_dense item is_nonzero _is_all_true _assert_async _assert_scalar _assert_tensor_metadata"
)
_declare("loss", "nll_loss_forward nll_loss_backward nll_loss nll_loss2d_forward mse_loss mse_loss_backward "
         "binary_cross_entropy binary_cross_entropy_with_logits smooth_l1_loss huber_loss soft_margin_loss "
         "multi_margin_loss multilabel_margin_loss_forward _ctc_loss")  # fmt: skip
_declare("pooling", "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d avg_pool1d "
         "max_pool2d_with_indices_backward avg_pool2d_backward _adaptive_avg_pool2d_backward avg_pool3d "
         "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_bicubic2d_aa upsample_nearest1d "
         "upsample_linear1d max_pool3d_with_indices grid_sampler_2d _upsample_bilinear2d_aa upsample_nearest3d "
         "adaptive_avg_pool2d adaptive_max_pool3d _adaptive_avg_pool3d fractional_max_pool2d fractional_max_pool3d "
         "max_unpool2d max_unpool3d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
         "_upsample_nearest_exact3d grid_sampler_3d")  # fmt: skip
_declare("elementwise", "complex polar where __or__ __and__ __xor__ __ior__ __iand__ floor_divide masked_fill "
         "_weight_norm_interface linalg_cross")  # fmt: skip

_CASTS = ("_to_copy", "to")
_POINTWISE = torch.Tag.pointwise


@cache
def op_name(func: torch._ops.OpOverload) -> str:
    """The name, as aten.mm.default; kept, since torch puts the name together anew each time."""
    return str(func)


def _of_forward(packet: str) -> str | None:
    """The kind of a gradient: its forward op's, since what multiplies no matrices has a gradient that does not."""
    forward = packet.removesuffix("_backward")
    return None if forward == packet else KINDS.get(forward) or KINDS.get(f"{forward}_forward")


@cache
def op_kind(func: torch._ops.OpOverload) -> str:
    """The kind of an op without products; "unclassified" when nothing is known about it."""
    name = func._schema.name
    namespace, _, packet = name.partition("::")
    if namespace in ("c10d", "_c10d_functional"):
        return "collective" if packet in COLLECTIVES or packet in WAITS else "unclassified"
    if namespace == "aten":
        if packet in _CASTS:
            return "cast"
        known = KINDS.get(packet) or KINDS.get(packet.rstrip("_")) or _of_forward(packet)
        if known:
            return known
        if func.is_view:
            return "layout"
        if _POINTWISE in func.tags:
            return "elementwise"
    if namespace == "prim":
        return "layout"
    return "unclassified"
