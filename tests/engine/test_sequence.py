"""What a block's hash covers."""

from __future__ import annotations

import torch

from omnistage.engine.request import EmbeddingRows, EngineRequest, Rows, TokenRows
from omnistage.engine.sequence import Sequence


def hashes(*rows: Rows, salt: str = "", block_size: int = 4) -> list[bytes | None]:
    made = Sequence(EngineRequest(request_id="x", cache_salt=salt), 0, block_size)
    made.extend_prompt(rows, is_complete=True)
    return [made.block_hash(index) for index in range(len(made.token_ids) // block_size)]


def given(num_rows: int, digest: str | None) -> EmbeddingRows:
    return EmbeddingRows(torch.zeros(num_rows, 2), digest)


def tokens(*token_ids: int) -> TokenRows:
    return TokenRows(token_ids)


def test_equal_rows_hash_equally_however_they_are_cut() -> None:
    whole = hashes(tokens(*range(8)))
    assert whole == hashes(tokens(0, 1, 2), tokens(3, 4, 5, 6, 7))
    assert len(set(whole)) == 2


def test_a_block_depends_on_all_before_it() -> None:
    same_block = [hashes(tokens(first, 2, 3, 4, 5, 6, 7, 8))[1] for first in (1, 9)]
    assert same_block[0] != same_block[1]


def test_salt_digest_and_place_tell_blocks_apart() -> None:
    variants = [
        hashes(tokens(1, 2, 3, 4)),
        hashes(tokens(1, 2, 3, 4), salt="a"),
        hashes(tokens(1, 2, 3, 5)),
        hashes(given(4, "p")),
        hashes(given(4, "q")),
        hashes(given(2, "p"), given(2, "p")),
        hashes(given(2, "p"), given(2, "q")),
        hashes(tokens(1), given(3, "p")),
        hashes(given(3, "p"), tokens(1)),
    ]
    assert len({variant[0] for variant in variants}) == len(variants)


def test_rows_of_a_picture_are_told_apart_by_offset() -> None:
    one = hashes(given(8, "p"))
    assert one[0] != one[1]
    halves = hashes(given(4, "p"), given(4, "p"))  # equal first blocks, then rows 4 to 7 or 0 to 3 of p
    assert halves[1] != one[1]
    shifted = hashes(tokens(1, 2, 3, 4), given(8, "p"))
    assert shifted[1] != one[0]


def test_nothing_is_hashed_from_a_row_without_digest_on() -> None:
    assert hashes(tokens(1, 2, 3, 4, 5), given(2, None), tokens(*range(9)))[1:] == [None] * 3
    assert hashes(tokens(1, 2, 3, 4, 5), given(2, None), tokens(*range(9)))[0] is not None
