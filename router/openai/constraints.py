"""Constraints on the output as clients write them: OpenAI's `response_format`, vLLM's `structured_outputs` and, from
before it, `guided_…`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from kvferry.errors import InvalidArgument
from proto.kvferry.v1 import inference_pb2 as pb
from router.openai.body import AtFirstFault, Body, Strings

Json = dict[str, Any]


GUIDED_NAMES = MappingProxyType(
    {"json_schema": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}
)
STRUCTURED_NAMES = MappingProxyType({"json_schema": "json"})


class JsonSchemaFormat(Body):
    """`response_format.json_schema`; name and description are for the model's eyes and reach no prompt here."""

    name: str
    schema_: Json = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's, and vLLM's structural tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[tuple[Json, ...], AtFirstFault()] | None = None
    triggers: Strings | None = None

    def constraints(self) -> dict[str, object]:
        """By field of GenerateRequest."""
        if self.type == "json_schema" and self.json_schema is None:
            raise InvalidArgument("response_format.json_schema", "is missing; the type json_schema needs it")
        if self.type != "json_schema" and self.json_schema is not None:
            raise InvalidArgument("response_format.json_schema", "is only for the type json_schema")
        if (self.type == "structural_tag") != (self.structures is not None or self.triggers is not None):
            raise InvalidArgument("response_format", "structures and triggers go with the type structural_tag alone")
        if self.type == "structural_tag":
            return {"structural_tag": json.dumps({"structures": self.structures, "triggers": self.triggers})}
        if self.json_schema is not None:
            return {"json_schema": json.dumps(self.json_schema.schema_)}
        return {"json_object": True} if self.type == "json_object" else {}


class StructuredOutputs(Body):
    """vLLM's."""

    json_: Json | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None


class ConstraintFields(Body):
    """At most one of these may constrain."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None

    def constrain(self, message: pb.GenerateRequest) -> None:
        """Sets the constraint. Raises InvalidArgument where there is more than one."""
        if self.structured_outputs is not None and self.structured_outputs.disable_any_whitespace is not None:
            message.compact_json = self.structured_outputs.disable_any_whitespace
        found = [*self._of_format().items(), *self._of_guided().items(), *self._of_structured().items()]
        if len(found) > 1:
            raise InvalidArgument("response_format", "more than one constraint on the output is set")
        for name, value in found:
            if name == "choice":
                message.choice.SetInParent()
                message.choice.choices.extend(value)
            else:
                setattr(message, name, value)

    @property
    def constraint_names(self) -> Mapping[str, str]:
        """Where the constraint stands in the body, by its field of GenerateRequest; empty for none."""
        in_format = {"json_schema": ".json_schema.schema"}
        return {
            **{name: f"response_format{in_format.get(name, '')}" for name in self._of_format()},
            **{name: GUIDED_NAMES[name] for name in self._of_guided()},
            **{name: f"structured_outputs.{STRUCTURED_NAMES.get(name, name)}" for name in self._of_structured()},
        }

    def _of_format(self) -> Mapping[str, Any]:
        return {} if self.response_format is None else self.response_format.constraints()

    def _of_guided(self) -> Mapping[str, Any]:
        fields = {
            "json_schema": _schema(self.guided_json),
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        return _set(fields)

    def _of_structured(self) -> Mapping[str, Any]:
        of = self.structured_outputs
        if of is None:
            return {}
        fields = {
            "json_schema": _schema(of.json_),
            "regex": of.regex,
            "choice": of.choice,
            "grammar": of.grammar,
            "json_object": of.json_object or None,
            "structural_tag": of.structural_tag,
        }
        return _set(fields)


def _schema(schema: Json | str | None) -> str | None:
    return schema if schema is None or isinstance(schema, str) else json.dumps(schema)


def _set(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
