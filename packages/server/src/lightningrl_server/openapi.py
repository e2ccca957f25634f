"""The control API's description, generated from its endpoints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from lightningrl.control_api import Endpoint

__all__ = ["describe"]

_REF = "#/components/schemas/{name}"
_ARRAY = {"type": "string", "contentEncoding": "base64"}
"""Arrays of tokens and logprobs."""


def describe(endpoints: Sequence[Endpoint[Any, Any]]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    kinds = [kind for endpoint in endpoints for kind in (endpoint.body, endpoint.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, schema_hook=lambda _: _ARRAY, ref_template=_REF)
    named = dict(zip(map(repr, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, named, components)
    about = "Order rollouts, work on them, train on what they did."
    return {
        "openapi": "3.1.0",
        "info": {"title": "LightningRL", "version": "1", "summary": about},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
    }


def _operation(endpoint: Endpoint[Any, Any], named: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "integer" if name == "n" else "string"}}
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    about = " ".join((endpoint.about or inspect.getdoc(endpoint.body) or "").split())
    summary = about.partition(". ")[0].rstrip(".")
    operation: dict[str, Any] = {"summary": summary, "description": about, "tags": [endpoint.who]}
    if endpoint.body is bytes:
        binary = {"schema": {"type": "string", "format": "binary"}}
        content = {"application/x-protobuf": binary, "application/json": {"schema": {}}}
        operation["requestBody"] = {"required": True, "content": content}
    elif endpoint.body is not None and endpoint.method == "POST":
        content = {"application/json": {"schema": named[repr(endpoint.body)]}}
        operation["requestBody"] = {"required": True, "content": content}
    elif endpoint.body is not None:
        query = components[endpoint.body.__name__]
        parameters += [
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
            for name, schema in query["properties"].items()
        ]
    answers: dict[str, Any] = {"default": {"description": 'Refused: {"error": {"message": sentence, "code": …}}'}}
    if endpoint.answer is not None:
        answers["200"] = {"description": "", "content": {"application/json": {"schema": named[repr(endpoint.answer)]}}}
    else:
        answers["204"] = {"description": "Done"}
    return {**operation, "parameters": parameters, "responses": answers}
