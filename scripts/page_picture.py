"""Takes a picture of the control plane's page under load: docs/page.png. Needs chromium.

make page-picture
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack

from kvplane import ControlClient
from scripts.planes import ROOT, start
from tests.helpers.browser import Browser
from tests.helpers.load import Load

PICTURE = ROOT / "docs" / "page.png"
LOOK_AFTER_S = 6
PAGE_PORT = 9103


def look() -> None:
    """Take the picture once sequences are shown."""
    with Browser(f"http://127.0.0.1:{PAGE_PORT}/", height=760) as browser:
        browser.wait_for("document.querySelectorAll('tr').length > 6")
        browser.take_picture(PICTURE)


async def main() -> None:
    """Run both planes, a load and the browser."""
    flags = ("--metrics-port", "-1", "--page-port", str(PAGE_PORT))
    pool = ("--model", str(ROOT / "models" / "recall"), "--num-device-blocks", "256")
    pool += ("--num-host-blocks", "64", "--metrics-port", "-1")
    with ExitStack() as stack:
        address = start(stack, "control_plane", *flags).address
        start(stack, "data_plane", "--control-plane", address, *pool)
        async with ControlClient(address) as client:
            await client.wait_ready("default", 60)
            engine = Load(num_sequences=12, num_prefixes=6, duration_s=12)
            load = asyncio.create_task(engine.run(client, "default"))
            await asyncio.sleep(LOOK_AFTER_S)
            await asyncio.to_thread(look)
            await load
    sys.stdout.write(f"{PICTURE}\n")


if __name__ == "__main__":
    asyncio.run(main())
