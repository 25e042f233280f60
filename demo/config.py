"""Settings of the demonstration; every field is a flag and an environment variable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvplane.errors import InvalidRequestError
from kvplane.serving.observability.logs import LEVELS
from kvplane.serving.settings import setting

ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Start both planes, serve dozens of prompts, and compare greedy answers with transformers.

    Exits with 0 only when all is right and the planes counted every kind of work.
    """

    model: Path = setting(ROOT / "models" / "recall", help="Folder of the recall model.")
    quick: bool = setting(False, help="Fewer prompts in a smaller pool.")
    num_device_blocks: int = setting(
        0, unit="blocks", minimum=0, help="Device blocks; 0 takes so few that the pool runs short."
    )
    num_host_blocks: int = setting(
        0, unit="blocks", minimum=0, help="Host blocks; 0 takes so few that the tier runs short."
    )
    seed: int = setting(0, minimum=0, help="Seed of the prompts.")
    run_folder: Path = setting(ROOT / ".run", help="Folder of the planes' logs.")
    log_level: str = setting("warning", choices=LEVELS, help="Least severe log level written.")

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise InvalidRequestError(
                f"{self.model} is not a model's folder: it has no config.json", field="model"
            )
