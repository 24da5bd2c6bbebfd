"""Validates custom resources against their definitions, as a Kubernetes API server does with strict fields."""

import yaml
from jsonschema import Draft202012Validator


def schemas(folder):
    """Read the definitions in the YAML files of a folder; returns a schema by (apiVersion, kind)."""
    found = {}
    for file in sorted(folder.glob("*.y*ml")):
        for definition in yaml.safe_load_all(file.read_text()):
            if definition and definition["kind"] == "CustomResourceDefinition":
                spec = definition["spec"]
                for version in spec["versions"]:
                    key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                    found[key] = version["schema"]["openAPIV3Schema"]
    return found


def closed(schema):
    """Return a JSON schema that refuses the fields which a structural schema does not name.

    A field with a default is not required, as the server adds it. Rules in the language CEL
    (`x-kubernetes-validations`) are not evaluated.
    """
    result = {key: schema[key] for key in schema if key not in ("properties", "items", "required")}
    fields = schema.get("properties", {})
    result["properties"] = {name: closed(field) for name, field in fields.items()}
    if "required" in schema:
        result["required"] = [n for n in schema["required"] if "default" not in fields.get(n, {})]
    if "items" in schema:
        result["items"] = closed(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = closed(schema["additionalProperties"])
    elif schema.get("type") == "object" and not (
        schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    ):
        result["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    if schema.get("nullable"):
        result = {"anyOf": [{"type": "null"}, result]}
    return result


def errors(resource, schema):
    """List what is wrong with a resource, each as the path of a field and a message."""
    schema = closed(schema)
    # The server checks metadata by its own type, which definitions do not repeat.
    schema["properties"] |= {"metadata": {"type": "object", "required": ["name"]}}
    found = Draft202012Validator(schema).iter_errors(resource)
    return [f"{error.json_path}: {error.message}" for error in found] + _repeated(resource, schema)


def _repeated(value, schema, path="$"):
    """List the elements of lists that have the keys of an earlier element."""
    found = []
    if isinstance(value, dict):
        for name, field in value.items():
            inner = schema.get("properties", {}).get(name, {})
            found += _repeated(field, inner, f"{path}.{name}")
    if isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys", ())
        seen = [tuple(element.get(key) for key in keys) for element in value if keys]
        found += [f"{path}: {it} is repeated" for it in sorted(set(seen)) if seen.count(it) > 1]
        for element in value:
            found += _repeated(element, schema.get("items", {}), f"{path}[]")
    return found
