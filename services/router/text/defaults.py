"""What the model itself says of how to sample: `generation_config.json`, used where a client says nothing."""

from dataclasses import dataclass, fields
from pathlib import Path

from services.router.text.templates import read_json
from twinflow.contracts.errors import ModelError


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """OpenAI's own defaults, where the model has none. `top_k` 0 = off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def load_sampling_defaults(folder: str | Path) -> SamplingDefaults:
    """Raises ModelError for a value that is no number. Other settings of the file (beams, lengths) are not defaults here."""
    path = Path(folder) / "generation_config.json"
    given = read_json(path)
    found: dict[str, float | int] = {}
    for field in fields(SamplingDefaults):
        value = given.get(field.name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{path}: {field.name}={value!r} is no number")
        found[field.name] = int(value) if field.name == "top_k" else float(value)
    return SamplingDefaults(**found)  # type: ignore[arg-type]
