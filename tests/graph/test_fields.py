from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.graph.fields import (
    AnyScalar,
    Bytes,
    Choice,
    Count,
    Flag,
    ListOf,
    MapOf,
    Text,
    format_bytes,
    hint,
    nearest,
    parse_bytes,
)
from omnistage.types import StageKind


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (0, 0),
        (17, 17),
        ("17B", 17),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("2GiB", 2 * 1024**3),
        ("1.5 MiB", 3 * 512 * 1024),
        ("0.5KB", 500),
        ("3TB", 3 * 10**12),
    ],
)
def test_byte_sizes(written, size):
    assert parse_bytes(written) == size


@pytest.mark.parametrize(
    "wrong", ["2 gigs", "GiB", "-1MiB", -1, True, 1.5, None, "0.3B", "12", "1e3MB", 2**63, "9999999999TiB"]
)
def test_wrong_byte_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match=r"byte"):
        parse_bytes(wrong)


@given(st.integers(0, 2**63 - 1))
def test_byte_sizes_survive_being_written(size):
    assert parse_bytes(format_bytes(size)) == size


def test_byte_sizes_are_written_in_the_largest_exact_unit():
    assert format_bytes(256 * 1024**2) == "256MiB"
    assert format_bytes(1536 * 1024**2) == "1536MiB"
    assert format_bytes(1000) == 1000
    assert format_bytes(0) == 0


def test_nearest_word_and_hint():
    known = ["max_num_seqs", "max_num_batched_tokens", "devices"]
    assert nearest("max_num_seq", known) == "max_num_seqs"
    assert nearest("zebra", known) is None
    assert hint("device", known) == "did you mean 'devices'?"
    assert hint("zebra", known) == "known: max_num_seqs, max_num_batched_tokens, devices"
    assert hint("zebra", []) == "there are none"


@pytest.mark.parametrize(
    ("type_", "value", "stored"),
    [
        (Text(), "joe", "joe"),
        (Count(), 3, 3),
        (Count(0), 0, 0),
        (Bytes(), "1KiB", 1024),
        (Flag(), True, True),
        (Choice(("a", "b")), "b", "b"),
        (ListOf(Count()), [1, 2], (1, 2)),
        (MapOf(Text(), Bytes()), {"a": "1KiB"}, {"a": 1024}),
        (AnyScalar(), 0.5, 0.5),
    ],
)
def test_values_parse_and_stored_values_parse_to_themselves(type_, value, stored):
    assert type_.parse(value) == stored
    assert type_.parse(type_.parse(value)) == stored
    assert type_.parse(type_.dump(stored)) == stored


@pytest.mark.parametrize(
    ("type_", "value", "message"),
    [
        (Text(), 3, "put it in quotes"),
        (Text(), "a\nb", "text in one line"),
        (Count(), 0, "at least 1, not 0"),
        (Count(), True, "whole number"),
        (Count(), 1.0, "whole number"),
        (Flag(), "yes", "true or false"),
        (Choice(("a", "b")), "c", "one of a, b, not 'c'"),
        (ListOf(Count()), 3, r"must be a list, not 3; write \[3\]"),
        (ListOf(Count()), [], "empty"),
        (MapOf(Text(), Count()), [], "mapping"),
        (MapOf(Text(), Count()), {"a": "x"}, "a: must be a whole number"),
        (AnyScalar(), float("nan"), "finite"),
        (AnyScalar(), 2**70, "64 bits"),
        (AnyScalar(), [1], "must be text"),
    ],
)
def test_wrong_values_name_the_value_and_the_remedy(type_, value, message):
    with pytest.raises(ValueError, match=message):
        type_.parse(value)


def test_a_choice_of_an_enum_gives_its_members():
    assert Choice(tuple(StageKind)).parse("llm") is StageKind.LLM
