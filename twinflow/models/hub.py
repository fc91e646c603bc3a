"""From what an operator writes to a folder on disk: a path, or a Hugging Face hub id that is downloaded once."""

import re
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from twinflow.contracts.errors import ModelError

ALLOW_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]
HUB_ID = re.compile(r"[A-Za-z0-9_-][\w.-]*/[\w.-]+")


def resolve_folder(path_or_id: str) -> Path:
    """The folder of a model: an existing folder as it is, otherwise a hub id ("owner/name") through the hub's cache.

    Raises ModelError when neither exists or the hub cannot be reached.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{path_or_id} is a file; a model is a folder with config.json and safetensors files")
    if not HUB_ID.fullmatch(path_or_id):
        raise ModelError(f"model folder {path_or_id} does not exist (and is no hub id of the form owner/name)")
    try:
        return Path(snapshot_download(path_or_id, allow_patterns=ALLOW_PATTERNS))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ModelError(
            f"{path_or_id} is neither a folder here nor could it be fetched from the hub: {error}"
        ) from error


def resolve_config(path_or_id: str) -> Path:
    """The config.json of a model, and nothing else of it: the file itself, that of an existing folder, otherwise that of a
    hub id. Raises ModelError when there is none."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return path
    if path.name == "config.json" or not HUB_ID.fullmatch(path_or_id):
        raise ModelError(f"{path} does not exist (and is no hub id of the form owner/name)")
    try:
        return Path(hf_hub_download(path_or_id, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ModelError(f"{path_or_id} is neither here nor could its config.json be fetched: {error}") from error
