from __future__ import annotations

import torch
from torch import nn

from introspect.hooks.byte_patches import assumed_patches
from introspect.hooks.shadow import Shadow


class Patcher(nn.Module):
    """Starts a patch wherever the entropy passes the threshold, as BLT's does."""

    @staticmethod
    def patch_lengths_from_entropies(entropies, sequence_length, patch_size=None, threshold=None):
        return entropies > threshold

    def forward(self, entropies):
        return self.patch_lengths_from_entropies(entropies=entropies, sequence_length=8, patch_size=4, threshold=1.5)


def test_unknown_entropies_start_a_patch_at_every_patch_size_and_say_so():
    shadow, model = Shadow(), Patcher()

    with assumed_patches(model, shadow):
        entropies = torch.empty((2, 8), device="meta")
        model(entropies)
        value = shadow.value(entropies)

    assert (value > 1.5).tolist() == [[True, False, False, False] * 2] * 2
    assert [(d.question, d.answer, d.answered) for d in shadow.decisions] == [
        ("patch boundaries", "one every 4 bytes", "assumed")
    ]
    assert "patch_lengths_from_entropies" not in vars(model)


def test_real_entropies_are_taken_as_they_are():
    shadow, model = Shadow(), Patcher()

    with assumed_patches(model, shadow):
        starts = model(torch.tensor([[1.0, 2.0, 1.0, 1.0]]))

    assert starts.tolist() == [[False, True, False, False]]
    assert shadow.decisions == []
