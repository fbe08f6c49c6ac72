"""A model's chat template, and what it says of the model: how it calls tools, how it reasons, what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.errors import OptionError
from paceline.serve.config import ServerConfig
from paceline.serve.reasoning import ReasoningFormat, detect_reasoning, reasoning_format
from paceline.serve.tools.registry import ToolFormat, detect, tool_format

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The text of a template, and the formats of the outputs it leads to.

    override  the text where it replaces the model's own template
    tools     None: outputs are not searched for tool calls
    """

    text: str
    override: str | None
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @property
    def takes_tools(self) -> bool:
        return "tools" in self.text

    def knows(self, name: str) -> bool:
        """Whether the template reads this variable."""
        return name in self.text


def chat_template(own: str, config: ServerConfig) -> ChatTemplate:
    """The template of a server. own: the model's. Raises OptionError."""
    override = None if config.chat_template is None else template_text(config.chat_template)
    text = own if override is None else override
    return ChatTemplate(text, override, _tools(text, config.tool_parser), _reasoning(text, config.reasoning_parser))


def _tools(text: str, name: str) -> ToolFormat | None:
    if name == NONE:
        return None
    return detect(text) if name == AUTO else tool_format(name)


def _reasoning(text: str, name: str) -> ReasoningFormat | None:
    if name == NONE:
        return None
    return detect_reasoning(text) if name == AUTO else reasoning_format(name)


def template_text(value: str) -> str:
    """A template given as a file or as it is. Raises OptionError."""
    if "{%" in value or "{{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"the chat template {value} cannot be read: {error}") from error
