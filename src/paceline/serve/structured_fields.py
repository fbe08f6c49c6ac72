"""What the output of a request must match, from any of the fields that say so."""

from __future__ import annotations

import json
from typing import Any

from paceline.core.types import StructuredOutput
from paceline.errors import OptionError
from paceline.serve.errors import ApiError
from paceline.serve.output_schema import OutputParams, ResponseFormatParam, StructuredOutputsParam


def structured_output(
    response_format: ResponseFormatParam | None, body: OutputParams | None = None
) -> StructuredOutput | None:
    """What the output must match. Raises ApiError where fields say different things, or OptionError."""
    given: dict[str, StructuredOutput] = {}
    if response_format is not None and response_format.type != "text":
        given["response_format"] = _of_response_format(response_format)
    if body is not None:
        given |= _of_fields(body)
    if len(given) > 1:
        names = " and ".join(given)
        raise ApiError(400, f"an output matches one thing, but {names} are given; keep one of them", param=[*given][-1])
    return next(iter(given.values()), None)


def _of_fields(body: OutputParams) -> dict[str, StructuredOutput]:
    fields: list[tuple[str, str, Any]] = [
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("grammar", "grammar", body.grammar or None),
        ("json_schema", "json_schema", body.json_schema),
        ("regex", "regex", body.regex),
        ("ebnf", "grammar", body.ebnf),
    ]
    if body.structured_outputs is not None:
        fields += _of_structured_outputs(body.structured_outputs)
    return {name: StructuredOutput(kind, _text(value)) for name, kind, value in fields if value is not None}


def _of_structured_outputs(params: StructuredOutputsParam) -> list[tuple[str, str, Any]]:
    prefix = "structured_outputs"
    fields: list[tuple[str, str, Any]] = [
        (f"{prefix}.json", "json_schema", params.json_),
        (f"{prefix}.regex", "regex", params.regex),
        (f"{prefix}.choice", "choice", params.choice),
        (f"{prefix}.grammar", "grammar", params.grammar),
        (f"{prefix}.json_object", "json_object", "" if params.json_object else None),
        (f"{prefix}.structural_tag", "structural_tag", params.structural_tag),
    ]
    if all(value is None for _, _, value in fields) and params.json_object is not False:
        message = "structured_outputs needs json, regex, choice, grammar, json_object or structural_tag"
        raise ApiError(400, message, param=prefix)
    return fields


def _of_response_format(response_format: ResponseFormatParam) -> StructuredOutput:
    kind = response_format.type
    if kind in ("json_object", "json_schema"):
        return _of_json(response_format)
    if kind == "structural_tag":
        tags = response_format.model_dump(include={"structures", "triggers", "format"}, exclude_none=True)
        return StructuredOutput(kind, _text(tags))
    value = response_format.pattern if kind == "regex" else response_format.grammar
    if value is None:
        name = "pattern" if kind == "regex" else "grammar"
        raise ApiError(400, f"response_format {kind} needs its {name}", param="response_format")
    return StructuredOutput(kind, value)


def _of_json(response_format: ResponseFormatParam) -> StructuredOutput:
    schema = response_format.json_schema.schema_ if response_format.json_schema else response_format.schema_
    if response_format.type == "json_schema" and response_format.json_schema is None and schema is None:
        raise ApiError(400, "response_format json_schema needs its json_schema", param="response_format")
    return StructuredOutput("json_schema" if schema else response_format.type, _text(schema) if schema else "")


def _text(value: Any) -> str:
    try:
        return value if isinstance(value, str) else json.dumps(value)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the JSON schema cannot be read: {error}") from error
