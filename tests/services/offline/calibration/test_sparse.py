"""Losses of sparse prefills: the questions, the losses of a small model, and what the command refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringserve.cp_core.errors import ConfigError
from ringserve.cp_core.layout.sparsity import Sparsity
from ringserve.services.cli.main import main
from ringserve.services.gateway.text import TextCodec
from ringserve.services.offline.calibration.sparse import LossMeter, Result, losses_of, make_questions
from ringserve.services.offline.calibration.sparse_report import losses_json, losses_table, write_losses_plot
from ringserve.services.offline.demo import document
from ringserve.workers.model.builtin import resolve_model_path

DEPTHS = (0.1, 0.5, 1.0)


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(resolve_model_path("builtin:tiny"))


def test_each_question_asks_for_one_of_the_hidden_sentences_at_its_depth(codec: TextCodec) -> None:
    questions = make_questions(codec, document(codec), 1500, DEPTHS)
    assert [each.depth for each in questions] == list(DEPTHS)
    for place, code, question in zip(("boathouse", "cellar", "greenhouse"), (7319, 8436, 9553), questions, strict=True):
        assert 1000 < len(question.prompt) <= 1500
        text, asked = codec.decode(question.prompt.tolist()).rsplit("What is", 1)
        assert f"the access code of the {place}?" in asked
        needle = f"The access code of the {place} is {code}."
        assert text.count(needle) == 1
        assert text.index(needle) / len(text) == pytest.approx(question.depth, abs=0.15)
        assert codec.decode(question.answer.tolist()).endswith(str(code))
        assert str(code) in codec.decode(question.answer[question.code :].tolist())


def test_a_prompt_without_room_for_the_hidden_sentences_is_refused(codec: TextCodec) -> None:
    with pytest.raises(ConfigError, match=r"--tokens: 120 are too few for 3 hidden sentences"):
        make_questions(codec, document(codec), 120, DEPTHS)
    with pytest.raises(ConfigError, match=r"--depths: 9 are given; allowed are 1 to 8"):
        make_questions(codec, document(codec), 1500, [0.5] * 9)


def test_the_loss_is_none_where_all_keys_reach_all_ranks_and_grows_as_fewer_do(codec: TextCodec) -> None:
    meter = LossMeter(resolve_model_path("builtin:tiny"), "float32", 2)
    (question,) = make_questions(codec, document(codec), 500, [0.3])
    sparsities = [Sparsity(keep=keep, sinks=0, window=1) for keep in (1.0, 0.5, 0.02)]
    told: list[str] = []
    exact, whole, half, few = meter.measure(500, question, sparsities, told.append)
    assert told[:2] == ["500 tokens, exact", "500 tokens, keep 1"]
    assert (exact.keep, exact.loss) == (None, 0.0)
    assert whole.loss == pytest.approx(0.0, abs=1e-9)
    assert 1e-6 < half.loss < few.loss


RESULTS = [
    Result(num_tokens, depth, keep, loss * (1 + depth), keep is None or depth > 0.4)
    for num_tokens in (500, 1000)
    for depth in (0.2, 0.8)
    for keep, loss in ((None, 0.0), (0.5, 0.1), (0.25, 0.2))
]


def test_losses_are_means_over_the_questions_of_a_length_and_are_reported(tmp_path: Path) -> None:
    losses = losses_of("m", 4, 2, 8, RESULTS)
    first = losses.measured[0]
    assert first.loss == pytest.approx(0.15)
    assert (first.num_ranks, first.accuracy, first.exact_accuracy, first.num_questions) == (4, 0.5, 1.0, 2)
    assert [(each.num_tokens, each.keep) for each in losses.measured] == [
        (500, 0.5),
        (500, 0.25),
        (1000, 0.5),
        (1000, 0.25),
    ]
    assert losses_table(losses).row_count == 4
    printed = json.loads(losses_json(losses, RESULTS))
    assert (len(printed["measured"]), len(printed["questions"])) == (4, 12)
    write_losses_plot(losses, RESULTS, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "builtin:tiny is not trained"),
        (["--ranks", "1"], "--ranks: 1 is out of range; allowed are 2 to 16"),
        (["--keep", "0.5,x"], "--keep: 'x' is not a number"),
        (["--keep", "2"], "--keep: 2 is out of range; allowed are above 0 to 1"),
        (["--window", "0"], "window 0; allowed are"),
        (["--depths", "1.5"], "--depths: 1.5 is out of range; allowed are 0 to 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "--sparse", "--set", "model.path=builtin:tiny", *options]) != 0
    assert said in capsys.readouterr().err
