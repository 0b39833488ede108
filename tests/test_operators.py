"""Operators of the namespace `ndcompile`."""

import re
from collections import Counter
from pathlib import Path

import ndcompile

DEFINITION = re.compile(r'(?:custom_op\(\s*"ndcompile::|\.define\(\s*")(\w+)')


def test_every_operator_is_defined_once():
    """torch lets a second definition of a name replace the first one, in nodes that exist already too."""
    root = Path(ndcompile.__file__).parent
    sources = [*root.rglob("*.py"), *(root.parent / "passes").glob("*.py")]
    names = Counter(
        name for path in {each.resolve() for each in sources} for name in DEFINITION.findall(path.read_text())
    )
    assert len(names) > 15
    assert {name for name, times in names.items() if times > 1} == set()
