"""Incremental text equals the text of all ids at once, whatever the ids; stop strings cut it exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.detokenizer import IncrementalDetokenizer, TokenBytes
from engine.errors import ConfigError

TOKENIZER = Tokenizer.from_file(
    str(Path(__file__).resolve().parents[2] / "examples" / "bard" / "model" / "tokenizer.json")
)
TOKEN_BYTES = TokenBytes(TOKENIZER)
SINGLE_BYTES = [i for i in range(TOKENIZER.get_vocab_size()) if len(TOKEN_BYTES[i]) == 1]

texts = st.text(max_size=12) | st.sampled_from(
    ["🦊🎭", "你好，世界", "naïve café", "a\u0301\u200d", "\ufffd"]
)
ids_of_text = texts.map(lambda text: TOKENIZER.encode(text, add_special_tokens=False).ids)
any_ids = st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 5), max_size=12)
broken_utf8 = st.lists(st.sampled_from(SINGLE_BYTES), max_size=12)
id_lists = st.lists(ids_of_text | any_ids | broken_utf8, max_size=4).map(
    lambda parts: [i for part in parts for i in part]
)


def push_all(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[str, IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(TOKEN_BYTES, stop)
    shown = ""
    for token_id in ids:
        if not detokenizer.is_stopped:
            shown += detokenizer.push(token_id)
    return shown + detokenizer.finish(), detokenizer


@settings(max_examples=400, deadline=None, print_blob=True)
@given(id_lists)
def test_text_equals_the_decoding_of_all_ids(ids: list[int]) -> None:
    shown, detokenizer = push_all(ids)
    assert shown == detokenizer.text == TOKENIZER.decode(ids, skip_special_tokens=True)


@settings(max_examples=400, deadline=None, print_blob=True)
@given(id_lists, st.lists(st.text("ab \ufffdé\n", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_a_stop_string(ids: list[int], stop: list[str]) -> None:
    shown, detokenizer = push_all(ids, tuple(stop))
    whole = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert whole.startswith(shown)
    assert not any(s in shown for s in stop)
    assert detokenizer.is_stopped == any(s in whole for s in stop)
    if detokenizer.is_stopped:
        assert any(whole.startswith(s, len(shown)) for s in stop)
    else:
        assert shown == whole


def test_a_character_is_never_split() -> None:
    ids = [TOKENIZER.token_to_id(letter) for letter in "ðŁ¦Ĭ"]  # the four bytes of one fox
    detokenizer = IncrementalDetokenizer(TOKEN_BYTES)
    assert [detokenizer.push(i) for i in ids] == ["", "", "", "🦊"]


def test_an_unfinished_character_at_the_end_is_one_replacement_character() -> None:
    ids = [TOKENIZER.token_to_id(letter) for letter in "ðŁ¦"]
    assert push_all(ids)[0] == "\ufffd"


def test_a_stop_string_across_tokens_is_held_back_until_decided() -> None:
    a, b, c = (TOKENIZER.token_to_id(letter) for letter in "abc")
    detokenizer = IncrementalDetokenizer(TOKEN_BYTES, ("abc",))
    assert [detokenizer.push(i) for i in (a, b)] == ["", ""]
    assert detokenizer.push(a) == "ab"  # the first two lead nowhere, the third may
    assert [detokenizer.push(i) for i in (b, c)] == ["", ""]
    assert detokenizer.is_stopped
    assert detokenizer.text == "ab"
    with pytest.raises(ValueError, match="stop string"):
        detokenizer.push(a)


def test_special_tokens_have_no_text() -> None:
    eos = TOKENIZER.token_to_id("<｜end▁of▁sentence｜>")
    assert push_all([TOKENIZER.token_to_id("a"), eos])[0] == "a"


def test_another_kind_of_tokenizer_is_refused() -> None:
    other = Tokenizer(models.BPE())
    other.decoder = decoders.Metaspace()
    with pytest.raises(ConfigError, match="byte-level"):
        TokenBytes(other)
