"""Which rows of which sequences the next step computes.  Knows blocks and budgets, no tensors."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from omnistage.engine.block_manager import BlockManager
from omnistage.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True)
class ScheduledChunk:
    """Compute rows [start, start + num_tokens) of a sequence; its block table covers them."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def is_sampled(self) -> bool:
        """Whether the chunk's last row is the one the next token comes from."""
        return self.sequence.prompt_is_complete and self.stop == len(self.sequence.token_ids)


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """As in EngineConfig; block_size in rows."""

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_tokens_per_request: int
    enable_prefix_cache: bool


class Scheduler:
    """Continuous batching without phases: every sequence has rows known and rows computed.

    Sequences that continue a known output (one row) go first, so that prompts cannot hold them up;
    then chunks of prompts under way; then new ones.  When blocks run out, sequences that wait for
    their open prompt give way first, then the youngest; they start over with what they have as prompt.
    """

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager) -> None:
        self.limits = limits
        self.blocks = blocks
        self.running: list[Sequence] = []  # sorted by order
        self.waiting: list[Sequence] = []  # sorted by order
        self.num_preemptions = 0
        self.num_prefix_hit_tokens = 0
        self._plan: dict[Sequence, int] = {}
        self._budget = 0

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda item: item.order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks.  Idempotent."""
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        self._free_blocks(sequence)
        sequence.status = SequenceStatus.FINISHED

    def has_work(self) -> bool:
        """Whether any sequence has a row that a step could compute or find in the cache."""
        return any(sequence.num_pending_tokens for sequence in (*self.running, *self.waiting))

    def schedule(self) -> list[ScheduledChunk]:
        """Plan one step and reserve its blocks.

        Empty if no sequence has a pending row, or the cache held all that were pending.
        """
        self._plan = {}
        self._budget = self.limits.max_num_batched_tokens
        preemptions_before = self.num_preemptions
        # sorting is stable: within "one row" and "more rows" the order of service stays
        for sequence in sorted(self.running, key=lambda item: item.num_pending_tokens > 1):
            if sequence.status is SequenceStatus.RUNNING:  # not preempted in this very loop
                self._continue(sequence)
        if self.num_preemptions == preemptions_before:
            self._admit()
        return [
            ScheduledChunk(sequence, sequence.num_computed_tokens, num_tokens)
            for sequence, num_tokens in self._plan.items()
        ]

    def _chunk_size(self, sequence: Sequence) -> int:
        if len(self._plan) >= self.limits.max_num_seqs:
            return 0
        return min(sequence.num_pending_tokens, self._budget, self.limits.max_prefill_tokens_per_request)

    def _continue(self, sequence: Sequence) -> None:
        self._match_prefix(sequence)
        num_tokens = self._chunk_size(sequence)
        if num_tokens and self._make_room(sequence, sequence.num_computed_tokens + num_tokens):
            self._reserve(sequence, num_tokens)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> None:
        needed = sequence.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        sequence.block_table.extend(self.blocks.allocate(needed))
        self._plan[sequence] = num_tokens
        self._budget -= num_tokens

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Preempt until `num_tokens` rows fit; False if that took the sequence itself."""
        while sequence.num_blocks_for(num_tokens) > self.blocks.num_free:
            idle = [item for item in self.running if not item.num_pending_tokens]
            victim = (idle or self.running)[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._budget += self._plan.pop(sequence, 0)
        self.running.remove(sequence)
        self._free_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.was_preempted = True
        sequence.status = SequenceStatus.WAITING
        self.add(sequence)
        self.num_preemptions += 1

    def _admit(self) -> None:
        """Start waiting sequences in order while budget and blocks last; skip those without rows."""
        for sequence in list(self.waiting):
            if not self._budget or len(self._plan) >= self.limits.max_num_seqs:
                return
            if not sequence.num_pending_tokens:
                continue
            # The whole known prompt must fit, not just its first chunk: less preemption later.
            if not self._reclaim_idle(sequence):
                if sequence.prompt_is_complete:
                    return  # overtaking would starve long prompts
                continue
            self.waiting.remove(sequence)
            sequence.status = SequenceStatus.RUNNING
            insort(self.running, sequence, key=lambda item: item.order)
            self._match_prefix(sequence)
            num_tokens = self._chunk_size(sequence)
            if num_tokens:
                self._reserve(sequence, num_tokens)

    def _reclaim_idle(self, sequence: Sequence) -> bool:
        """Whether all known rows of a waiting sequence fit, preempting idle ones if that is enough."""
        while True:
            missing = self._num_blocks_missing(sequence) - self.blocks.num_free
            if missing <= 0:
                return True
            idle = [item for item in self.running if not item.num_pending_tokens]
            if not idle:
                return False
            self._preempt(idle[-1])

    def _num_blocks_missing(self, sequence: Sequence) -> int:
        """Free blocks that admission takes: new ones, and cached ones that nobody owns."""
        needed = sequence.num_blocks_for(len(sequence.token_ids))
        if self.limits.enable_prefix_cache:
            for index in range(self._num_matchable(sequence)):
                content_hash = sequence.block_hash(index)
                if content_hash is None or not self.blocks.is_published(content_hash):
                    break
                needed -= not self.blocks.is_free(content_hash)
        return needed

    def _num_matchable(self, sequence: Sequence) -> int:
        """Leading blocks that may come from the cache: all but the one with the last row."""
        return (len(sequence.token_ids) - 1) // self.limits.block_size

    def _match_prefix(self, sequence: Sequence) -> None:
        """Take blocks that others have computed, from the first row not yet computed on.

        A block of its own that the sequence has filled only in part is given up for a full one.
        """
        if not self.limits.enable_prefix_cache:
            return
        block_size = self.limits.block_size
        for index in range(sequence.num_computed_tokens // block_size, self._num_matchable(sequence)):
            content_hash = sequence.block_hash(index)
            block = None if content_hash is None else self.blocks.acquire(content_hash)
            if block is None:
                return
            self.blocks.release(sequence.block_table[index:])
            del sequence.block_table[index:]
            sequence.block_table.append(block)
            matched = (index + 1) * block_size
            self.num_prefix_hit_tokens += matched - sequence.num_computed_tokens
            if not sequence.was_preempted:
                sequence.num_cached_tokens += matched - sequence.num_computed_tokens
            sequence.num_computed_tokens = matched

    def publish(self, chunk: ScheduledChunk) -> None:
        """Make the blocks that a computed chunk has filled findable."""
        if not self.limits.enable_prefix_cache:
            return
        block_size = self.limits.block_size
        for index in range(chunk.start // block_size, chunk.stop // block_size):
            content_hash = chunk.sequence.block_hash(index)
            if content_hash is None:
                return
            self.blocks.publish(chunk.sequence.block_table[index], content_hash)

    def _free_blocks(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.block_table)
        sequence.block_table = []
