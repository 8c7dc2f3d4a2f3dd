"""The old names of the transformers engine, `megamoe_compile.integrations.*`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "transformers": ["NAME", "prepare", "prepare_empty", "register", "release"],
    "checkpoint": ["load_checkpoint"],
    "routers": ["fuse_routers"],
}


@pytest.mark.parametrize("old", NAMES)
@pytest.mark.parametrize("how", ["import megamoe_compile.integrations.{}", "from {} import *"])
def test_an_old_name_warns_at_the_importers_line(old: str, how: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    how = how.replace("from {}", "from megamoe_compile.integrations.{}").format(old)
    script = tmp_path / "importer.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, warnings
            sys.path.insert(0, {str(ROOT)!r})
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                {how}
            mine = [w for w in caught if "integrations" in str(w.message)]
            assert [w.category for w in mine] == [DeprecationWarning], mine
            assert (mine[0].filename, mine[0].lineno) == (__file__, 6), mine[0]
            assert "megamoe_compile.integrations.{old}" in str(mine[0].message)
            assert "megamoe_compile.engines.transformers" in str(mine[0].message)

            import megamoe_compile.engines.transformers as new
            was = sys.modules["megamoe_compile.integrations.{old}"]
            assert sorted(was.__all__) == {NAMES[old]!r}
            assert all(getattr(was, name) is getattr(new, name) for name in was.__all__)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_the_package_itself_does_not_warn(tmp_path: Path) -> None:
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import megamoe_compile.integrations"
    command = [sys.executable, "-W", "error::DeprecationWarning:megamoe_compile", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
