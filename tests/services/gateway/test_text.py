"""Text that grows by whole characters up to that of all tokens, and ends where a stop string is complete."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ringserve.cp_core.errors import InvalidRequest, ModelRefused
from ringserve.services.gateway.text import REPLACEMENT, AnswerText, IncrementalText, StopRule, TextCodec
from ringserve.workers.model.builtin import BOS_TOKEN_ID, END_TOKEN_ID, EOS_TOKEN_ID, VOCAB_SIZE, write_tokenizer
from ringserve.workers.model.tokenizer import plain_backend
from tests.waiting import WAIT_SECONDS
from tests.workers.models import save_model

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(lambda text: "<|" not in text)
"""Any Unicode text, characters of one to four bytes; but no special token spelt out, which is that token."""


@st.composite
def splits(draw: st.DrawFn, length: int) -> list[slice]:
    """Cut `length` tokens anywhere, with empty parts too."""
    cuts = sorted(draw(st.lists(st.integers(0, length), max_size=2 * length)))
    bounds = [0, *cuts, length]
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def read(codec: TextCodec, ids: Sequence[int], parts: Sequence[slice]) -> tuple[list[str], str, IncrementalText]:
    """Push tokens; return the text of each push, that of finishing, and the whole."""
    text = IncrementalText(codec)
    pushed = [text.push(ids[part]) for part in parts]
    return pushed, text.finish(), text


@pytest.fixture(scope="module")
def llama_codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    """Return a tokenizer like Llama 2's: BOS comes first, and words begin with a space, except a text's first."""
    vocab = {"<s>": 0, "</s>": 1, "▁the": 2, "▁capital": 3, "▁is": 4, "▁paris": 5, "!": 6}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    directory = tmp_path_factory.mktemp("llama")
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return TextCodec(directory)


def test_an_answer_keeps_the_space_between_it_and_its_prompt(llama_codec: TextCodec) -> None:
    prompt = llama_codec.encode("the capital is").tolist()
    assert prompt == [0, 2, 3, 4]
    text = IncrementalText(llama_codec, prompt=prompt)
    assert [text.push([5]), text.push([6]), text.finish()] == [" paris", "!", ""]
    assert llama_codec.decode(prompt) + text.text == llama_codec.decode([*prompt, 5, 6])
    assert IncrementalText(llama_codec).push([5]) == "paris", "an answer to nothing begins the text"


def test_the_codec_knows_what_it_puts_before_a_text(llama_codec: TextCodec, byte_codec: TextCodec) -> None:
    assert (llama_codec.num_special, byte_codec.num_special) == (1, 0)


def test_a_prompt_that_ends_inside_a_character_gives_no_context(byte_codec: TextCodec) -> None:
    prompt = [*b"ab", *"€".encode()[:2]]
    text = IncrementalText(byte_codec, prompt=prompt)
    assert text.push([*b"x"]) == "x"


@given(texts, texts)
def test_a_prompt_changes_no_text_of_whole_characters(byte_codec: TextCodec, prompt: str, answer: str) -> None:
    text = IncrementalText(byte_codec, prompt=list(prompt.encode()))
    pushed = [text.push([byte]) for byte in answer.encode()]
    assert "".join(pushed) + text.finish() == answer


# --- growing ---------------------------------------------------------------------------------------------------------


@given(texts, st.data())
def test_a_text_cut_anywhere_grows_by_whole_characters(byte_codec: TextCodec, text: str, data: st.DataObject) -> None:
    raw = text.encode()
    parts = data.draw(splits(len(raw)))
    pushed, rest, whole = read(byte_codec, list(raw), parts)
    assert "".join(pushed) + rest == text == whole.text
    done = 0
    for part, new in zip(parts, pushed, strict=True):
        done += len(new.encode())
        complete = raw[: part.stop].decode(errors="ignore")
        assert raw[:done].decode() == text[: len(raw[:done].decode())], "never half a character"
        if not complete.endswith(REPLACEMENT):
            assert done == len(complete.encode()), "a whole character does not wait"


@given(st.binary(max_size=80) | st.binary(max_size=4).map(lambda raw: 60 * raw), st.data())
def test_bytes_that_are_no_text_end_as_the_replacements_of_a_whole_decode(
    byte_codec: TextCodec, raw: bytes, data: st.DataObject
) -> None:
    pushed, rest, whole = read(byte_codec, list(raw), data.draw(splits(len(raw))))
    assert "".join(pushed) + rest == whole.text == raw.decode(errors="replace")


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=80), st.data())
def test_any_tokens_in_any_parts_give_the_text_of_all_of_them(
    byte_codec: TextCodec, ids: list[int], data: st.DataObject
) -> None:
    pushed, rest, whole = read(byte_codec, ids, data.draw(splits(len(ids))))
    assert "".join(pushed) + rest == whole.text == byte_codec.decode(ids)


def test_half_a_character_waits_for_its_other_half(byte_codec: TextCodec) -> None:
    text = IncrementalText(byte_codec)
    smile = "😀".encode()
    assert [text.push([byte]) for byte in smile] == ["", "", "", "😀"]
    assert text.push(smile[:2]) == ""
    assert text.finish() == REPLACEMENT
    assert text.finish() == ""
    assert text.text == "😀" + REPLACEMENT


def test_special_tokens_have_no_text_even_inside_a_character(byte_codec: TextCodec) -> None:
    text = IncrementalText(byte_codec)
    first, second = "é".encode()
    assert text.push([BOS_TOKEN_ID]) == ""
    assert text.push([first, END_TOKEN_ID]) == ""
    assert text.push([second, EOS_TOKEN_ID]) == "é"
    assert text.finish() == ""


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked_and_not_its_fast_form(tmp_path: Path) -> None:
    class Loud(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **options: Any) -> str:
            return str(super()._decode(*arguments, **options)).upper()

    write_tokenizer(tmp_path)
    plain, loud = (kind.from_pretrained(str(tmp_path)) for kind in (PreTrainedTokenizerFast, Loud))
    codec, ids = TextCodec(tmp_path), list(b"ring")
    assert plain_backend(plain) is not None
    assert plain_backend(loud) is None
    assert codec.decode(ids) == plain.decode(ids) == "ring"
    codec._tokenizer, codec._backend = loud, plain_backend(loud)
    assert codec.decode(ids) == "RING"


def test_a_long_answer_decodes_a_few_tokens_at_a_time(byte_codec: TextCodec) -> None:
    decoded: list[int] = []

    class Counting(TextCodec):
        def __init__(self) -> None:
            pass

        def decode(self, token_ids: Sequence[int]) -> str:
            decoded.append(len(token_ids))
            return byte_codec.decode(token_ids)

    text = IncrementalText(Counting())
    answer = ("naïve café 😀 " * 50).encode() + b"\x80" * 1000
    for byte in answer:
        text.push([byte])
    text.finish()
    assert text.text == answer.decode(errors="replace")
    assert max(decoded) < 100


def test_a_tokenizer_that_drops_the_first_space_loses_none_later(tmp_path: Path) -> None:
    """Use a tokenizer like SentencePiece: the same token has another text at the beginning."""
    words = ["▁a", "▁b", "c", "▁"]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": true}'
    )
    codec = TextCodec(tmp_path)
    ids = [0, 1, 2, 0, 3, 1, 0, 2, 2, 1, 1, 0, 1, 2, 0, 1]
    text = IncrementalText(codec)
    pieces = [text.push([number]) for number in ids]
    assert "".join(pieces) == codec.decode(ids)
    assert pieces[:3] == ["a", " b", "c"]


@given(st.text("abcé 😀€\n", max_size=40) | texts)
def test_a_tokenizer_that_falls_back_to_bytes_shows_whole_characters_too(fallback_codec: TextCodec, text: str) -> None:
    ids = fallback_codec.encode(text).tolist()
    pushed, rest, whole = read(fallback_codec, ids, [slice(place, place + 1) for place in range(len(ids))])
    assert "".join(pushed) + rest == whole.text == fallback_codec.decode(ids)
    if REPLACEMENT not in text:
        assert REPLACEMENT not in whole.text
        assert rest == "", "every character was complete"


def test_spaces_before_punctuation_stay_as_they_were_sent(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"clean_up_tokenization_spaces": True}))
    said = "it is n't , or is it ? yes ."
    pushed, _, whole = read(TextCodec(tmp_path), list(said.encode()), [slice(n, n + 1) for n in range(len(said))])
    assert "".join(pushed) == whole.text == said


# --- the codec -------------------------------------------------------------------------------------------------------


@given(texts)
def test_a_text_is_its_bytes(byte_codec: TextCodec, text: str) -> None:
    ids = byte_codec.encode(text)
    assert ids.tolist() == list(text.encode())
    assert byte_codec.decode(ids.tolist()) == text


def test_threads_may_encode_at_the_same_time(byte_codec: TextCodec) -> None:
    prompts = [chr(97 + number) * 2000 for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        encoded = list(pool.map(byte_codec.encode, prompts))
    assert [bytes(ids.tolist()).decode() for ids in encoded] == prompts


def test_a_chat_is_rendered_ready_for_the_answer(byte_codec: TextCodec) -> None:
    ids = byte_codec.encode_chat([("user", "hi"), ("assistant", "yo"), ("user", "!")]).tolist()
    user, assistant = VOCAB_SIZE - 3, VOCAB_SIZE - 2
    assert ids == [user, *b"hi", END_TOKEN_ID, assistant, *b"yo", END_TOKEN_ID, user, *b"!", END_TOKEN_ID, assistant]


def with_template(tmp_path: Path, template: str) -> TextCodec:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = '{"tokenizer_class": "PreTrainedTokenizerFast"' + (f', "chat_template": "{template}"' if template else "")
    (tmp_path / "tokenizer_config.json").write_text(config + "}")
    return TextCodec(tmp_path)


def test_a_model_without_a_chat_template_refuses_chats(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no chat template; send text or token ids"):
        with_template(tmp_path, "").encode_chat([("user", "a")])


def test_a_template_that_refuses_the_messages_is_quoted(tmp_path: Path) -> None:
    codec = with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="template refuses these messages: roles must alternate"):
        codec.encode_chat([("user", "a")])


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"the tokenizer of .* cannot be loaded"):
        TextCodec(tmp_path)


# --- loading ---------------------------------------------------------------------------------------------------------


def test_the_codec_of_a_llama_directory_needs_no_torch_and_is_that_of_auto_tokenizer(tmp_path: Path) -> None:
    """Load the codec in a new process: without torch it takes 250 MB and two seconds less."""
    from transformers import AutoTokenizer

    path = save_model("llama_gqa", tmp_path)
    write_tokenizer(path)
    code = (
        "import sys; from pathlib import Path; from ringserve.services.gateway.text import TextCodec; "
        "codec = TextCodec(Path(sys.argv[1])); "
        "print(codec.encode(sys.argv[2]).tolist(), codec.encode_chat([('user', sys.argv[2])]).tolist(), "
        "'torch' in sys.modules, 'ray' in sys.modules)"
    )
    text = "Hällo <|end|> ring"
    shown = subprocess.run(
        [sys.executable, "-c", code, str(path), text], capture_output=True, text=True, timeout=WAIT_SECONDS, check=True
    ).stdout
    auto = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    chat = auto.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False)
    assert shown.strip() == f"{auto(text)['input_ids']} {chat} False False"


# Few letters, of one to four bytes, so that stop strings are found, begun and broken off.
letters = st.text("ab€😀", max_size=24)
stop_strings = st.lists(st.text("ab€😀", min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Return (end, begin, which) of the first complete string, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return end, end - len(longest), longest
    return None


def read_answer(codec: TextCodec, raw: bytes, rule: StopRule) -> tuple[list[str], AnswerText, int]:
    """Push tokens; return the text of each push, the whole text, and the tokens that were read."""
    answer = AnswerText(IncrementalText(codec), rule)
    pushed = []
    for number, byte in enumerate(raw):
        pushed.append(answer.push(byte))
        if answer.matched is not None:
            return pushed, answer, number + 1
    return pushed, answer, len(raw)


@given(letters, stop_strings, st.booleans())
def test_the_text_ends_before_the_first_stop_string(
    byte_codec: TextCodec, text: str, stops: list[str], is_shown: bool
) -> None:
    """Push single bytes as tokens, so that stop strings and characters go across tokens."""
    pushed, answer, num_tokens = read_answer(
        byte_codec, text.encode(), StopRule(strings=tuple(stops), is_shown=is_shown)
    )
    found = first_stop(text, stops)
    if found is None:
        assert answer.matched is None
        assert "".join(pushed) + answer.finish() == answer.text == text
        return
    end, begin, which = found
    assert answer.matched == which
    assert "".join(pushed) == answer.text == text[: end if is_shown else begin]
    assert num_tokens == len(text[:end].encode()), "no token after the one that completes it is asked for"
    assert answer.finish() == "", "nothing follows"


@given(letters, stop_strings)
def test_nothing_sent_is_ever_part_of_a_stop_string_or_half_a_character(
    byte_codec: TextCodec, text: str, stops: list[str]
) -> None:
    pushed, _, _ = read_answer(byte_codec, text.encode(), StopRule(strings=tuple(stops)))
    sent = ""
    for number, new in enumerate(pushed):
        sent += new
        assert REPLACEMENT not in new
        whole = text.encode()[: number + 1].decode(errors="ignore")
        assert whole.startswith(sent)
        waits = whole[len(sent) :]
        could_stop = any(stop.startswith(waits) for stop in stops)
        assert not waits or could_stop or first_stop(whole, stops), "text waits only where it may become a stop string"


@given(letters, stop_strings, st.integers(0, 24))
def test_stop_strings_within_the_first_tokens_do_not_count(
    byte_codec: TextCodec, text: str, stops: list[str], min_tokens: int
) -> None:
    raw = text.encode()
    rule = StopRule(strings=tuple(stops), min_tokens=min_tokens)
    pushed, answer, num_tokens = read_answer(byte_codec, raw, rule)
    ends = [
        len(text[:end].encode())
        for end in range(1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops) and len(text[:end].encode()) > min_tokens
    ]
    assert (answer.matched is not None) == bool(ends)
    assert num_tokens == (ends[0] if ends else len(raw))
    shown = raw[:num_tokens].decode().removesuffix(answer.matched or "")
    assert "".join(pushed) + answer.finish() == shown


@given(st.text("abcé 😀€\n", max_size=24), st.lists(st.text("abcé 😀€", min_size=1, max_size=4), max_size=3))
def test_a_tokenizer_that_falls_back_to_bytes_stops_at_whole_characters_too(
    fallback_codec: TextCodec, text: str, stops: list[str]
) -> None:
    ids = fallback_codec.encode(text).tolist()
    whole = fallback_codec.decode(ids)
    answer = AnswerText(IncrementalText(fallback_codec), StopRule(strings=tuple(stops)))
    sent = ""
    for token in ids:
        sent += answer.push(token)
        assert REPLACEMENT not in sent
        assert whole.startswith(sent)
        if answer.matched is not None:
            break
    found = first_stop(whole, stops)
    assert answer.matched == (found and found[2])
    assert sent + answer.finish() == answer.text == (whole if found is None else whole[: found[1]])


def test_a_token_of_many_characters_may_hold_a_stop_string_and_more(byte_codec: TextCodec) -> None:
    class Words(TextCodec):
        def __init__(self) -> None:
            pass

        def decode(self, token_ids: list[int]) -> str:  # type: ignore[override]
            return "".join(["Hello. World", " and more", "\nUser: hi", "x"][token] for token in token_ids)

    answer = AnswerText(IncrementalText(Words()), StopRule(strings=("User:", "more\nUs")))
    assert [answer.push(0), answer.push(1), answer.push(2)] == ["Hello. World", " and ", ""]
    assert answer.matched == "more\nUs", "it is complete before the other one is"
    assert answer.text == "Hello. World and "


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_bytes_that_are_no_text_are_shown_at_the_end(byte_codec: TextCodec, stops: tuple[str, ...]) -> None:
    pushed, answer, _ = read_answer(byte_codec, b"az\xe2\x82", StopRule(strings=stops))
    assert "".join(pushed) == ("az" if not stops else "a")
    answer.finish()
    assert answer.text == "az" + REPLACEMENT
    assert answer.finish() == ""


@given(letters, st.lists(st.text("ab€😀", min_size=1, max_size=4), max_size=2), st.data())
def test_tokens_that_come_together_have_the_text_that_they_have_one_by_one(
    byte_codec: TextCodec, text: str, stops: list[str], data: st.DataObject
) -> None:
    rule, raw = StopRule(strings=tuple(stops)), text.encode()
    one, together = (AnswerText(IncrementalText(byte_codec), rule) for _ in range(2))
    shown, num_read = "", 0
    for part in data.draw(splits(len(raw))):
        tokens = list(raw[part])
        if together.matched is not None:
            break
        num_known = data.draw(st.integers(0, len(tokens)))
        count, new = together.push_all(tokens, num_known)
        known = "".join(one.push(token) for token in tokens[: min(count, num_known)])
        told = "".join(one.push(token) for token in tokens[num_known:count])
        shown += known + new
        num_read += count
        assert together.matched == one.matched
        assert together.text == one.text == shown
        if not stops:
            assert (count, new) == (len(tokens), told)
    assert one.matched is not None or num_read == len(raw)
    assert together.finish() == one.finish()
