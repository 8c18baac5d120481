"""`dlrnn generate`: a run's best language model writes, token by token.

Experts that were chosen over whole sequences in training are chosen by their thresholds here: who
writes cannot look ahead (docs/language.md).
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
from dlrnn.train import RunFolder, load_best


def write(
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
    """The text after a prompt, as it comes: at most so many tokens, or up to the end token.

    What cannot be is refused at once, not when the first piece is asked for.
    """
    from tokenizers.decoders import DecodeStream

    config = RunFolder.open(run).config
    if not isinstance(config.model, LanguageConfig):
        raise ValueError(f"{run} is no language model: it was trained on {config.task.name}")
    path = Path(run) / TOKENIZER
    if not path.is_file():
        raise ValueError(f"{run} has no {TOKENIZER}: its text cannot be read")
    tokenizer = make_tokenizer(read_bytes(path, LARGEST_FILE), path)
    model = load_best(run, torch.device(device)).model
    with tokenizer_errors(path):
        read = tokenizer.encode(prompt, add_special_tokens=False).ids
    if not read:
        raise ValueError("the prompt is empty: give at least one word")
    known = config.model.vocabulary
    if vocabulary_of(tokenizer) > known:
        raise ValueError(f"{path} has more tokens than the {known} of the model")
    assert isinstance(model, LanguageModel)
    limits: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    limits["vocabulary"] = vocabulary_of(tokenizer)
    words = torch.tensor(read, device=device)
    drawn = generate(causal(model), words, tokens, **limits, seed=seed)
    end, stream = end_token(tokenizer, path), DecodeStream(ids=read, skip_special_tokens=True)

    def pieces() -> Iterator[str]:
        for token in drawn:
            if token == end:
                return
            with tokenizer_errors(path):
                piece = stream.step(tokenizer, token)
            yield piece or ""

    return pieces()
