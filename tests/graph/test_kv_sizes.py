from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omnistage.graph.kv_sizes import BLOCK_SIZE, MIN_CONTEXT, CacheNeed, least_bytes, share_out

WIDE = CacheNeed(bytes_per_token=100, max_model_len=4096, max_num_seqs=8)
NARROW = CacheNeed(bytes_per_token=10, max_model_len=2048, max_num_seqs=4)
BOTH = {"thinker": WIDE, "talker": NARROW}


def test_with_plenty_each_gets_what_all_its_requests_need_and_no_more():
    assert share_out(BOTH, 10**12) == {"thinker": 100 * 4096 * 8, "talker": 10 * 2048 * 4}


def test_first_one_request_of_full_length_for_everybody():
    one = 100 * 4096 + 10 * 2048
    assert share_out(BOTH, one) == {"thinker": 100 * 4096, "talker": 10 * 2048}
    more = share_out(BOTH, 2 * one)
    assert more["thinker"] > 100 * 4096
    assert more["talker"] > 10 * 2048
    assert one < sum(more.values()) <= 2 * one


def test_before_that_a_short_request_for_everybody():
    least = least_bytes(BOTH)
    assert least == 1024 * 110
    assert share_out(BOTH, least) == {"thinker": 100 * 1024, "talker": 10 * 1024}
    assert share_out(BOTH, 0) == {"thinker": 0, "talker": 0}


def test_lengths_are_rounded_up_to_blocks_and_sizes_down():
    need = CacheNeed(bytes_per_token=7, max_model_len=33, max_num_seqs=2)
    assert share_out({"a": need}, 10**6) == {"a": 48 * 7 * 2}
    assert share_out({"a": need}, 48 * 7 - 1) == {"a": 32 * 7}


def test_each_replica_counts():
    need = CacheNeed(bytes_per_token=10, max_model_len=2048, max_num_seqs=4, replicas=3)
    assert share_out({"a": need}, 10 * 2048 * 3) == {"a": 10 * 2048}


NEEDS = st.builds(
    CacheNeed,
    bytes_per_token=st.integers(1, 100_000),
    max_model_len=st.integers(1, 300_000),
    max_num_seqs=st.integers(1, 64),
    replicas=st.integers(1, 3),
)


@given(st.dictionaries(st.sampled_from("abc"), NEEDS), st.integers(0, 10**13), st.integers(0, 10**10))
def test_never_too_much_in_whole_blocks_and_never_less_for_more(needs, available, extra):
    sizes = share_out(needs, available)
    assert sum(size * needs[name].replicas for name, size in sizes.items()) <= available
    for name, size in sizes.items():
        need = needs[name]
        assert size % (BLOCK_SIZE * need.bytes_per_token) == 0
        assert size <= need.steps[2]
        if available >= least_bytes(needs):
            assert size // need.bytes_per_token >= min(MIN_CONTEXT, need.max_model_len)
    more = share_out(needs, available + extra)
    assert all(more[name] >= size for name, size in sizes.items())
