"""A model's config and its tokenizer, as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from kvplane.errors import InvalidRequestError

_FLOAT: Final = "__float__"


def require_folder(folder: Path) -> None:
    """Raise InvalidRequestError, which says how to get a model's folder, unless it is one."""
    if not folder.is_dir():
        raise InvalidRequestError(
            f"{folder} is not a folder: 'hf download ORG/NAME --local-dir FOLDER' makes one",
            field="model",
        )


def read_config(folder: Path) -> Any:
    """Read the transformers config of ``folder``, as the base class if the model type is unknown.
    Raises InvalidRequestError.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    require_folder(folder)
    path = folder / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error}", field="config") from error
    except ValueError as error:
        raise InvalidRequestError(f"{path} is not JSON: {error}", field="config") from error
    name = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(name, str):
        raise InvalidRequestError("must be a string", field="config.model_type")
    try:
        kind = CONFIG_MAPPING[name]  # its get() knows only classes that were registered
    except KeyError:
        kind = PreTrainedConfig
    try:
        return kind.from_dict(fields)
    except Exception as error:  # a model's class may raise anything
        raise InvalidRequestError(
            f"{path} is refused by transformers: {error}", field="config"
        ) from error


def _special_float(fields: dict[str, Any]) -> Any:
    """Return an infinity or NaN, which transformers writes as ``{"__float__": "Infinity"}``."""
    value = fields.get(_FLOAT)
    return float(value) if len(fields) == 1 and isinstance(value, str) else fields


def encode(text: str, folder: Path) -> list[int]:
    """Return the token ids of a text, by the tokenizer in ``folder``. Raises InvalidRequestError,
    also where transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer

        return list(AutoTokenizer.from_pretrained(folder, local_files_only=True)(text)["input_ids"])
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install 'kvplane[transformers]'"
        raise InvalidRequestError(missing, field="tokenizer") from error
    except Exception as error:  # a tokenizer's class may raise anything
        raise InvalidRequestError(f"{folder}: {error}", field="tokenizer") from error
