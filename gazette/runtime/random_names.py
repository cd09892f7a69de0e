"""Names for processes without a configured name: two words, which people can tell apart."""

from __future__ import annotations

import random
from typing import Final

_ADJECTIVES: Final = """
able amber apt bold brave brief bright brisk calm candid civil clear clever cosy crisp curious
deft eager early easy fair fast fine firm fond frank free fresh gentle glad golden good grand
great happy hardy honest humble ideal jolly just keen kind lively loyal lucid lucky mellow merry
mild modest neat nimble noble patient plain polite prime proper proud quick quiet rapid ready
robust rosy serene sharp silent simple sleek smart smooth snug social solid sound spry square
steady still stout strong sturdy subtle sunny super sure sweet swift tender tidy topical trim
true trusty upbeat usable valid vital vivid warm wise witty worthy zesty"""
_NOUNS: Final = """
acorn alder anchor arrow aspen badger beacon beech birch bison bramble breeze brook buffalo
cedar cherry clover comet coral cove crane creek dahlia daisy delta dove eagle ember falcon fern
finch fjord forest fox garnet gecko glacier grove gull harbor hare hawk hazel heron hollow ibex
iris island ivy jasmine juniper kestrel kite lagoon lake larch lark laurel lichen lily linden
lotus lynx maple marten meadow merlin mesa moss nectar oak ocean olive orchid osprey otter owl
panda pebble petal pine plover pond poplar puffin quail quartz raven reef ridge river robin
rowan sable sequoia shore sparrow spruce stork stream summit swallow swan tern thistle thrush
tiger tulip tundra valley violet walnut willow wren yarrow zephyr"""


def two_words(rng: random.Random) -> str:
    """Return a name such as ``topical-buffalo``. Some ten thousand are possible, so check for conflicts."""
    return f"{rng.choice(_ADJECTIVES.split())}-{rng.choice(_NOUNS.split())}"
