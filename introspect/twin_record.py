"""What running a model's small twin for real showed: does the meta run do the same? Readable without torch."""

from __future__ import annotations

from dataclasses import dataclass

from introspect.records import Phase

OUTPUT_TOLERANCE = 1e-4  # of the largest output; fp32 sums in another order differ by about 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinAgreement:
    """Calls of one kind in one step: how many both runs made with the same sizes, how many only one of them made.

    `tokens`: new ones a sequence. `kind`: a product's kind (linear, grouped, attention_qk, conv, scan, ...),
    "attention" (shapes, heads, visible pairs, window), "experts" (experts, top-k, tokens, rows) or "cache" (class and
    shape of each tensor, before and after).
    """

    phase: Phase
    tokens: int
    kind: str
    both: int
    meta_only: int
    cpu_only: int

    @property
    def agrees(self) -> bool:
        """Whether neither run made a call that the other did not."""
        return self.meta_only == self.cpu_only == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinReport:
    """A twin of `parameters` random fp32 weights, run on meta and for real on the CPU.

    `changed`: the config fields that make the twin: (field, value of the model, value of the twin).
    `differences`: one line for each call that only one run made.
    `output_error`: largest difference between the logits under our kernels and under the library's own, relative to the
    largest logit; None when the library's own run has no finite logit to compare with.
    """

    class_name: str
    parameters: int
    changed: tuple[tuple[str, str, str], ...]
    agreements: tuple[TwinAgreement, ...]
    differences: tuple[str, ...]
    output_error: float | None

    @property
    def same_calls(self) -> bool:
        """Whether meta and CPU made the same calls in every step."""
        return all(agreement.agrees for agreement in self.agreements)

    @property
    def verified(self) -> bool:
        """Whether the calls are the same and our kernels compute what the library's do."""
        return self.same_calls and self.output_error is not None and self.output_error <= OUTPUT_TOLERANCE
