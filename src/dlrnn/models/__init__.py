"""Networks around a mixer: encoder, blocks, decoder."""

from dlrnn.models.config import MIXERS, ModelConfig
from dlrnn.models.language import (
    LanguageConfig,
    LanguageModel,
    causal,
    generate,
    next_token_loss,
)
from dlrnn.models.model import PairModel, SequenceModel, build_model
from dlrnn.models.pretrained import from_pretrained, push_to_hub, save_pretrained

__all__ = [
    "MIXERS",
    "LanguageConfig",
    "LanguageModel",
    "ModelConfig",
    "PairModel",
    "SequenceModel",
    "build_model",
    "causal",
    "from_pretrained",
    "generate",
    "next_token_loss",
    "push_to_hub",
    "save_pretrained",
]
