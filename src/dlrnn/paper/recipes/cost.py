"""Estimated minutes of a run on one H200.

The rates are fitted to measured training steps on such a machine with our own kernels, captured as
a graph, in fp32 (the language model: bf16). Evaluation, compilation and S4's kernel (a guess) are
not fitted.
"""

from dlrnn.models import LanguageConfig
from dlrnn.train import RunConfig

STEP_MS = 0.25
"""Milliseconds of a step that do not depend on its size: encoder, decoder, AdamW."""

ELEMENT_MS = 0.035e-6
"""Milliseconds of each input element, B L H, in a layer: all but the kernel."""

ATTENTION_ELEMENT_MS = 0.24e-6
"""Milliseconds of each input element in a layer with attention's four projections, in fp32."""

KERNEL_MS = {"dlr": 0.125e-9, "dss": 0.43e-9, "s4d": 0.43e-9, "s4": 8e-9}
"""Milliseconds of each entry of the Vandermonde product, H N K."""

PAIR_MS = 0.73e-9
"""Milliseconds of each pair of positions that attention compares, times B H."""

GLU = 1.7
"""The factor of a layer with GLU, whose linear map has twice the width. A guess."""

FEED_FORWARD = 5
"""The factor of two feed-forward layers of width 16 H."""

LANGUAGE_ELEMENT_MS = 0.2e-6
"""Milliseconds of each element in a block of the language model, without its matrix products."""

LANGUAGE_OPERATIONS_MS = 4e11
"""Operations of the language model's matrix products in a millisecond, in bf16."""


def minutes(config: RunConfig) -> float:
    """Expected minutes of all steps."""
    if isinstance(config.model, LanguageConfig):
        return _language_minutes(config, config.model)
    model, options = config.model, config.model.mixer_options
    length = config.make_task().input_length
    elements = config.batch_size * length * model.d_model
    attends = "attention" in model.mixer
    layer = (ATTENTION_ELEMENT_MS if attends else ELEMENT_MS) * elements
    layer *= FEED_FORWARD if model.mixer == "attention-ff" else 1
    layer *= GLU if options.get("glu") else 1
    if attends:
        seen = length if options.get("bidirectional") else length / 2
        if "chunk" in options:
            seen = min(seen, options["chunk"] * (3 if options.get("bidirectional") else 1.5))
        layer += PAIR_MS * elements * seen
    elif model.mixer in KERNEL_MS:
        kernels = model.d_model * (2 if options.get("bidirectional") else 1)
        taps = min(length, options.get("kernel_length") or length)
        layer += KERNEL_MS[model.mixer] * kernels * options.get("d_state", 64) * taps
    return config.steps * (STEP_MS + model.layers * layer) / 60_000


def _language_minutes(config: RunConfig, model: LanguageConfig) -> float:
    """The experts share the tokens, so that their work does not depend on their number."""
    length = config.make_task().input_length
    tokens = config.batch_size * length
    layer = LANGUAGE_ELEMENT_MS * tokens * model.d_model
    if model.mixer == "attention":
        layer += 0.045 * PAIR_MS * tokens * model.heads * model.d_head * length / 2  # in bf16
        layer += LANGUAGE_ELEMENT_MS * tokens * model.heads * model.d_head / 2
    else:
        layer += KERNEL_MS["dlr"] * model.d_model * model.d_state * length
    weights = model.layers * 2 * model.d_model * model.d_ff + model.vocabulary * model.d_embedding
    products = 6 * tokens * weights / LANGUAGE_OPERATIONS_MS
    return config.steps * (STEP_MS + model.layers * layer + products) / 60_000
