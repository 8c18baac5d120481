"""Networks around a mixer: encoder, blocks, decoder."""

from dlrnn.models.config import MIXERS, ModelConfig
from dlrnn.models.model import PairModel, SequenceModel, build_model

__all__ = ["MIXERS", "ModelConfig", "PairModel", "SequenceModel", "build_model"]
