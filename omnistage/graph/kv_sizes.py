"""How large the KV caches of a pipeline's llm stages are made for a given number of bytes.

A pure function of sizes.  Knows no device and no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

BLOCK_SIZE = 16  # tokens of a KV block
MIN_CONTEXT = 1024  # tokens of a request, below which a longer one is worth more than anything else


@dataclass(frozen=True)
class CacheNeed:
    """What the caches of one stage are for.

    bytes_per_token: of one token's keys and values, and of what is exported beside them.
    max_model_len: tokens.
    max_num_seqs: requests computed together by one of the replicas.
    """

    bytes_per_token: int
    max_model_len: int
    max_num_seqs: int
    replicas: int = 1

    @property
    def steps(self) -> tuple[int, int, int]:
        """Bytes of one replica for a short request, for one of full length, and for all of full length."""
        one = self._bytes_for(self.max_model_len)
        return self._bytes_for(min(MIN_CONTEXT, self.max_model_len)), one, one * self.max_num_seqs

    def _bytes_for(self, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE * self.bytes_per_token


def least_bytes(needs: Mapping[str, CacheNeed]) -> int:
    """For a short request at every stage."""
    return sum(need.steps[0] * need.replicas for need in needs.values())


def share_out(needs: Mapping[str, CacheNeed], available: int) -> dict[str, int]:
    """Bytes of the KV cache of each replica, by stage; together at most `available`.

    First every stage gets room for a short request, then for one of full length, then for all of full
    length, which is the most that is of use.  What does not suffice for a step is shared in proportion to
    what the stages lack of it.
    """
    sizes = {}
    for name, need in needs.items():
        block = BLOCK_SIZE * need.bytes_per_token
        size = 0
        for step, (before, after) in enumerate(pairwise((0, *need.steps))):
            start, end = _total(needs, step - 1), _total(needs, step)
            share = min(max(0, available - start), end - start)
            size += (after - before) * share // (end - start) if end > start else 0
        sizes[name] = size // block * block
    return sizes


def _total(needs: Mapping[str, CacheNeed], step: int) -> int:
    return 0 if step < 0 else sum(need.steps[step] * need.replicas for need in needs.values())
