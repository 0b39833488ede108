"""Options of torch.compile that have no meaning are refused by their names."""

import re

import pytest

from ndcompile.errors import NdcompileError
from ndcompile.runtime.repeated_options import check_repeated

PREPARED = {"checkpoint": None, "disable_passes": (), "memory_budget": None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"disable_passes": 3}, "options['disable_passes'] of torch.compile is 3: "),
        ({"disable_passes": iter(["seed_random_ops"])}, "Passes ['seed_random_ops'] cannot be disabled"),
        ({"disable_passes": "reuse_layers"}, "takes several names, not one string: ('reuse_layers',)."),
        ({"memory_budget": "much"}, "options['memory_budget'] of torch.compile is 'much': "),
        ({"checkpoint": 3}, "options['checkpoint'] of torch.compile is 3: "),
        ({"chekpoint": "a"}, "options['chekpoint'] is unknown."),
    ],
)
def test_an_option_without_a_meaning(given, message):
    with pytest.raises(NdcompileError, match=re.escape(message)):
        check_repeated(given, PREPARED)
