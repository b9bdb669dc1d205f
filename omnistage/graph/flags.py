"""Settings from the command line: "thinker.max_num_seqs=8" applied to a draft.

The key is a path: STAGE.SETTING, PRODUCER->CONSUMER.SETTING, outputs.NAME or a pipeline setting,
optionally after "stages." or "edges.".  The value is YAML, except that text is taken as it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omnistage.errors import PipelineError
from omnistage.graph.document import read_yaml
from omnistage.graph.draft import Draft, Settings, edge_ends
from omnistage.graph.fields import Setting, hint
from omnistage.graph.problems import Path
from omnistage.graph.spec import EDGE_SETTINGS, PIPELINE_SETTINGS, STAGE_SETTINGS


def apply_flag(draft: Draft, flag: str) -> None:
    """Set one value; what cannot be set becomes a problem of the draft."""
    key, equals, text = flag.partition("=")
    keys = [word.strip() for word in key.split(".")]
    if not equals or not all(keys):
        draft.add_problem((f"--set {flag}",), "must be KEY=VALUE, for instance thinker.max_num_seqs=8")
        return
    if keys[0] in ("stages", "edges") and len(keys) > 1:
        keys = keys[1:]
    ends = edge_ends(keys[0])
    if keys[0] in PIPELINE_SETTINGS and keys[0] not in draft.stages:
        _set(draft, flag, draft.pipeline, (), keys, text, PIPELINE_SETTINGS)
    elif keys[0] == "outputs" and len(keys) == 2:
        draft.outputs[keys[1]] = text
        draft.flags[("outputs", keys[1])] = flag
    elif ends is not None:
        found = [settings for producer, consumer, settings in draft.edges if (producer, consumer) == ends]
        if found:
            _set(draft, flag, found[0], ("edges", "->".join(ends)), keys[1:], text, EDGE_SETTINGS)
        else:
            known = [f"{producer}->{consumer}" for producer, consumer, _ in draft.edges]
            draft.add_problem((f"--set {flag}",), f"no edge {keys[0]!r}; {hint('->'.join(ends), known)}")
    elif keys[0] in draft.stages:
        path = ("stages", keys[0])
        _set(draft, flag, draft.stages[keys[0]], path, keys[1:], text, STAGE_SETTINGS)
    else:
        known = [*draft.stages, *PIPELINE_SETTINGS]
        draft.add_problem((f"--set {flag}",), f"no stage or setting {keys[0]!r}; {hint(keys[0], known)}")


def _set(
    draft: Draft,
    flag: str,
    settings: Settings,
    path: Path,
    keys: list[str],
    text: str,
    table: Mapping[str, Setting],
) -> None:
    """keys: the setting, and for a mapping such as options the key in it."""
    if not 1 <= len(keys) <= 2 or (path and keys[0] == "name"):
        draft.add_problem((f"--set {flag}",), "names no setting; write for instance thinker.max_num_seqs=8")
        return
    try:
        value = _value(text, table.get(keys[0]) if len(keys) == 1 else None)
    except PipelineError as error:
        draft.add_problem((f"--set {flag}",), error.message)
        return
    if len(keys) == 1:
        settings[keys[0]] = value
    else:
        inner = settings.get(keys[0], {})
        settings[keys[0]] = {**(inner if isinstance(inner, Mapping) else {}), keys[1]: value}
    # An unknown key is found, with the file's own, when the draft is built.
    draft.flags[(*path, *keys)] = flag


def _value(text: str, setting: Setting | None) -> Any:
    if setting is not None and setting.type.is_raw():
        return None if text == "null" and setting.default is None else text
    return read_yaml(text, "value")
