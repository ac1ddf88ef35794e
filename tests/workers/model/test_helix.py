"""Rings whose ranks share the weights behind attention, against transformers on one process; caches are poisoned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ringserve.cp_core.cost.decode import GATHER, HELIX
from ringserve.cp_core.errors import ConfigError, ModelRefused
from ringserve.cp_core.transport.inprocess import InProcessRing
from ringserve.workers.model.loading import LoadedModel, load_model
from tests.cp_core.rings import on_every_rank
from tests.workers.models import ALL_WINDOWED, KINDS, SHAPE, VOCAB_SIZE, WINDOWED, Oracle, random_tokens
from tests.workers.rings import LocalRing, Turn

TOLERANCE = 2e-5
"""Logits, absolute, fp32."""

Models = Mapping[str, Path]


def shares_of(path: Path, num_ranks: int) -> list[LoadedModel]:
    """Load every rank's share, connected to one ring of threads."""
    transports = InProcessRing(num_ranks).transports
    shares = [load_model(path, "float32", "cpu", helix_rank=rank, helix=num_ranks) for rank in range(num_ranks)]
    for share, transport in zip(shares, transports, strict=True):
        share.helix.connect(transport)
    return shares


def check_logits(path: Path, oracle: Oracle, num_ranks: int) -> None:
    """Compute two turns of one conversation and a prompt of one token beside them."""
    tokens, more = random_tokens(37), random_tokens(11, seed=1)
    with LocalRing(path, num_ranks, decode_variant=HELIX) as ring:
        conversation, single = ring.open("c", 64), ring.open("d", 8)
        first, alone = ring.prefill_logits([Turn(conversation, tokens), Turn(single, [7])])
        (second,) = ring.prefill_logits([Turn(conversation, more)])
    assert (torch.cat([first, second]) - oracle.logits([*tokens, *more])).abs().max() <= TOLERANCE
    assert (alone - oracle.logits([7])).abs().max() <= TOLERANCE


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", [*KINDS, ALL_WINDOWED])
def test_every_model_has_the_logits_of_transformers(
    kind: str, num_ranks: int, model_paths: Models, oracles: Mapping[str, Oracle]
) -> None:
    check_logits(model_paths[kind], oracles[kind], num_ranks)


def test_sinks_are_not_served(model_paths: Models) -> None:
    """Nor does a ring choose helix by itself for them."""
    loaded = load_model(model_paths[WINDOWED], "float32", "cpu")
    assert not loaded.can_be_cut
    with pytest.raises(ModelRefused, match=r"decode\.variant: helix is not allowed for a model with attention sinks"):
        loaded.cut_over_ring(0, 2)


def test_biases_of_sums_are_added_once(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    check_logits(tmp_path, Oracle(tmp_path), 3)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_ring_holds_everything_behind_attention_once(num_ranks: int, model_paths: Models) -> None:
    path = model_paths["llama_gqa"]
    whole = dict(load_model(path, "float32", "cpu").model.named_parameters())
    shares = [dict(share.model.named_parameters()) for share in shares_of(path, num_ranks)]
    for name, parameter in whole.items():
        numbers = [share[name].numel() for share in shares]
        is_whole = parameter.ndim == 1 or any(part in name for part in ("q_proj", "k_proj", "v_proj", "embed"))
        assert sum(numbers) == parameter.numel() * (num_ranks if is_whole else 1), name
        assert is_whole or max(numbers) - min(numbers) <= max(parameter.shape), name


def test_a_tied_head_is_a_view_of_its_rows_of_the_embedding(edited_config: Callable[..., Path]) -> None:
    path = edited_config("qwen2", tie_word_embeddings=True)
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    check_logits(path, Oracle(path), 3)
    for share in shares_of(path, 3):
        head, embedding = share.head.weight, share.model.get_input_embeddings().weight
        assert isinstance(head, torch.Tensor)
        assert isinstance(embedding, torch.Tensor)
        first, stop = share.helix.share(VOCAB_SIZE)
        assert embedding.shape == (VOCAB_SIZE, 64)
        assert head.data_ptr() == embedding[first:].data_ptr()
        assert head.shape == (stop - first, 64)


def test_the_largest_logit_is_the_first_of_equals_on_any_rank_and_shows_nan(model_paths: Models) -> None:
    shares = shares_of(model_paths["llama_gqa"], 3)
    states = torch.zeros(4, 64)
    states[0, 0], states[1, 1], states[2, 2], states[3, 3] = 1, 1, 1, torch.nan
    heads = torch.zeros(VOCAB_SIZE, 64)
    heads[[120, 250], 0] = 5.0
    heads[299, 1] = 0.25
    for share in shares:
        first, stop = share.helix.share(VOCAB_SIZE)
        share.head.weight.copy_(heads[first:stop])  # type: ignore[operator]
    # A row without any positive logit: all are 0, and the first token of all is the first of equals.
    for largest, tokens in on_every_rank(
        [share.helix.transport for share in shares],
        lambda transport: shares[transport.rank].largest_logits(states),
    ):
        assert largest[:3].tolist() == [5.0, 0.25, 0.0]
        assert largest[3].isnan()
        assert tokens.tolist()[:3] == [120, 299, 0]


def test_a_ring_follows_no_variant_that_its_weights_do_not_allow(model_paths: Models) -> None:
    for started, asked in ((HELIX, GATHER), (HELIX, "auto"), (GATHER, HELIX)):
        with LocalRing(model_paths["llama_gqa"], 2, decode_variant=started) as ring:
            with pytest.raises(ConfigError, match=rf"decode\.variant: '{asked}' is not allowed on a ring"):
                ring.workers[0].follow_decode_variant(asked)
            ring.workers[0].follow_decode_variant(started)
