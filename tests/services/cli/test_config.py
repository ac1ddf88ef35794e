"""`ringserve config`: what it prints is the configuration, and can be read again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from ringserve.services.cli.main import main
from ringserve.services.config import Config, load_config
from ringserve.services.config.sources import keys_of

ROOT = Path(__file__).resolve().parents[3]


def test_the_defaults_are_printed_with_every_key_and_its_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["config"]) == 0
    shown = capsys.readouterr().out
    (tmp_path / "cluster.yaml").write_text(shown)
    assert load_config(tmp_path / "cluster.yaml", environment={}) == Config()
    words = " ".join(shown.replace("#", "").split())
    for section in dataclasses.fields(Config):
        keys = keys_of(type(getattr(Config(), section.name)))
        assert yaml.safe_load(shown)[section.name].keys() == keys.keys()
        for key in keys.values():
            assert str(key.description) in words


def test_the_page_of_the_reference_is_that_of_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert (ROOT / "docs/configuration.md").read_text() == page, "ringserve config --markdown > docs/configuration.md"
    keys = {
        f"| `{section.name}.{key.name}` |"
        for section in dataclasses.fields(Config)
        for key in dataclasses.fields(type(getattr(Config(), section.name)))
    }
    assert {line[: line.index("|", 1) + 1] for line in page.splitlines() if line.startswith("| `")} == keys


def test_values_of_file_and_command_line_are_those_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "mine.yaml"
    written.write_text("prefill: {cp: 4, pools: {short: {rings: 2, cp: 1}}}\nrouter: {max_conversations: 7}\n")
    assert main(["config", "--config", str(written), "--set", "decode.cp=3", "--set", "http.origins=*"]) == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out)
    config = load_config(again, environment={})
    assert config == load_config(written, {"decode.cp": "3", "http.origins": "*"}, environment={})
    assert (config.prefill.cp, config.decode.cp, config.prefill.pools["short"].rings) == (4, 3, 2)


def test_a_value_that_is_not_allowed_is_refused_as_by_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--set", "prefill.cp=0"]) == 1
    assert capsys.readouterr().err == "ringserve: prefill.cp: 0 is not allowed; give a whole number from 1 to 64\n"
