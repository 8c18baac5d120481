"""Networks around a mixer: encoder, blocks, decoder."""

from dlrnn.models.config import MIXERS, ModelConfig
from dlrnn.models.language import LanguageConfig, LanguageModel, causal, generate
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
    "push_to_hub",
    "save_pretrained",
]
