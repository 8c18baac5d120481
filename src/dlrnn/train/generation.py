"""Generate text from the best model of a trained run, token by token.

Generation cannot look ahead, so experts are chosen by their thresholds here, also if training chose
them over whole sequences (docs/language.md).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dlrnn.common.untrusted import read_bytes
from dlrnn.models import LanguageConfig, LanguageModel, causal, generate
from dlrnn.models.pretrained import LARGEST_FILE
from dlrnn.tasks.pg19 import end_token, make_tokenizer, tokenizer_errors, vocabulary_of
from dlrnn.tasks.storage.shards import TOKENIZER
from dlrnn.train.model import load_best
from dlrnn.train.run_directory import RunDirectory


def generate_text(
    run: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> Iterator[str]:
    """Pieces of the text after a prompt: at most `tokens` of them, or up to the end token.

    Wrong arguments raise in this call, not when the first piece is read.
    """
    from tokenizers.decoders import DecodeStream

    config = RunDirectory.open(run).config
    if not isinstance(config.model, LanguageConfig):
        raise ValueError(f"{run} is not a language model: it was trained on {config.task.name}")
    path = Path(run) / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{run} has no {TOKENIZER}: its text cannot be read")
    tokenizer = make_tokenizer(read_bytes(path, LARGEST_FILE), path)
    model = load_best(run, torch.device(device)).model
    with tokenizer_errors(path):
        prompt_tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not prompt_tokens:
        raise ValueError("the prompt is empty: give at least one word")
    known = config.model.vocabulary
    if vocabulary_of(tokenizer) > known:
        raise ValueError(f"{path} has more tokens than the {known} of the model")
    assert isinstance(model, LanguageModel)
    limits: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    limits["vocabulary"] = vocabulary_of(tokenizer)
    start = torch.tensor(prompt_tokens, device=device)
    generated = generate(causal(model), start, tokens, **limits, seed=seed)
    end, stream = (
        end_token(tokenizer, path),
        DecodeStream(ids=prompt_tokens, skip_special_tokens=True),
    )

    def pieces() -> Iterator[str]:
        for token in generated:
            if token == end:
                return
            with tokenizer_errors(path):
                piece = stream.step(tokenizer, token)
            yield piece or ""

    return pieces()
