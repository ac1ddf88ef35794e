"""Model with a script: it calls a tool of its client, then tells what it did, whatever the prompt says.

Coding agents send 10,000 to 40,000 tokens of rules and tools and go on until the model answers well, which no model
does that this machine computes in seconds. Here the chat template picks a line of the script by the last message, and
the weights say the line: each of its tokens has one successor, the last of them the end of the turn. Text, tool calls,
streams and errors are the service's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from ringserve.workers.model.builtin import Weights, write_llama

MAX_POSITIONS = 131072
VOCABULARY = 4096
END = "<|im_end|>"
BEGIN = "<|im_start|>"
DONE = "The copy is made."
"""Answer to a tool's result, and to a request that offers none of the tools."""
COPY = "cp note.txt copy.txt"
CALLS: Mapping[str, Mapping[str, object]] = {
    "exec_command": {"cmd": COPY},
    "shell_command": {"command": COPY},
    "shell": {"command": ["cp", "note.txt", "copy.txt"]},
    "Bash": {"command": COPY, "description": "Copy the note"},
    "bash": {"command": COPY, "description": "Copy the note"},
}
"""Arguments of a call by the name of the tool: `exec_command` is Codex's, `Bash` Claude Code's and Continue's."""
HIDDEN = 64


def write_scripted_model(directory: Path, texts: Iterable[str]) -> None:
    """Write a model directory. The tokenizer's merges are trained on texts."""
    lines = [DONE, *(_call(name) for name in CALLS)]
    cues = [f"<|line {place}|>" for place in range(len(lines))]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    # Bytes and END are taken first, so that any text can be encoded.
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, show_progress=False, special_tokens=[END, BEGIN], initial_alphabet=ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A line is one token of its own, so that each token has one successor; the cue before it is shown to nobody.
    tokenizer.add_tokens([AddedToken(line, normalized=False) for line in lines])
    tokenizer.add_special_tokens([AddedToken(cue, normalized=False, special=True) for cue in cues])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "bos_token": BEGIN,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": _template(cues),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    ids = tokenizer.get_vocab()
    successors = {ids[cue]: ids[line] for cue, line in zip(cues, lines, strict=True)}
    successors |= {ids[line]: ids[END] for line in lines}
    size = tokenizer.get_vocab_size()
    shape = {
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // 2,
        "max_position_embeddings": MAX_POSITIONS,
        "vocab_size": size,
        "bos_token_id": ids[BEGIN],
        "eos_token_id": ids[END],
    }
    write_llama(directory, _weights(size, successors), shape)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids[END]]}))


def _call(name: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': CALLS[name]})}\n</tool_call>"


def _template(cues: list[str]) -> str:
    """Return a chat template that takes tools and ends with the cue of the line to say."""
    picks = "".join(
        f"{{% if tool.function.name == {name!r} %}}{{% set pick.cue = {cue!r} %}}{{% endif %}}"
        for name, cue in zip(CALLS, cues[1:], strict=True)
    )
    return (
        "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
        "{% for call in message.tool_calls or [] %}<tool_call>\n"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
        "{% endfor %}<|im_end|>\n{% endfor %}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% set pick = namespace(cue={cues[0]!r}) %}}"
        f"{{% if messages[-1].role != 'tool' %}}{{% for tool in tools or [] %}}{picks}{{% endfor %}}{{% endif %}}"
        "{{ pick.cue }}{% endif %}"
    )


def _weights(size: int, successors: Mapping[int, int]) -> dict[str, Weights]:
    """Return weights whose layers add nothing: hidden dimension i belongs to the i-th of the successors' tokens."""
    embedding, logits = np.zeros((size, HIDDEN), np.float32), np.zeros((size, HIDDEN), np.float32)
    embedding[:, 0] = 1.0
    for place, (token, successor) in enumerate(successors.items(), start=1):
        embedding[token] = 0.0
        embedding[token, place] = 1.0
        logits[successor, place] = 8.0
    # A token outside the script ends the turn.
    logits[list(successors.values())[-1], 0] = 8.0
    zero, name = np.zeros((HIDDEN, HIDDEN), np.float32), "model.layers.0"
    matrices = [f"self_attn.{each}_proj" for each in "qkvo"] + [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
    ones = ("model.norm", f"{name}.input_layernorm", f"{name}.post_attention_layernorm")
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": logits,
        **{f"{name}.{matrix}.weight": zero.copy() for matrix in matrices},
        **{f"{each}.weight": np.ones(HIDDEN, np.float32) for each in ones},
    }
