"""Takes stages out of a pipeline whose parts a model does not have, and what makes no sense without them.

Works on a draft, so that line numbers and flags stay.  Knows neither weights nor files.
"""

from __future__ import annotations

from collections.abc import Collection

from omnistage.graph.draft import Draft


def prune(draft: Draft, *, stages: Collection[str] = (), outputs: Collection[str] = ()) -> tuple[str, ...]:
    """Take out these stages and outputs.  Returns the names of all stages that went, in the file's order.

    With them go stages whose stream has lost its producer (a stage can do without whole items, such as
    pictures, but not without its stream), outputs of stages that went, and stages that no output needs.
    """
    gone = set(stages)
    unwanted = set(outputs)
    streams = [(producer, consumer) for producer, consumer, edge in draft.edges if edge.get("stream")]
    while True:
        lost = unwanted | {name for name, stage in draft.outputs.items() if stage in gone}
        kept = {name: stage for name, stage in draft.outputs.items() if name not in lost}
        needed = _needed(draft, set(kept.values()), gone)
        grown = gone | {consumer for producer, consumer in streams if producer in gone}
        grown |= draft.stages.keys() - needed
        if grown == gone:
            break
        gone = grown
    draft.outputs = kept
    draft.edges = [edge for edge in draft.edges if not gone & {edge[0], edge[1]}]
    went = tuple(name for name in draft.stages if name in gone)
    draft.stages = {name: settings for name, settings in draft.stages.items() if name not in gone}
    return went


def _needed(draft: Draft, sources: set[str], gone: set[str]) -> set[str]:
    """The stages from which one of `sources` is reached, over edges that are still there."""
    needed = sources - gone
    while True:
        grown = needed | {
            producer for producer, consumer, _ in draft.edges if consumer in needed and producer not in gone
        }
        if grown == needed:
            return needed
        needed = grown
