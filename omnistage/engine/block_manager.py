"""Who owns which KV block, and which blocks hold rows that others may share.

Knows block ids and content hashes; it does not know what a hash covers or where the bytes lie.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockManager:
    """Reference-counted blocks with a least-recently-used free list.

    A block is free (no owner) or used (one owner or, shared, several).  A block may be published
    under a hash; when its last owner releases it, it stays findable until it is needed for new rows.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_owners = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next victim first
        self._num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks that can still be found by hash."""
        return self._num_cached

    def allocate(self, count: int) -> list[int]:
        """Take the `count` blocks unused for longest.  The caller has checked num_free."""
        assert count <= len(self._free), f"{count} blocks asked of {len(self._free)} free"
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._num_owners[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, content_hash: bytes) -> int | None:
        """Become an owner of the block published under this hash, if there is one."""
        block = self._block_of.get(content_hash)
        if block is None:
            return None
        if not self._num_owners[block]:
            del self._free[block]
            self._num_cached -= 1
        self._num_owners[block] += 1
        return block

    def is_published(self, content_hash: bytes) -> bool:
        return content_hash in self._block_of

    def is_free(self, content_hash: bytes) -> bool:
        """Whether acquiring this published block would take one from the free list."""
        return not self._num_owners[self._block_of[content_hash]]

    def publish(self, block: int, content_hash: bytes) -> None:
        """Make an owned, fully written block findable.  The first block of a content stays the one."""
        assert self._num_owners[block], f"block {block} has no owner"
        if content_hash not in self._block_of and block not in self._hash_of:
            self._block_of[content_hash] = block
            self._hash_of[block] = content_hash

    def release(self, blocks: list[int]) -> None:
        """Give up one ownership each.  blocks: in row order, so that a chain loses its end first."""
        for block in reversed(blocks):
            assert self._num_owners[block], f"block {block} has no owner"
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            self._free[block] = None
            if block in self._hash_of:
                self._num_cached += 1
            else:  # worthless to others: reuse first, in row order so that runs stay consecutive
                self._free.move_to_end(block, last=False)

    def withdraw(self, blocks: list[int]) -> list[int]:
        """Make blocks whose rows are worthless unfindable; returns those nobody else owns."""
        exclusive = [block for block in blocks if self._num_owners[block] == 1]
        for block in exclusive:
            self._forget(block)
        return exclusive

    def _forget(self, block: int) -> None:
        content_hash = self._hash_of.pop(block, None)
        if content_hash is not None:
            del self._block_of[content_hash]
            self._num_cached -= not self._num_owners[block]
