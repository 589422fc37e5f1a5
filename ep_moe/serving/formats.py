"""The grammars that requests ask for: a JSON schema, a regular expression, a choice of texts, or a grammar's own text.

Under the names of OpenAI (`response_format`), vLLM (`structured_outputs`, `guided_*`) and SGLang (`json_schema`,
`regex`, `ebnf`). llguidance reads them; this module brings them into its form.
"""

import json
import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ep_moe.grammar import MOST_BYTES, is_installed
from ep_moe.serving.scheduler import BadRequestError

# between the parts of JSON: a model that is free to write any white space may write nothing else
WHITESPACE = r"( |\n[ \t]{0,20})?"
_OBJECT = {"type": "object"}

Schema = dict[str, Any] | bool | str


class _Format(BaseModel):
    model_config = ConfigDict(extra="forbid")


class JsonSchema(_Format):
    """`response_format.json_schema`; the schema is always kept to, `strict` or not."""

    name: str = ""
    description: str | None = None
    schema_: Schema = Field(default=True, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Format):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> str:
        """llguidance's grammar, "" for any text. Errors: BadRequestError."""
        if self.type == "json_schema":
            if self.json_schema is None:
                raise BadRequestError("response_format.json_schema is missing", "response_format")
            return json_grammar(self.json_schema.schema_)
        return json_grammar(_OBJECT) if self.type == "json_object" else ""


class StructuredOutputs(_Format):
    """vLLM's `structured_outputs`: one of the first five."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool = False
    disable_additional_properties: Literal[False] = False
    structural_tag: None = None

    def grammars(self, whitespace: str | None = None) -> list[str]:
        """llguidance's grammars, one unless the client has asked for none or several. Errors: BadRequestError.

        Args:
            whitespace: the pattern if this has none.
        """
        own = whitespace if self.whitespace_pattern is None else self.whitespace_pattern
        whitespace = "" if self.disable_any_whitespace else own
        found = [json_grammar(self.json_, whitespace)] if self.json_ is not None else []
        found += [json_grammar(_OBJECT, whitespace)] if self.json_object else []
        found += [_grammar(lark_grammar=f"start: /{_quoted(self.regex)}/")] if self.regex is not None else []
        found += [_choice(self.choice)] if self.choice is not None else []
        found += [_own(self.grammar)] if self.grammar is not None else []
        return found


def json_grammar(schema: Schema, whitespace: str | None = None) -> str:
    """llguidance's grammar of a JSON schema.

    Args:
        schema: or its JSON text. whitespace: regular expression of what may stand between parts; None for the default.
    Errors: BadRequestError for a text that is no JSON.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the JSON schema is not valid JSON: {error}") from None
    return _grammar(json_schema=guided(schema, whitespace))


def guided(schema: Any, whitespace: str | None = None) -> Any:
    """A schema with what llguidance is told besides. One that is no object stays, llguidance refuses it."""
    if isinstance(schema, bool):
        schema = {"anyOf": [schema]}
    if not isinstance(schema, dict):
        return schema
    pattern = WHITESPACE if whitespace is None else whitespace
    spaces: dict[str, Any] = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return schema | {"x-guidance": spaces}


def text_of(value: Any) -> str:
    """JSON. Errors: BadRequestError for a value that is nested too deeply, or holds half of a character."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except RecursionError:
        raise BadRequestError("the schema is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise BadRequestError(f"the schema holds {error.object[error.start]!r}, half of a character") from None
    return text


def _grammar(**content: Any) -> str:
    return text_of({"grammars": [content]})


def _quoted(regex: str) -> str:
    """A regular expression between the slashes of Lark: with others, and line breaks, escaped."""
    return re.sub(r"(\\.)|/|\n", lambda found: found[1] or {"/": r"\/", "\n": r"\n"}[found[0]], regex, flags=re.DOTALL)


def _choice(texts: list[str]) -> str:
    return _grammar(lark_grammar="start: " + " | ".join(json.dumps(text) for text in texts))


def _own(text: str) -> str:
    """A grammar in Lark's syntax, or in GBNF, in which rules are written with `::=`."""
    size = len(text.encode())
    if size > MOST_BYTES:  # the conversion of a long one takes seconds
        raise BadRequestError(f"the grammar has {size} bytes, the limit is {MOST_BYTES}")
    if "::=" in text and is_installed():
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # noqa: BLE001 - of a parser of others, for a client's text
            raise BadRequestError(f"the grammar cannot be read: {error}") from None
    return _grammar(lark_grammar=text)
