from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ringserve.services.gateway.text import TextCodec
from ringserve.workers.model.builtin import write_tokenizer


@pytest.fixture(scope="session")
def byte_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Return the tokenizer of `builtin:tiny`: token i < 256 is the byte i."""
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return TextCodec(directory)


@pytest.fixture(scope="session")
def fallback_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Return a tokenizer like SentencePiece's: a few pieces, and `<0xNN>` tokens for the bytes of everything else."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcé"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    directory = tmp_path_factory.mktemp("fallback")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return TextCodec(directory)
