"""The table: every bug that is looked for."""

from __future__ import annotations

from tests.mutations.beside import BESIDE
from tests.mutations.bug import Bug
from tests.mutations.caches import CACHES
from tests.mutations.files import FILES
from tests.mutations.lines import LINES
from tests.mutations.links import LINKS
from tests.mutations.patches import SIGHT
from tests.mutations.projector import PROJECTOR
from tests.mutations.tower import TOWER
from tests.mutations.weights import WEIGHTS
from tests.mutations.words import WORDS

BUGS: tuple[Bug, ...] = (*WEIGHTS, *FILES, *WORDS, *LINES, *LINKS, *CACHES, *SIGHT, *TOWER, *PROJECTOR, *BESIDE)
