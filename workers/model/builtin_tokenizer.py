"""The byte-level tokenizer of `builtin:tiny`: token id i < 256 is the byte i, and five special tokens follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

NUM_BYTES: Final = 256
SPECIAL_TOKENS: Final = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>")
BOS_TOKEN_ID: Final = NUM_BYTES
EOS_TOKEN_ID: Final = NUM_BYTES + 1
END_TOKEN_ID: Final = NUM_BYTES + 4
VOCAB_SIZE: Final = NUM_BYTES + len(SPECIAL_TOKENS)

# A conversation's rendering must extend the rendering of its beginning, or no turn could reuse the KV of the last.
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{% if message['role'] == 'system' %}System: {% endif %}{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for `AutoTokenizer`. No token is ever added to a text."""
    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "additional_special_tokens": list(SPECIAL_TOKENS[2:]),
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself where printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(NUM_BYTES)]
