"""Takes a picture of the control plane's page under load: docs/page.png. Needs chromium.

make page-picture
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from control_plane.server.config import ControlPlaneSettings
from control_plane.server.server import ControlPlaneServer
from data_plane.server.config import DataPlaneSettings
from data_plane.server.server import DataPlaneServer
from examples.load import Load
from kvplane import ControlClient
from tests.helpers.browser import Browser

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "page.png"
LOOK_AFTER_S = 6


def look(address: str) -> None:
    """Take the picture once sequences are shown."""
    with Browser(f"http://{address}/", height=760) as browser:
        browser.wait_for("document.querySelectorAll('tr').length > 6")
        browser.take_picture(PICTURE)


async def main() -> None:
    """Run both planes, a load and the browser."""
    control_config = ControlPlaneSettings(bind="127.0.0.1:0", metrics_port=-1, page_port=0)
    control = await ControlPlaneServer.start(control_config)
    data = await DataPlaneServer.start(
        DataPlaneSettings(
            control_plane=control.address,
            bind="127.0.0.1:0",
            model=ROOT / "models" / "recall",
            num_device_blocks=256,
            num_host_blocks=64,
            metrics_port=-1,
        )
    )
    await asyncio.wait_for(data.registered.wait(), 60)
    async with ControlClient(control.address) as client:
        engine = Load(num_sequences=12, num_prefixes=6, pause_s=0.02, duration_s=12)
        load = asyncio.create_task(engine.run(client, "default"))
        await asyncio.sleep(LOOK_AFTER_S)
        await asyncio.to_thread(look, control.page_address)
        await load
    await data.stop()
    await control.stop()
    sys.stdout.write(f"{PICTURE}\n")


if __name__ == "__main__":
    asyncio.run(main())
