"""Validates objects against the schemas of custom resource definitions, as strictly as `kubectl apply --validate`."""

import yaml
from jsonschema import Draft4Validator
from jsonschema.exceptions import best_match

# Groups of Kubernetes itself; kustomize.config.k8s.io is kubectl's.
BUILT_IN = {"", "apps", "autoscaling", "policy", "networking.k8s.io", "kustomize.config.k8s.io"}
# Kubernetes checks these without a schema.
_ROOT = {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}}  # fmt: skip
_INT_OR_STRING = {"anyOf": [{"type": "integer"}, {"type": "string"}]}


def strict(schema):
    """Return a structural schema (openAPIV3Schema) as a JSON schema that refuses unknown fields.

    Rules in CEL (`x-kubernetes-validations`) are not evaluated.
    """
    if schema.get("x-kubernetes-int-or-string"):
        return _INT_OR_STRING
    found = {
        key: value
        for key, value in schema.items()
        if not key.startswith("x-") and key not in ("description", "default", "format", "nullable")
    }
    for key in ("allOf", "anyOf", "oneOf"):  # constraints without fields of their own
        if key in found:
            found[key] = [_constraint(part) for part in found[key]]
    if "properties" in found:
        found["properties"] = {name: strict(it) for name, it in found["properties"].items()}
    if isinstance(found.get("items"), dict):
        found["items"] = strict(found["items"])
    if isinstance(found.get("additionalProperties"), dict):
        found["additionalProperties"] = strict(found["additionalProperties"])
    elif found.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if schema.get("nullable"):
        return {"anyOf": [{"type": "null"}, found]}
    return found


def validators(folder):
    """Return a validator for each `apiVersion` and `kind` that the definitions in a folder serve."""
    found = {}
    for file in sorted(folder.glob("*.y*ml")):
        for definition in yaml.safe_load_all(file.read_text()):
            spec = definition["spec"]
            for version in spec["versions"]:
                if version["served"]:
                    schema = strict(version["schema"]["openAPIV3Schema"])
                    schema["properties"] |= _ROOT
                    key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    found[key] = Draft4Validator(schema)
    return found


def error_of(validator, instance):
    """Return what is wrong with an object and where, or None."""
    error = best_match(validator.iter_errors(instance))
    return error and f"{error.json_path}: {error.message}"


def _constraint(schema):
    return {key: value for key, value in schema.items() if not key.startswith("x-")}
