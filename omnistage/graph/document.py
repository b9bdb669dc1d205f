"""YAML text as plain data that remembers its lines.

Strict where YAML is lax: a repeated key, an alias, a merge key or a tag other than the plain scalar
ones is an error.  Knows nothing of pipelines.
"""

from __future__ import annotations

from typing import Any

import yaml

from omnistage.errors import PipelineError

_MAX_DEPTH = 16  # levels of nesting; a pipeline needs five


class Located(dict[Any, Any]):
    """A mapping with the line of each key, counted from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}


class LocatedList(list[Any]):
    """A list with the line of each item, counted from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}


def line_of(container: object, key: object) -> int:
    """The line of a key or an index; 0 where the container has no lines (JSON, Python)."""
    lines: dict[Any, int] = getattr(container, "lines", {})
    return lines.get(key, 0)


def read_yaml(text: str, filename: str) -> Any:
    """Plain data of one YAML document; None if it is empty.  Raises PipelineError with file and line."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return None if node is None else _Reader(loader, filename).value(node, depth=0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"{filename}:{mark.line + 1}" if mark is not None else filename
        raise PipelineError(f"{line}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise PipelineError(f"{filename}: not valid YAML: {error}") from None
    except RecursionError:
        raise PipelineError(f"{filename}: nested deeper than {_MAX_DEPTH} levels") from None


class _Reader:
    def __init__(self, loader: yaml.SafeLoader, filename: str) -> None:
        self._loader = loader
        self._filename = filename
        self._seen: set[int] = set()

    def value(self, node: yaml.Node, *, depth: int) -> Any:
        if id(node) in self._seen:
            raise self._error(node, "aliases (*name) are not supported; write the value out")
        self._seen.add(id(node))
        if depth > _MAX_DEPTH:
            raise self._error(node, f"nested deeper than {_MAX_DEPTH} levels")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode):
            items = LocatedList()
            for index, item in enumerate(node.value):
                items.append(self.value(item, depth=depth + 1))
                items.lines[index] = item.start_mark.line + 1
            return items
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> Located:
        mapping = Located()
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, "a key must be a word, not a list or mapping")
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise self._error(key_node, "merge keys (<<) are not supported; write the values out")
            key = self._scalar(key_node)
            line = key_node.start_mark.line + 1
            if key in mapping:
                raise self._error(
                    key_node, f"{key!r} is already given in line {mapping.lines[key]}; keep one"
                )
            mapping[key] = self.value(value_node, depth=depth + 1)
            mapping.lines[key] = line
        return mapping

    def _scalar(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node)
        except ValueError as error:  # such as the date 2024-13-01
            raise self._error(node, f"{node.value!r} cannot be read ({error}); put it in quotes") from None

    def _error(self, node: yaml.Node, message: str) -> PipelineError:
        return PipelineError(f"{self._filename}:{node.start_mark.line + 1}: {message}")
