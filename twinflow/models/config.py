"""Reading a model's config.json: required keys, refused features, facts shared by all families."""

from dataclasses import dataclass
from typing import Any

from twinflow.contracts.errors import ModelError, Unsupported

DTYPES = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
}


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Typed access to a config's keys with errors that name the key."""

    values: dict[str, Any]
    name: str  # of the model or architecture, for messages

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises ModelError when it is missing (without a default) or something else."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ModelError(f"{self.name}: config has no {key!r}")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self.name}: config {key}={value!r} must be a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """A number. Raises ModelError for anything else."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"{self.name}: config {key}={value!r} must be a number")
        return float(value)

    def only(self, key: str, *allowed: object) -> None:
        """Refuses (Unsupported, by name) a key set to something other than `allowed`; absent or null is fine."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            wanted = " or ".join(repr(a) for a in allowed)
            raise Unsupported(f"{self.name}: {key}={value!r} is not supported (only {wanted})", param=key)


def refuse_quantised(config: dict[str, Any], name: str) -> None:
    """Raises Unsupported, naming the method, when a config describes quantised weights."""
    text = config.get("text_config") or {}
    for part in (config, text):
        quantised = part.get("quantization_config") or part.get("compression_config")
        if quantised:
            method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
            raise Unsupported(
                f"{name}: quantised checkpoints are not supported (quant_method {method!r}); use the unquantised model",
                param="quantization_config",
            )


def eos_token_ids(config: dict[str, Any], generation_config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-text ids: generation_config.json decides, then config.json, then its text_config; () when none says."""
    for part in (generation_config, config, config.get("text_config") or {}):
        value = part.get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def resolve_dtype(dtype: str, config: dict[str, Any], stored: str | None = None) -> str:
    """The model's dtype by name. "auto": the config's own, then that of the stored weights (as safetensors names it),
    then float32. Raises Unsupported for a dtype that is not float32, bfloat16 or float16."""
    if dtype == "auto":
        text = config.get("text_config") or {}
        found = [part.get(key) for part in (text, config) for key in ("dtype", "torch_dtype")]
        dtype = next((str(d) for d in found if d), stored or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise Unsupported(f"dtype {dtype!r} is not supported (only auto, float32, bfloat16, float16)", param="dtype")
    return DTYPES[dtype]
