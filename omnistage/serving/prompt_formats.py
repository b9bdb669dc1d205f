"""Which prompt format a model's conversations are written in."""

from __future__ import annotations

from collections.abc import Callable

from omnistage.serving.prompt import PromptFormat, starter_prompt
from omnistage.serving.qwen_prompt import chat_prompt
from omnistage.serving.requests import BackendInfo

# model_type of config.json ("": a model of separate parts) -> its form; every other has chat_prompt's.
PROMPT_FORMATS: dict[str, Callable[[BackendInfo], PromptFormat]] = {"": starter_prompt}


def prompt_format(info: BackendInfo) -> PromptFormat:
    """Raises WeightsError if files of the model are missing or unreadable."""
    return PROMPT_FORMATS.get(info.architecture, chat_prompt)(info)
