"""Shell programs of the documents run as they stand, each in a network of its own, with default
ports free.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.helpers.documents import INDENTED, ROOT, blocks
from tests.helpers.tools import needs

SMALL: Final = {
    "KVPLANE_UP_MEMORY": "16MiB",
    "KVPLANE_DATA_PLANE_NUM_DEVICE_BLOCKS": "64",
}
ALONE: Final = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(700)]


def run(program: str, folder: Path) -> str:
    """Return what a document's program prints, together with what it starts in the background,
    which ends with it.
    """
    needs("curl", "ip")
    (folder / "models").symlink_to(ROOT / "models")
    script = f"ip link set lo up\n{program}"
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*ALONE, "bash", "-euc", script],
        cwd=folder, env=os.environ | SMALL | {"PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(
    ("page", "heading", "answer"),
    [
        ("operations.md", "Shards: one model on several data planes", "xyz"),
        ("operations.md", "A control plane that can die", "xyz"),
    ],
)
def test_the_programs_of_a_section_answer(
    page: str, heading: str, answer: str, tmp_path: Path
) -> None:
    (program,) = blocks(page, "sh", heading)
    assert answer in run(program, tmp_path)


def test_the_router_of_its_readme_answers(tmp_path: Path) -> None:
    (program,) = blocks("../integrations/router/README.md", "sh", "A router")[:1]
    assert '"text":"xyz;' in run(program, tmp_path)


def first(page: str) -> str:
    """The command that a page begins with."""
    found = INDENTED.search((ROOT / "docs" / page).read_text())
    assert found is not None
    return found[1]


def test_what_pages_begin_with_works_beside_the_model_that_is_up(tmp_path: Path) -> None:
    up, ask = first("serving.md").splitlines()
    assert first("engine-guide.md").strip() == up.partition(" #")[0].strip()
    others = [first(f"{name}.md") for name in ("operations", "runbook", "concepts", "models")]
    lines = [
        f"{up.partition(' #')[0]} &",
        "until curl -sf 127.0.0.1:8000/health; do kill -0 $!; sleep 1; done",
        *(ask, "echo", *others),
        "curl -sN --max-time 5 http://127.0.0.1:9103/events || test $? = 28",
    ]
    assert "curl -N http://127.0.0.1:9103/events" in (ROOT / "docs/operations.md").read_text()
    said = run("\n".join(lines), tmp_path)
    assert '"text":"xyz;"' in said
    assert re.search(r"default +yes +1 of 1", said), said
    assert "block hash" in said or "nothing" in said  # of explain
    assert '"block_size_tokens": 16' in said  # of layout
    assert said.count('"pools": [{') >= 1  # of the page's stream


def test_an_address_that_others_reach_is_refused_as_the_page_of_security_says(
    tmp_path: Path,
) -> None:
    program, _, remark = first("security.md").partition(" #")
    assert "exit code 2" in remark
    assert "give --tls-cert" in run(f"{program} || test $? = 2", tmp_path)


def test_a_pool_for_plug_ins_is_measured_and_its_events_are_published(tmp_path: Path) -> None:
    (start,) = re.findall(r"((?:    kvplane .*&\n)+)", (ROOT / "docs/engines.md").read_text())
    (measure,) = blocks("../integrations/chunks/README.md", "sh", "Chunks")[1:]
    (publish,) = blocks("../integrations/events/README.md", "sh", "KV events for other routers")
    lines = [
        start,
        f"for i in $(seq 60); do {measure.strip()} && break; sleep 1; done",
        f"timeout 30 {publish.strip()} 2>&1 | grep -m 1 'follows pool=default'",
    ]
    said = run("\n".join(lines), tmp_path)
    assert "GB/s" in said and "break_even_bytes_per_s" in said
