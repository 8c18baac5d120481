"""Networks around a mixer: encoder, blocks, decoder."""

from dlrnn.models.config import MIXERS, ModelConfig
from dlrnn.models.language import LanguageConfig, LanguageModel, generate, next_token_loss
from dlrnn.models.model import PairModel, SequenceModel, build_model

__all__ = [
    "MIXERS",
    "LanguageConfig",
    "LanguageModel",
    "ModelConfig",
    "PairModel",
    "SequenceModel",
    "build_model",
    "generate",
    "next_token_loss",
]
